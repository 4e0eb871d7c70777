"""AMX: tiles, registers of up to 16 rows of 64 bytes, and instructions that multiply the matrices in them.

An instruction adds the product of two tiles to a third one. The left one holds rows of a matrix. The right one holds
four rows of its matrix in each of its own, the four bytes of one column side by side; pairs of bf16 likewise. See
Intel's Architectures Optimization Reference Manual, chapter "Intel Advanced Matrix Extensions".
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from struct import pack
from typing import Any, Final

from llvmlite import ir

from opweave_cpu.jit.compiler import target
from opweave_cpu.jit.vectors import declared
from opweave_cpu.jit.writer import Writer

__all__ = ["ROWS", "ROW_BYTES", "Tiles", "has_tiles", "tiles"]

ROWS: Final = 16
"""Rows of a tile at most."""

ROW_BYTES: Final = 64
"""Bytes of its rows at most."""

_I8: Final = ir.IntType(8)
_I64: Final = ir.IntType(64)
_POINTER: Final = _I8.as_pointer()
_REGISTERS: Final = 8

_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


@cache
def _permitted() -> bool:
    """Whether Linux lets this process use tiles, whose contents make the state of each thread larger."""
    if not sys.platform.startswith("linux"):
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return int(call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST_PERMISSION), ctypes.c_long(_TILE_DATA))) == 0


def has_tiles(kind: str) -> bool:
    """Whether the processor multiplies tiles of ``kind``, ``"int8"`` or ``"bf16"``, and the system allows it."""
    return {"amx-tile", f"amx-{kind}"} <= target().features and _permitted()


class Tiles:
    """The tile registers, while a kernel is written: by number, below 8."""

    def __init__(self, code: Any) -> None:
        self._code = code

    def zero(self, tile: int) -> None:
        self._call("tilezero", _I8(tile))

    def load(self, tile: int, address: Any, stride: int | Any) -> None:
        """Rows that lie ``stride`` bytes apart."""
        self._move("tileloadd64", tile, address, stride)

    def store(self, tile: int, address: Any, stride: int | Any) -> None:
        self._move("tilestored64", tile, address, stride)

    def multiply(self, kind: str, into: int, left: int, right: int) -> None:
        """Adds a product: with ``kind`` ``"int8"`` of signed bytes as i32, with ``"bf16"`` as f32."""
        self._call("tdpbssd" if kind == "int8" else "tdpbf16ps", _I8(into), _I8(left), _I8(right))

    def _move(self, name: str, tile: int, address: Any, stride: int | Any) -> None:
        distance = _I64(stride) if isinstance(stride, int) else stride
        self._call(name, _I8(tile), self._code.inttoptr(address, _POINTER), distance)

    def _call(self, name: str, *values: Any) -> None:
        function = declared(self._code, f"llvm.x86.{name}", ir.VoidType(), [value.type for value in values])
        self._code.call(function, values)


@contextmanager
def tiles(writer: Writer, shapes: Mapping[int, tuple[int, int]]) -> Iterator[Tiles]:
    """Code that uses tiles. The configuration that the thread had before is loaded again behind it: other libraries
    load theirs once for a thread.

    Args:
        shapes: rows, and bytes of a row, of each tile.
    """
    code = writer.code
    rows, widths = [0] * _REGISTERS, [0] * _REGISTERS
    for tile, (height, width) in shapes.items():
        rows[tile], widths[tile] = height, width
    config = pack("<BB14x8H16x8B8x", 1, 0, *widths, *rows)
    kind = ir.ArrayType(_I8, len(config))
    ours, before = writer.array(kind, 1), writer.array(kind, 1)
    code.store(ir.Constant(kind, bytearray(config)), code.inttoptr(ours, kind.as_pointer()))
    for name, place in (("sttilecfg", before), ("ldtilecfg", ours)):
        _configure(code, name, place)
    yield Tiles(code)
    _configure(code, "ldtilecfg", before)


def _configure(code: Any, name: str, place: Any) -> None:
    code.call(declared(code, f"llvm.x86.{name}", ir.VoidType(), [_POINTER]), [code.inttoptr(place, _POINTER)])
