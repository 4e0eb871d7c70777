"""The integers of quantized blocks, 256 at a time, as products of bytes take them.

A *stretch* is 256 consecutive weights of a row: one block of the k-quants, or eight blocks of 32. Its integers are four
vectors of 64 bytes, in the order in which unpacking gives them, which its `Form` tells, and its factors one vector.
The formats are those of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir

from opweave_cpu.jit.compiler import target
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, declared, load, store, vector_type
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tunables import PREFETCHED

__all__ = ["BYTES", "RUNS", "STRETCH", "Form", "Row", "dot", "form_of", "has_dot", "multiplies_bytes", "prefetch"]

STRETCH: Final = 256
"""Weights of a stretch."""

BYTES: Final = 64
"""Integers of a vector."""

RUNS: Final = STRETCH // LANES
"""Runs of 16 weights in a stretch."""

_I8: Final = ir.IntType(8)
_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_HALF: Final = ir.HalfType()
_F32: Final = ir.FloatType()


def _of(kind: Any, n: int) -> Any:
    return ir.VectorType(kind, n)


def prefetch(code: Any, address: Any) -> None:
    """Have a cache line, which may lie behind the end of an array, brought into the second-level cache."""
    kinds = [_I8.as_pointer(), _I32, _I32, _I32]
    function = declared(code, "llvm.prefetch.p0", ir.VoidType(), kinds)
    to_read, second_level, data = _I32(0), _I32(2), _I32(1)
    code.call(function, [code.inttoptr(address, kinds[0]), to_read, second_level, data])


def multiplies_bytes() -> bool:
    """Whether the processor has instructions that multiply bytes and add the products up."""
    return {"avx2", "f16c"} <= target().features


def has_dot() -> bool:
    """Whether one instruction (VNNI) multiplies unsigned bytes by signed ones, and adds four products to each sum."""
    return not target().features.isdisjoint({"avx512vnni", "avxvnni"})


def dot(code: Any, total: Any, integers: Any, x: Any, *, signed: bool) -> Any:
    """Sums of four products each: 16 lanes of i32, ``total`` plus the products of 64 integers with bytes of ``x``.

    Args:
        integers: ``<64 x i8>``, unsigned unless ``signed``.
        x: ``<64 x i8>``, signed; none is -128 if ``signed``.
    """
    if has_dot() and not signed and "avx512vnni" in target().features:
        return _dot_at_once(code, total, integers, x)
    if not has_dot() and "avx512bw" in target().features:
        return code.add(total, _dot_by_pairs(code, integers, x, signed=signed))
    operands = [[_half(code, value, k) for value in (total, integers, x)] for k in (0, 1)]
    if has_dot() and not signed:
        halves = [_dot_at_once(code, *half) for half in operands]
    else:
        halves = [code.add(half[0], _dot_by_pairs(code, *half[1:], signed=signed)) for half in operands]
    return code.shuffle_vector(*halves, ir.Constant(_of(_I32, LANES), list(range(LANES))))


def _dot_at_once(code: Any, total: Any, integers: Any, x: Any) -> Any:
    words = total.type
    function = declared(code, f"llvm.x86.avx512.vpdpbusd.{32 * words.count}", words, [words] * 3)
    return code.call(function, [total, code.bitcast(integers, words), code.bitcast(x, words)])


def _half(code: Any, value: Any, k: int) -> Any:
    n = value.type.count // 2
    return code.shuffle_vector(value, value, ir.Constant(_of(_I32, n), list(range(k * n, (k + 1) * n))))


def _dot_by_pairs(code: Any, integers: Any, x: Any, *, signed: bool) -> Any:
    """Products of 32 bytes by AVX2, or of 64 by AVX-512. The sum of two, at most 2 · 128 · 127, fits 16 bits."""
    some, n = integers.type, integers.type.count
    pairs, sums = _of(_I16, n // 2), _of(_I32, n // 4)
    if signed:  # one factor of the instruction is unsigned: |w| x sign(w)
        negative = code.icmp_signed("<", integers, ir.Constant(some, None))
        if n == BYTES:
            x = code.select(negative, code.neg(x), x)
        else:
            x = code.call(declared(code, "llvm.x86.avx2.psign.b", some, [some] * 2), [x, integers])
        integers = code.select(negative, code.neg(integers), integers)
    of_bytes, of_pairs = (
        ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512") if n == BYTES else ("avx2.pmadd.ub.sw", "avx2.pmadd.wd")
    )
    twos = code.call(declared(code, f"llvm.x86.{of_bytes}", pairs, [some] * 2), [integers, x])
    add = declared(code, f"llvm.x86.{of_pairs}", sums, [pairs] * 2)
    return code.call(add, [twos, ir.Constant(pairs, [1] * (n // 2))])


def _masked(code: Any, value: Any, mask: int) -> Any:
    return code.and_(value, ir.Constant(value.type, [mask] * value.type.count))


def _shifted(code: Any, value: Any, *by: int) -> Any:
    """Bytes shifted right, or left where ``by`` is negative: each of ``len(by)`` equal parts of the vector by one of
    ``by``. Bits of neighbouring bytes come in, which the caller masks."""
    pairs = _of(_I16, BYTES // 2)
    words = code.bitcast(value, pairs)
    for sign, shift in ((1, code.lshr), (-1, code.shl)):
        each = [max(0, sign * b) for b in by for _ in range(BYTES // 2 // len(by))]
        if any(each):
            words = shift(words, ir.Constant(pairs, each))
    return code.bitcast(words, _of(_I8, BYTES))


def _nibbles(code: Any, value: Any) -> tuple[Any, Any]:
    return _masked(code, value, 15), _masked(code, _shifted(code, value, 4), 15)


class Stretch:
    """One stretch, while a kernel is written.

    Args:
        address: of its first byte.
        size: bytes of a block.
    """

    def __init__(self, writer: Writer, address: Any, size: int) -> None:
        self.code, self._writer, self._address, self._size = writer.code, writer, address, size

    def load(self, kind: Any, at: int, block: int = 0) -> Any:
        return load(self.code, kind, self.code.add(self._address, _I64(block * self._size + at)))

    def bytes(self, at: int, n: int, blocks: Sequence[int] = (0,)) -> Any:
        """``<64 x i8>``: ``n`` bytes at that place of each of the blocks, repeated until there are 64."""
        if n * len(blocks) == BYTES and n < BYTES // 2:
            found = self._picked([block * self._size + at + k for block in blocks for k in range(0, n, 2)])
            if found is not None:
                return self.code.bitcast(found, _of(_I8, BYTES))
        parts = [self.load(_of(_I8, n), at, block) for block in blocks]
        while len(parts) * n < BYTES:
            parts *= 2
        return self.joined(parts)

    def _picked(self, places: Sequence[int]) -> Any:
        """The words at those bytes, by one permutation of two vectors, in less time than several loads and insertions;
        or ``None`` if two do not hold all of them, or the processor has no such instruction."""
        # Where the vectors lie does not depend on the places if that can be, so that several picks share their loads.
        first = min(places) // BYTES * BYTES
        last = min(max(first + BYTES, max(places) + 2 - BYTES), 8 * self._size - BYTES)
        lanes = [(p - first if p + 2 <= first + BYTES else p - last + BYTES) // 2 for p in places]
        between = any(first + BYTES < p + 2 and p < last for p in places)
        if between or "avx512bw" not in target().features:
            return None
        vectors = [self.load(_of(_I16, BYTES // 2), at) for at in (first, last)]
        return self.code.shuffle_vector(*vectors, ir.Constant(_of(_I32, len(lanes)), lanes))

    def joined(self, parts: Sequence[Any]) -> Any:
        """Vectors of one type one after the other."""
        whole = list(parts)
        while len(whole) > 1:
            lanes = ir.Constant(_of(_I32, 2 * whole[0].type.count), list(range(2 * whole[0].type.count)))
            whole = [self.code.shuffle_vector(a, b, lanes) for a, b in zip(whole[::2], whole[1::2], strict=True)]
        return whole[0]

    def bits(self, at: int, first: int, blocks: Sequence[int]) -> Any:
        """``<64 x i8>``: 16 where a bit of the i32 at that place is set, of each block 16 bits from the first one."""
        code = self.code
        words = [code.trunc(code.lshr(self.load(_I32, at, b), _I32(first)), _I16) for b in blocks]
        whole: Any = ir.Constant(_of(_I16, len(blocks)), ir.Undefined)
        for k, word in enumerate(words):
            whole = code.insert_element(whole, word, _I32(k))
        flags = code.bitcast(whole, _of(ir.IntType(1), BYTES))
        return code.select(flags, ir.Constant(_of(_I8, BYTES), [16] * BYTES), ir.Constant(_of(_I8, BYTES), None))

    def halves(self, *ats: int) -> Vector:
        """The f16 at those places of the eight blocks, as f32: of all blocks the first, then of all the second."""
        code = self.code
        places = [block * self._size + at for at in ats for block in range(8)]
        whole = self._picked(places)
        if whole is None:
            whole = ir.Constant(_of(_I16, LANES), ir.Undefined)
            for k, at in enumerate(places):
                whole = code.insert_element(whole, self.load(_I16, at), _I32(k))
        return Vector(code, code.fpext(code.bitcast(whole, _of(_HALF, LANES)), vector_type("f32")), "f32")

    def half(self, at: int) -> Any:
        """The f16 at that place in all lanes, as f32."""
        return self._writer.splat(self.code.fpext(self.load(_HALF, at), _F32), "f32")


Decoded = tuple[list[Any], Vector]
"""Vectors of bytes, as `Form.integers` takes them, and the factors."""


def _bytes(*, signed: bool) -> Callable[[Stretch], Decoded]:
    def decode(s: Stretch) -> Decoded:
        vectors = [s.bytes(2, 32, (2 * k, 2 * k + 1)) for k in range(4)]
        if not signed:
            vectors = [s.code.xor(v, ir.Constant(v.type, [-128] * BYTES)) for v in vectors]
        return vectors, s.halves(0, 0)

    return decode


def _of_nibbles(heads: tuple[int, int], quants: int, upper: int | None = None) -> Callable[[Stretch], Decoded]:
    def decode(s: Stretch) -> Decoded:
        halves = range(4), range(4, 8)
        vectors = [s.bytes(quants, 16, blocks) for blocks in halves]
        if upper is not None:
            pairs = [(_nibbles(s.code, v), blocks) for v, blocks in zip(vectors, halves, strict=True)]
            vectors = [
                s.code.or_(part, s.bits(upper, 16 * k, blocks)) for pair, blocks in pairs for k, part in enumerate(pair)
            ]
        return vectors, s.halves(*heads)

    return decode


def _in_parts(quants: int, upper: int | None) -> Callable[[Stretch], Decoded]:
    """Eight parts of 32 integers, two of them in each 32 bytes; their fifth bits in the bytes at ``upper``."""

    def decode(s: Stretch) -> Decoded:
        vectors = [s.bytes(quants + 64 * k, 64) for k in (0, 1)]
        if upper is not None:
            high, code = s.bytes(upper, 32), s.code
            parts = [(4 * k + odd, part) for k in (0, 1) for odd, part in enumerate(_nibbles(code, vectors[k]))]
            # ``first``: the bit of the first 32 integers; that of the others is two further.
            vectors = [
                code.or_(part, _masked(code, _shifted(code, high, first - 4, first - 2), 16)) for first, part in parts
            ]
        return vectors, _scales_of_parts(s)

    return decode


def _scales_of_parts(s: Stretch) -> Vector:
    """The scales of the eight parts, and their minima, of 6 bits each in 12 bytes."""
    code, words = s.code, _of(_I32, 4)
    head = s.load(words, 0)  # both factors, and the 12 bytes

    def permuted(*lanes: int) -> Any:
        return code.shuffle_vector(head, head, ir.Constant(words, lanes))

    def of_bytes(*masks: int) -> Any:
        return ir.Constant(words, [mask * 0x01010101 for mask in masks])

    lower = code.and_(code.lshr(permuted(1, 3, 2, 3), ir.Constant(words, [0, 0, 0, 4])), of_bytes(63, 15, 63, 15))
    upper = code.and_(code.lshr(permuted(1, 1, 2, 2), ir.Constant(words, [2] * 4)), of_bytes(0, 48, 0, 48))
    whole = code.or_(lower, upper)
    integers = code.zext(code.bitcast(whole, _of(_I8, LANES)), vector_type("i32"))
    both = code.fpext(s.load(_of(_HALF, 2), 0), _of(_F32, 2))
    factors = code.shuffle_vector(both, both, ir.Constant(vector_type("i32"), [0] * 8 + [1] * 8))
    return Vector(code, integers, "i32").to("f32") * Vector(code, factors, "f32")


def _q6_k(s: Stretch) -> Decoded:
    vectors = []
    for n in (0, 1):
        low, high = s.bytes(64 * n, 64), s.bytes(128 + 32 * n, 32)
        for k, part in enumerate(_nibbles(s.code, low)):
            upper = _masked(s.code, _shifted(s.code, high, 4 * k - 4, 4 * k - 2), 48)
            vectors.append(s.code.or_(part, upper))
    scales = Vector(s.code, s.load(vector_type("i8"), 192), "i8").to("i32").to("f32")
    return vectors, scales * s.half(208)


class Form(NamedTuple):
    """What the integers and factors of a stretch mean.

    Each group of integers q has a factor f, and its weights are ``f q + g``.

    Attributes:
        size: bytes of a block.
        blocks: blocks of a stretch.
        groups: groups of a stretch. The factors of 8 groups are lanes 0 to 7, followed by their h; of 16 all lanes.
        offset: what gives g: ``offset h`` with 8 groups, ``offset f`` with 16.
        order: the runs of 16 weights in the order of the integers.
        signed: whether integers have a sign.
        largest: their largest magnitude. Those up to 15 are decoded as pairs of vectors in the halves of bytes.
        decode: reads a stretch.
    """

    size: int
    blocks: int
    groups: int
    offset: int
    order: tuple[int, ...]
    signed: bool
    largest: int
    decode: Callable[[Stretch], Decoded]

    @property
    def middle(self) -> int:
        """The integer that stands for zero, by which weights are ``f (q - middle)``; 0 as well if each group has a
        number h of its own."""
        return -self.offset if self.offset < -1 else 0

    @property
    def has_rest(self) -> bool:
        """Whether weights have something beside ``f (q - middle)``."""
        return abs(self.offset) == 1

    @property
    def vectors(self) -> int:
        """How many vectors `decode` gives."""
        return 2 if self.largest <= 15 else 4

    def integers(self, code: Any, vectors: Sequence[Any]) -> list[Any]:
        """The integers of vectors that `decode` gave, or that have the bytes of such in another order."""
        return [part for v in vectors for part in _nibbles(code, v)] if self.largest <= 15 else [*vectors]

    @property
    def group_of_run(self) -> tuple[int, ...]:
        """By place of 16 integers: their group."""
        return tuple([run * self.groups // RUNS for run in self.order])


_IN_ORDER: Final = tuple(range(RUNS))
_LOW_AND_HIGH: Final = (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
_PARTS: Final = (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)


def form_of(name: str) -> Form:
    """How the integers of a type of weights, one of `opweave_cpu.jit.supported.BLOCKS`, are unpacked. Integers that are
    stored with a sign keep it if `dot` is faster with them, else 128 is added."""
    if name == "q8_0":
        signed = not has_dot()
        offset, largest = (0, 128) if signed else (-128, 255)
        return Form(34, 8, 8, offset, _IN_ORDER, signed, largest, _bytes(signed=signed))
    return {
        "q4_0": Form(18, 8, 8, -8, _LOW_AND_HIGH, False, 15, _of_nibbles((0, 0), 2)),
        "q4_1": Form(20, 8, 8, 1, _LOW_AND_HIGH, False, 15, _of_nibbles((0, 2), 4)),
        "q5_0": Form(22, 8, 8, -16, _LOW_AND_HIGH, False, 31, _of_nibbles((0, 0), 6, 2)),
        "q5_1": Form(24, 8, 8, 1, _LOW_AND_HIGH, False, 31, _of_nibbles((0, 2), 8, 4)),
        "q4_k": Form(144, 1, 8, -1, _PARTS, False, 15, _in_parts(16, None)),
        "q5_k": Form(176, 1, 8, -1, _PARTS, False, 31, _in_parts(48, 16)),
        "q6_k": Form(210, 1, 16, -32, _IN_ORDER, False, 63, _q6_k),
    }[name]


class Row:
    """Rows of weights, while a kernel is written: where their stretches are.

    A last stretch that has fewer than eight blocks is read from a copy, behind which are zeros.

    Args:
        tail: weights of a last stretch that is not whole.
        height: rows of a block, of all of which a stretch is read before the next one is.
    """

    def __init__(self, writer: Writer, form: Form, tail: int, height: int = 1) -> None:
        self._writer, self._form, self._tail, self._height = writer, form, tail, height
        if tail:
            with writer.code.goto_entry_block():
                kind = ir.ArrayType(_I8, form.size * form.blocks)
                self._copy = writer.code.alloca(kind)
                writer.code.store(ir.Constant(kind, None), self._copy)

    def stretch(self, row: Any, s: Any) -> Stretch:
        """Stretch ``s`` of the row at an address."""
        writer, form, code = self._writer, self._form, self._writer.code
        size = form.size * form.blocks
        place = code.mul(s, _I64(size))
        address = code.add(row, place)
        ahead = code.add(address, self._distance(place))
        for line in range(0, size, VECTOR_BYTES):
            prefetch(code, code.add(ahead, _I64(line)))
        if self._tail:
            is_last = code.icmp_signed("==", s, code.sub(writer.lengths[1], _I64(1)))
            copy = code.ptrtoint(self._copy, _I64)
            with code.if_then(is_last, likely=False):
                for at in range(0, self._tail * size // STRETCH, 2):
                    half = load(code, ir.IntType(16), code.add(address, _I64(at)))
                    store(code, half, code.add(copy, _I64(at)))
            address = code.select(is_last, copy, address)
        return Stretch(writer, address, form.size)

    def _distance(self, place: Any) -> Any:
        """How far behind a place of a row is what is prefetched when that is read. What would lie behind the row is
        that of the next block instead of that of the next row, which is read already."""
        code, distance = self._writer.code, _I64(PREFETCHED.value)
        if self._height == 1:
            return distance
        length = code.udiv(self._writer.strides[0][0], _I64(self._height))
        within = code.icmp_signed("<", code.add(place, distance), length)
        return code.select(within, distance, code.add(distance, code.mul(length, _I64(self._height - 1))))
