"""Copies of rows, whose elements lie side by side, shared among threads: NumPy copies in one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import load
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved, walk_over
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tunables import COMPILED_WORK

__all__ = ["KINDS", "bind_joined", "bind_picked", "bind_put"]

KINDS: Final = {2: "i16", 4: "i32", 8: "i64"}
"""By bytes of an element: the integers as which elements are moved."""

WORK: Final = 3
"""Elementary operations for one element: it is read and written."""

VECTORS: Final = 4
"""Vectors that are copied at a time."""

_I64: Final = ir.IntType(64)


def _kind(*args: Arg) -> str | None:
    """As what the elements of operands of one type are moved, ``None`` where NumPy alone can move them."""
    dtype, raw = args[0].dtype, all(arg.buffer_type is None or arg.buffer_type.is_raw for arg in args)
    return KINDS.get(dtype.itemsize) if raw and not dtype.is_quantized else None


def _is_shared(arg: Arg) -> bool:
    """Whether threads are woken to share the work of moving all elements of an operand."""
    return arg.size * WORK >= COMPILED_WORK.value


def bind_joined(stream: Stream, out: Arg, srcs: Sequence[Arg], axis: int) -> list[Call] | None:
    """The calls that put ``srcs`` side by side along an axis of ``out``; ``None`` where NumPy is as fast, or the rows
    of an operand have gaps."""
    kind, item = _kind(*srcs, out), out.dtype.itemsize
    if kind is None or not _is_shared(out):
        return None
    calls, start = [], 0
    for src in srcs:
        if src.size:
            into = moved(out, start * out.strides[axis])
            walk = walk_over(src.shape, [src.strides, out.strides])
            if any(strides[-1] != item for strides in walk.strides):
                return None
            key = len(walk.lengths), (Operand(kind, item), Operand(kind, item))
            code = stream.artefact(("copy", key), partial(_copy, *key))
            calls.append(bind_walk(stream, code, walk, [src, into], work=WORK))
        start += src.shape[axis]
    return calls


def bind_picked(stream: Stream, out: Arg, table: Arg, ids: Arg) -> Call | None:
    """The call that copies the rows of a table that ``ids`` names, all of them in range, to ``out``; ``None`` where
    NumPy is as fast, or an operand is not dense."""
    kind, item = _kind(table, out), out.dtype.itemsize
    if kind is None or not (_is_shared(out) and table.is_dense and ids.is_dense and out.is_dense):
        return None
    row = prod(table.shape[1:])
    walk = Walk((ids.size, row), ((0, item), (ids.dtype.itemsize, 0), (row * item, item)), 1)
    code = stream.artefact(("pick", kind, ids.dtype.name), partial(_pick, kind, item, ids.dtype.name))
    return bind_walk(stream, code, walk, [table, ids, out], [row * item], work=WORK)


def bind_put(stream: Stream, out: Arg, ids: Arg, rows: Arg) -> Call | None:
    """The call that copies ``rows`` one after the other to those of ``out`` that ``ids`` names, all of them in range;
    ``None`` where an operand is not dense, or NumPy is as fast: its call takes as long as copying small rows."""
    kind, item = _kind(out, rows), out.dtype.itemsize
    if kind is None or _is_shared(rows) or not (out.is_dense and ids.is_dense and rows.is_dense):
        return None
    row, index = prod(out.shape[1:]), ids.dtype
    walk = Walk((ids.size, row), ((row * item, item), (index.itemsize, 0), (0, item)), 0)
    code = stream.artefact(("put", kind, index.name), partial(_put, kind, item, index.name))
    return bind_walk(stream, code, walk, [rows, ids, out], [row * item], work=WORK)


def _copy(axes: int, operands: Sequence[Operand]) -> MachineCode:
    writer = Writer(axes, operands)
    with writer.rows() as (x, out):
        _copy_row(writer, (0, x), (1, out))
    return MachineCode(writer.end())


def _pick(kind: str, item: int, ids: str) -> MachineCode:
    writer = Writer(2, [Operand(kind, item), Operand(ids, 0), Operand(kind, item)])
    nbytes = writer.integer()
    with writer.rows() as (table, place, out):
        _copy_row(writer, (0, _row_of(writer, table, place, ids, nbytes)), (2, out))
    return MachineCode(writer.end())


def _put(kind: str, item: int, ids: str) -> MachineCode:
    writer = Writer(2, [Operand(kind, item), Operand(ids, 0), Operand(kind, item)])
    nbytes = writer.integer()
    with writer.rows() as (row, place, out):
        _copy_row(writer, (0, row), (2, _row_of(writer, out, place, ids, nbytes)))
    return MachineCode(writer.end())


def _row_of(writer: Writer, table: Any, place: Any, ids: str, nbytes: Any) -> Any:
    """The address of the row of a table whose number lies at ``place``."""
    code = writer.code
    number = load(code, ir.IntType(32 if ids == "i32" else 64), place)
    number = code.sext(number, _I64) if ids == "i32" else number
    return code.add(table, code.mul(number, nbytes))


def _copy_row(writer: Writer, source: tuple[int, Any], target: tuple[int, Any]) -> None:
    def element(i: Any, mask: Any, _: int) -> None:
        writer.write(*target, i, writer.read(*source, i, mask), mask)

    writer.elements(element, VECTORS)
