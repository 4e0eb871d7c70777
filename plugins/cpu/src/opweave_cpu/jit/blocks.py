"""Decoding of quantized blocks in registers: what the bytes of a block mean, 16 values at a time.

The formats are those of GGUF files. The arithmetic is in the order of `opweave.ops.blocks`, so that values are equal to
the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from llvmlite import ir

from opweave.graph.dtypes import DType
from opweave_cpu.jit.vectors import LANES, TYPES, Vector, vector_type
from opweave_cpu.jit.writer import Writer

__all__ = ["DECODERS", "Block", "decoded"]

_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_HALF: Final = ir.HalfType()


class Block:
    """One block, while a kernel is written.

    Args:
        address: of its first byte.
    """

    def __init__(self, writer: Writer, address: Any) -> None:
        self._writer, self._code, self._address = writer, writer.code, address

    def _load(self, kind: Any, at: int) -> Any:
        code = self._code
        return code.load(code.inttoptr(code.add(self._address, _I64(at)), kind.as_pointer()), align=1)

    def half(self, at: int) -> Any:
        """The f16 at that byte, as f32."""
        return self._code.fpext(self._load(_HALF, at), TYPES["f32"])

    def byte(self, at: int) -> Any:
        """The byte there, as i32."""
        return self._code.zext(self._load(TYPES["i8"], at), _I32)

    def signed(self, at: int) -> Any:
        """The signed byte there, as f32."""
        return self._code.sitofp(self._load(TYPES["i8"], at), TYPES["f32"])

    def bytes(self, at: int) -> Vector:
        """`LANES` bytes from there on."""
        return Vector(self._code, self._load(vector_type("i8"), at), "i8")

    def bits(self, at: int, first: int) -> Vector:
        """`LANES` bits of the i32 there, from bit ``first`` on, each in a lane and times 16."""
        word = self._writer.splat(self._load(_I32, at), "i32")
        lanes = ir.Constant(vector_type("i32"), list(range(first, first + LANES)))
        return ((Vector(self._code, self._code.lshr(word.value, lanes), "i32") & 1) << 4).to("i8")

    def splat(self, value: Any) -> Vector:
        """An f32 in all lanes."""
        return self._writer.splat(value, "f32")

    def scales(self, at: int, j: int) -> tuple[Any, Any]:
        """Scale and minimum of part ``j`` of 8, each of 6 bits, of the 12 bytes there, as f32."""
        code = self._code
        if j < 4:
            scale, least = (code.and_(self.byte(at + k), _I32(63)) for k in (j, j + 4))
        else:
            both, first, second = self.byte(at + j + 4), self.byte(at + j - 4), self.byte(at + j)
            scale = code.or_(code.and_(both, _I32(15)), code.shl(code.lshr(first, _I32(6)), _I32(4)))
            least = code.or_(code.lshr(both, _I32(4)), code.shl(code.lshr(second, _I32(6)), _I32(4)))
        return code.sitofp(scale, TYPES["f32"]), code.sitofp(least, TYPES["f32"])

    def times(self, a: Any, b: Any) -> Any:
        """The product of two f32."""
        return self._code.fmul(a, b)


def _float(x: Vector) -> Vector:
    return x.to("i32").to("f32")


def _q8_0(block: Block) -> Iterator[Vector]:
    scale = block.splat(block.half(0))
    for at in (2, 18):
        yield _float(block.bytes(at)) * scale


def _nibbles(x: Vector) -> tuple[Vector, Vector]:
    return x & 15, x.shifted(4)


def _q4_0(block: Block) -> Iterator[Vector]:
    scale = block.splat(block.half(0))
    for part in _nibbles(block.bytes(2)):
        yield _float(part - 8) * scale


def _q4_1(block: Block) -> Iterator[Vector]:
    scale, least = block.splat(block.half(0)), block.splat(block.half(2))
    for part in _nibbles(block.bytes(4)):
        yield _float(part) * scale + least


def _q5_0(block: Block) -> Iterator[Vector]:
    scale = block.splat(block.half(0))
    for i, part in enumerate(_nibbles(block.bytes(6))):
        yield _float((part | block.bits(2, LANES * i)) - 16) * scale


def _q5_1(block: Block) -> Iterator[Vector]:
    scale, least = block.splat(block.half(0)), block.splat(block.half(2))
    for i, part in enumerate(_nibbles(block.bytes(8))):
        yield _float(part | block.bits(4, LANES * i)) * scale + least


def _in_parts(block: Block, quants: int, upper: int | None) -> Iterator[Vector]:
    """Eight parts of 32 values, two of them in each 32 bytes; their fifth bits in the bytes at ``upper``."""
    whole, least = block.half(0), block.half(2)
    for chunk in range(4):
        for high in (0, 1):
            part = 2 * chunk + high
            scale, minimum = block.scales(4, part)
            factor, offset = block.splat(block.times(whole, scale)), block.splat(block.times(least, minimum))
            for half in (0, LANES):
                q = _nibbles(block.bytes(quants + 32 * chunk + half))[high]
                if upper is not None:
                    q = q | ((block.bytes(upper + half).shifted(part) & 1) << 4)
                yield _float(q) * factor - offset


def _q4_k(block: Block) -> Iterator[Vector]:
    yield from _in_parts(block, 16, None)


def _q5_k(block: Block) -> Iterator[Vector]:
    yield from _in_parts(block, 48, 16)


def _q6_k(block: Block) -> Iterator[Vector]:
    whole = block.half(208)
    for n in (0, 1):
        for quarter in range(4):
            for half in (0, 1):
                low = _nibbles(block.bytes(64 * n + 32 * (quarter % 2) + LANES * half))[quarter // 2]
                high = (block.bytes(128 + 32 * n + LANES * half).shifted(2 * quarter) & 3) << 4
                factor = block.splat(block.times(whole, block.signed(192 + 8 * n + 2 * quarter + half)))
                yield _float((low | high) - 32) * factor


DECODERS: Final[dict[str, Callable[[Block], Iterator[Vector]]]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
"""By type of weights: the values of a block, in order."""


def decoded(writer: Writer, dtype: DType, row: Any, i: Any, count: int = 1) -> Iterator[Vector]:
    """The values of ``count`` blocks of a row at that address, from its value ``i`` on."""
    code = writer.code
    first = code.mul(code.sdiv(i, _I64(dtype.block)), _I64(dtype.itemsize))
    for n in range(count):
        yield from DECODERS[dtype.name](Block(writer, code.add(row, code.add(first, _I64(n * dtype.itemsize)))))
