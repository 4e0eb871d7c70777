"""Decoding of quantized blocks on the device, in torch's integer operations on preset memory.

The formats are those of ``opweave.ops.blocks``, which say what the bytes mean. Here the small fields are worked on four
bytes at a time, in words of 32 bits: each byte of a word is one element. All scales are products of an f16 and an
integer of few bits, so that scale · element is exact in f32, and results are equal to those of the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, f32, i16, i32, u8
from opweave.ops.decoding import IQ4_LEVELS
from opweave_torch.memory import tensor, torch_dtype

__all__ = ["DECODERS", "Decoding", "decoding_arrays", "fields"]


class Decoding:
    """Decodes a number of blocks at a time: those that were loaded, into ``values``.

    Args:
        dtype: a quantized type.
        count: number of blocks.
        arrays: the workspace of `decoding_arrays`, for as many blocks or more.
        device: of the tensors.

    Attributes:
        values: f32, shape (count, elements of a block), dense.
        calls: what decodes the blocks that were loaded, in order.
    """

    def __init__(self, dtype: DType, count: int, arrays: Mapping[str, Arg], device: torch.device) -> None:
        self.dtype, self.count, self.device = dtype, count, device
        self.calls: list[Call] = []
        self._arrays = arrays
        self._used = 0
        self._fields: list[tuple[int, int, Tensor]] = []
        self.values = self.new(f32, dtype.block)
        DECODERS[dtype.name](self)

    def load(self, blocks: Tensor) -> list[Call]:
        """The calls that copy blocks into the workspace.

        Args:
            blocks: ``uint8``, shape (..., bytes of a block), any strides; at most ``count`` blocks.
        """
        lead = blocks.shape[:-1]
        n = lead.numel()
        return [
            partial(field[:n].view(*lead, size).copy_, blocks[..., at : at + size]) for at, size, field in self._fields
        ]

    # --- for decoders -----------------------------------------------------------------------------------------------

    def bytes_at(self, at: int, size: int) -> Tensor:
        """Bytes of each block, ``uint8`` of shape (count, size)."""
        field = self.new(u8, size)
        self._fields.append((at, size, field))
        return field

    def words_at(self, at: int, size: int) -> Tensor:
        """Bytes of each block, four to a word: ``int32`` of shape (count, size / 4)."""
        return self.bytes_at(at, size).view(torch.int32)

    def half_at(self, at: int) -> Tensor:
        """An f16 of each block as f32, shape (count, 1)."""
        result = self.new(f32, 1)
        self.do(result.copy_, self.bytes_at(at, 2).view(torch.float16))
        return result

    def new(self, dtype: DType, *shape: int) -> Tensor:
        """The next array of the workspace, of shape (count, *shape)."""
        array = tensor(self._arrays[_array_name(self._used)])
        self._used += 1
        return array if len(array) == self.count else array[: self.count]

    def constant(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Numbers that do not depend on the blocks."""
        return _constant(tuple(values), dtype, self.device)

    def do(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Enter one call."""
        self.calls.append(partial(function, *args, **options))

    def field(self, words: Tensor, shift: int, mask: int, out: Tensor) -> None:
        """``out = (words >> shift) & mask`` in each byte; ``mask`` repeats for all bytes of a word."""
        if shift:
            self.do(torch.bitwise_right_shift, words, shift, out=out)
            words = out
        self.do(torch.bitwise_and, words, mask * _EACH, out=out)

    def join(self, low: Tensor, high: Tensor, shift: int) -> None:
        """``low |= high << shift``; ``high`` is lost."""
        if shift:
            self.do(torch.bitwise_left_shift, high, shift, out=high)
        self.do(torch.bitwise_or, low, high, out=low)

    def bits(self, words: Tensor, shift: int) -> Tensor:
        """Each bit of a word as a byte, which is 0 or 1 << ``shift``: shape (count, 8 · words)."""
        nibbles = self.new(i32, words.shape[1], 8)
        by = self.constant(range(0, 32, 4), torch.int32)
        self.do(torch.bitwise_right_shift, words.unsqueeze(-1), by, out=nibbles)
        self.do(torch.bitwise_and, nibbles, 15, out=nibbles)
        # Four copies of the nibble, 7 bits apart: in each byte another of its bits is the lowest.
        self.do(torch.mul, nibbles, 0x00204081 << shift, out=nibbles)
        self.do(torch.bitwise_and, nibbles, _EACH << shift, out=nibbles)
        return nibbles.view(self.count, -1)

    def table(self, index: Tensor, entries: Any, out: Tensor) -> None:
        """``out = entries[index]``, index ``uint8``, out f32 of as many elements."""
        wide = self.new(i32, *index.shape[1:])
        self.do(wide.copy_, index)
        self.do(torch.index_select, self.constant(entries, torch.float32), 0, wide.view(-1), out=out.view(-1))

    def scaled(self, scale: Tensor, offset: Tensor | None = None) -> None:
        """``values = scale · values + offset`` for parts of a block: scale and offset of shape (count, parts)."""
        parts = self.values.view(self.count, scale.shape[1], -1)
        # Two passes are a third of the time of addcmul, which does not know operands that are repeated.
        self.do(torch.mul, parts, scale.unsqueeze(-1), out=parts)
        if offset is not None:
            self.do(torch.add, parts, offset.unsqueeze(-1), out=parts)

    def centred(self, scale: Tensor, centre: int) -> None:
        """``values = scale · (values - centre)``, in this order: infinite scales have no difference of products."""
        self.do(torch.sub, self.values, centre, out=self.values)
        self.scaled(scale)


_EACH: Final = 0x01010101
"""One in each byte of a word."""


@lru_cache(maxsize=256)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


class _Recording(Decoding):
    """Records the arrays that a decoder asks for, with tensors that have no memory."""

    def __init__(self, dtype: DType) -> None:
        self.shapes: list[tuple[DType, tuple[int, ...]]] = []
        super().__init__(dtype, 1, {}, torch.device("meta"))

    def new(self, dtype: DType, *shape: int) -> Tensor:
        self.shapes.append((dtype, shape))
        return torch.empty((1, *shape), dtype=torch_dtype(dtype), device="meta")


@lru_cache(maxsize=1024)
def decoding_arrays(dtype: DType, count: int) -> Arrays:
    """Workspace of `Decoding` for ``count`` blocks: what its decoder asks for, by number."""
    return {_array_name(i): (kind, (count, *shape)) for i, (kind, shape) in enumerate(_Recording(dtype).shapes)}


def _array_name(number: int) -> str:
    return f"decoding{number}"


# --- 32 elements, one scale (and offset) ----------------------------------------------------------------------------


def _nibbles(d: Decoding, words: Tensor, high: Tensor | None = None) -> None:
    """Values from nibbles, all low ones first, with the bits above them in ``high``, one byte for each value."""
    half = words.shape[1]
    for i, shift in enumerate((0, 4)):
        part = d.new(i32, half)
        d.field(words, shift, 15, part)
        if high is not None:
            d.join(part, high[:, i * half : (i + 1) * half], 0)
        columns = slice(i * 4 * half, (i + 1) * 4 * half)
        d.do(d.values[:, columns].copy_, part.view(torch.uint8))


def _of_nibbles(d: Decoding, *, centre: int = 0, fifth: bool = False) -> None:
    """Scale f16, without a centre an offset f16, with ``fifth`` bits u8[4], then quants u8[16]."""
    at = 2 if centre else 4
    higher = d.bits(d.words_at(at, 4), 4) if fifth else None
    _nibbles(d, d.words_at(at + 4 * fifth, 16), higher)
    if centre:
        d.centred(d.half_at(0), centre)
    else:
        d.scaled(d.half_at(0), d.half_at(2))


def _q8_0(d: Decoding) -> None:
    d.do(d.values.copy_, d.bytes_at(2, 32).view(torch.int8))
    d.scaled(d.half_at(0))


def _iq4_nl(d: Decoding) -> None:
    _nibbles(d, d.words_at(2, 16))
    d.table(d.values, IQ4_LEVELS.tolist(), d.values)
    d.scaled(d.half_at(0))


def _mxfp4(d: Decoding) -> None:
    # A float of sign, 2 bits of exponent and 1 of mantissa is the top of an f16, whose exponents are 14 lower.
    _nibbles(d, d.words_at(1, 16))
    halves = d.new(i16, 32)
    d.do(halves.copy_, d.values)
    words, signs = halves.view(torch.int32), d.new(i32, 16)
    d.do(torch.bitwise_and, words, 0x00080008, out=signs)
    d.do(torch.bitwise_and, words, 0x00070007, out=words)
    d.do(torch.bitwise_left_shift, words, 9, out=words)
    d.join(words, signs, 12)
    d.do(d.values.copy_, halves.view(torch.float16))
    scale = d.new(f32, 1)
    # The byte is an exponent, 127 means 1; half of that, so that the greatest one is a number, times twice the values.
    d.table(d.bytes_at(0, 1), [2.0 ** (e - 128) for e in range(256)], scale)
    d.do(torch.mul, d.values, 2.0**15, out=d.values)
    d.scaled(scale)


# --- 256 elements: scales of parts of 16 or 32, themselves scaled by an f16 -----------------------------------------


def _factors(d: Decoding, words: Tensor, half: Tensor, sign: int = 1) -> Tensor:
    """The bytes of words times a number of the block: shape (count, bytes)."""
    result = d.new(f32, 4 * words.shape[1])
    d.do(result.copy_, words.view(torch.uint8))
    d.do(torch.mul, result, half, out=result)
    if sign < 0:
        d.do(torch.neg, result, out=result)
    return result


def fields(d: Decoding, words: Tensor, width: int, higher: Tensor | None = None, bits: int = 1, apart: int = 1) -> None:
    """Values from fields of ``width`` bits: of each group of bytes all lowest fields, then the next ones.

    Args:
        words: shape (count, groups, words of a group).
        higher: of the same shape: the lowest ``bits`` bits of each byte lie above the lowest field, those that begin
            ``apart`` bits further on above the next field.
    """
    steps = 8 // width
    values = d.values.view(d.count, words.shape[1], steps, -1)
    part = d.new(i32, *words.shape[1:])
    above = part if higher is None else d.new(i32, *words.shape[1:])
    for i in range(steps):
        d.field(words, i * width, (1 << width) - 1, part)
        if higher is not None:
            d.field(higher, i * apart, (1 << bits) - 1, above)
            d.join(part, above, width)
        d.do(values[:, :, i].copy_, part.view(torch.uint8))


def _shifted(d: Decoding, words: Tensor, shifts: range) -> Tensor:
    """``words`` (count, ..., n) shifted right by each of several numbers of bits: (count, ..., shifts, n)."""
    result = d.new(i32, *words.shape[1:-1], len(shifts), words.shape[-1])
    by = d.constant(shifts, torch.int32).view(-1, 1)
    d.do(torch.bitwise_right_shift, words.unsqueeze(-2), by, out=result)
    return result


def _q2_k(d: Decoding) -> None:
    # scales u8[16] (low half: scale, high half: offset), quants u8[64], d f16, dmin f16
    both = d.words_at(0, 16)
    low, high = d.new(i32, 4), d.new(i32, 4)
    d.field(both, 0, 15, low)
    d.field(both, 4, 15, high)
    fields(d, d.words_at(16, 64).view(d.count, 2, 8), 2)
    d.scaled(_factors(d, low, d.half_at(80)), _factors(d, high, d.half_at(82), -1))


def _q3_k(d: Decoding) -> None:
    # third bits u8[32], quants u8[64], scales 16 x 6 bits in u8[12], d f16
    low, high = d.words_at(96, 8), d.words_at(104, 4)
    six, top = d.new(i32, 4), d.new(i32, 4)
    d.field(low, 0, 15, six[:, :2])
    d.field(low, 4, 15, six[:, 2:])
    d.do(torch.bitwise_right_shift, high, d.constant(range(0, 8, 2), torch.int32), out=top)
    d.field(top, 0, 3, top)
    d.join(six, top, 4)
    scale = d.new(f32, 16)
    d.do(scale.copy_, six.view(torch.uint8))
    d.do(torch.sub, scale, 32, out=scale)
    d.do(torch.mul, scale, d.half_at(108), out=scale)
    fields(d, d.words_at(32, 64).view(d.count, 2, 8), 2, _shifted(d, d.words_at(0, 32), range(0, 8, 4)))
    d.centred(scale, 4)


def _scales_of_8(d: Decoding) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit offsets packed into 12 bytes (q4_k, q5_k), times the block's own."""
    rest = d.words_at(12, 4)
    result = []
    for at, shift, half, sign in ((4, 0, 0, 1), (8, 4, 2, -1)):
        first = d.words_at(at, 4)
        words, top = d.new(i32, 2), d.new(i32, 1)
        d.field(first, 0, 63, words[:, :1])
        d.field(rest, shift, 15, words[:, 1:])
        d.field(first, 6, 3, top)
        d.join(words[:, 1:], top, 4)
        result.append(_factors(d, words, d.half_at(half), sign))
    return result[0], result[1]


def _q4_k(d: Decoding) -> None:
    # d f16, dmin f16, scales u8[12], quants u8[128]
    fields(d, d.words_at(16, 128).view(d.count, 4, 8), 4)
    d.scaled(*_scales_of_8(d))


def _q5_k(d: Decoding) -> None:
    # d f16, dmin f16, scales u8[12], fifth bits u8[32], quants u8[128]
    fifth = _shifted(d, d.words_at(16, 32), range(0, 8, 2))
    fields(d, d.words_at(48, 128).view(d.count, 4, 8), 4, fifth)
    d.scaled(*_scales_of_8(d))


def _q6_k(d: Decoding) -> None:
    # low halves u8[128], high pairs u8[64], scales i8[16], d f16
    pairs = _shifted(d, d.words_at(128, 64).view(d.count, 2, 8), range(0, 4, 2))
    fields(d, d.words_at(0, 128).view(d.count, 2, 16), 4, pairs.view(d.count, 2, 16), 2, 4)
    scale = d.new(f32, 16)
    d.do(scale.copy_, d.bytes_at(192, 16).view(torch.int8))
    d.do(torch.mul, scale, d.half_at(208), out=scale)
    d.centred(scale, 32)


DECODERS: Final[dict[str, Callable[[Decoding], None]]] = {
    "q4_0": partial(_of_nibbles, centre=8),
    "q4_1": _of_nibbles,
    "q5_0": partial(_of_nibbles, centre=16, fifth=True),
    "q5_1": partial(_of_nibbles, fifth=True),
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "mxfp4": _mxfp4,
}
