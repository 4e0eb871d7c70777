"""Decoding of the block types with codebooks (iq1, iq2, iq3), of iq4_xs, nvfp4, and of digits in base 3.

The formats are those of ``opweave.ops.codebook_blocks``. Entries of codebooks and signs are picked from tables of f32
on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from opweave.graph.dtypes import f32, i32
from opweave.ops.codebooks import SIGN_BYTES, codebook
from opweave.ops.decoding import E2M1, IQ4_LEVELS, UE4M3
from opweave_torch.kernels.blocks import DECODERS, Decoding, fields

__all__: list[str] = []

_SEVENS: Final = range(0, 28, 7)
"""Where in a word of iq2_xxs and iq3_xxs the signs of each eight values begin; above them, at bit 28, is the scale."""


@lru_cache(maxsize=64)
def _table(name: str, device: torch.device) -> Tensor:
    """Rows of f32: the codebook ``name``, or ``signs`` of eight values by a byte, ``signs of 7`` by its lower bits."""
    if name.startswith("signs"):
        index = np.arange(256, dtype=np.uint8) if name == "signs" else SIGN_BYTES
        bits = np.unpackbits(index[:, None], axis=1, bitorder="little")
        return torch.tensor(1.0 - 2.0 * bits, dtype=torch.float32, device=device)
    return torch.tensor(codebook(name), dtype=torch.float32, device=device)


def _look_up(d: Decoding, name: str, index: Tensor, out: Tensor) -> None:
    """``out = table[index]``, whole rows of the table."""
    table = _table(name, d.device)
    d.do(torch.index_select, table, 0, index.view(-1), out=out.view(-1, table.shape[1]))


def _sign(d: Decoding, name: str, index: Tensor) -> None:
    """Negate values by rows of a table of signs."""
    signs = d.new(f32, d.dtype.block)
    _look_up(d, name, index, signs)
    d.do(torch.mul, d.values, signs, out=d.values)


def _ints(d: Decoding, x: Tensor) -> Tensor:
    """Bytes, or words of 16 bits without a sign, as i32."""
    result = d.new(i32, x.shape[1])
    d.do(result.copy_, x)
    if x.dtype is torch.int16:
        d.do(torch.bitwise_and, result, 0xFFFF, out=result)
    return result


def _bit_fields(d: Decoding, words: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """``(word >> shift) & mask`` for each word (i32) and each shift: shape (count, words · shifts)."""
    result = d.new(i32, words.shape[1], len(shifts))
    d.do(torch.bitwise_right_shift, words.unsqueeze(-1), d.constant(shifts, torch.int32), out=result)
    d.do(torch.bitwise_and, result, mask, out=result)
    return result.view(d.count, -1)


def _above(d: Decoding, low: Tensor, high: Tensor) -> Tensor:
    """Indices: 8 bits in ``low`` and those above them in ``high``, which is lost."""
    d.do(torch.bitwise_left_shift, high, 8, out=high)
    d.do(torch.bitwise_or, high, low, out=high)
    return high


def _scale(d: Decoding, integers: Tensor, plus: float, times: float, half: Tensor) -> None:
    """``values *= half · (integers + plus) · times`` for equal parts of a block; the factor is exact."""
    scale = d.new(f32, integers.shape[1])
    d.do(scale.copy_, integers)
    d.do(torch.add, scale, plus, out=scale)
    d.do(torch.mul, scale, times, out=scale)
    d.do(torch.mul, scale, half, out=scale)
    d.scaled(scale)


def _halves(d: Decoding, at: int, size: int) -> Tensor:
    """The low and the high half of each byte, in turn."""
    return _bit_fields(d, _ints(d, d.bytes_at(at, size)), (0, 4), 15)


def _iq2_xxs(d: Decoding) -> None:
    q = d.bytes_at(2, 64)
    index = d.new(i32, 8, 4)
    d.do(index.copy_, q.view(d.count, 8, 8)[:, :, :4])
    words = q.view(torch.int32)[:, 1::2]
    _look_up(d, "iq2_xxs", index, d.values)
    _sign(d, "signs of 7", _bit_fields(d, words, _SEVENS, 127))
    _scale(d, _bit_fields(d, words, (28,), 15), 0.5, 0.25, d.half_at(0))


def _iq2_xs(d: Decoding) -> None:
    words = _ints(d, d.bytes_at(2, 64).view(torch.int16))
    _look_up(d, "iq2_xs", _bit_fields(d, words, (0,), 511), d.values)
    _sign(d, "signs of 7", _bit_fields(d, words, (9,), 127))
    _scale(d, _halves(d, 66, 8), 0.5, 0.25, d.half_at(0))


def _iq2_s(d: Decoding) -> None:
    high = _bit_fields(d, _ints(d, d.bytes_at(66, 8)), range(0, 8, 2), 3)
    _look_up(d, "iq2_s", _above(d, d.bytes_at(2, 32), high), d.values)
    _sign(d, "signs", _ints(d, d.bytes_at(34, 32)))
    _scale(d, _halves(d, 74, 8), 0.5, 0.25, d.half_at(0))


def _iq3_xxs(d: Decoding) -> None:
    words = d.words_at(66, 32)
    _look_up(d, "iq3_xxs", _ints(d, d.bytes_at(2, 64)), d.values)
    _sign(d, "signs of 7", _bit_fields(d, words, _SEVENS, 127))
    _scale(d, _bit_fields(d, words, (28,), 15), 0.5, 0.5, d.half_at(0))


def _iq3_s(d: Decoding) -> None:
    high = _bit_fields(d, _ints(d, d.bytes_at(66, 8)), range(8), 1)
    _look_up(d, "iq3_s", _above(d, d.bytes_at(2, 64), high), d.values)
    _sign(d, "signs", _ints(d, d.bytes_at(74, 32)))
    _scale(d, _halves(d, 106, 4), 0.5, 2, d.half_at(0))


def _shift(d: Decoding, bits: Tensor) -> None:
    """Add 1/8 to each of equal parts of a block whose bit is 0, subtract it where it is 1."""
    delta = d.new(f32, bits.shape[1])
    d.do(delta.copy_, bits)
    d.do(torch.mul, delta, -0.25, out=delta)
    d.do(torch.add, delta, 0.125, out=delta)
    parts = d.values.view(d.count, bits.shape[1], -1)
    d.do(torch.add, parts, delta.unsqueeze(-1), out=parts)


def _iq1_s(d: Decoding) -> None:
    words = _ints(d, d.bytes_at(34, 16).view(torch.int16))
    _look_up(d, "iq1", _above(d, d.bytes_at(2, 32), _bit_fields(d, words, range(0, 12, 3), 7)), d.values)
    _shift(d, _bit_fields(d, words, (15,), 1))
    _scale(d, _bit_fields(d, words, (12,), 7), 0.5, 2, d.half_at(0))


def _iq1_m(d: Decoding) -> None:
    high, words = _ints(d, d.bytes_at(32, 16)), _ints(d, d.bytes_at(48, 8).view(torch.int16))
    _look_up(d, "iq1", _above(d, d.bytes_at(0, 32), _bit_fields(d, high, (0, 4), 7)), d.values)
    _shift(d, _bit_fields(d, high, (3, 7), 1))
    # The f16 of the block is spread over the upper four bits of four words.
    quarters, half = d.new(i32, 4), d.new(f32, 1)
    d.do(torch.bitwise_right_shift, words, 12, out=quarters)
    d.do(torch.bitwise_left_shift, quarters, d.constant(range(0, 16, 4), torch.int32), out=quarters)
    for i in range(1, 4):
        d.do(torch.bitwise_or, quarters[:, :1], quarters[:, i : i + 1], out=quarters[:, :1])
    d.do(half.copy_, quarters[:, :1].view(torch.float16)[:, :1])
    _scale(d, _bit_fields(d, words, range(0, 12, 3), 7), 0.5, 2, half)


def _iq4_xs(d: Decoding) -> None:
    six = _bit_fields(d, _ints(d, d.bytes_at(2, 2).view(torch.int16)), range(0, 16, 2), 3)
    d.do(torch.bitwise_left_shift, six, 4, out=six)
    d.do(torch.bitwise_or, six, _halves(d, 4, 4), out=six)
    fields(d, d.words_at(8, 128).view(d.count, 8, 4), 4)
    d.table(d.values, IQ4_LEVELS.tolist(), d.values)
    _scale(d, six, -32, 1, d.half_at(0))


def _nvfp4(d: Decoding) -> None:
    scale = d.new(f32, 4)
    d.table(d.bytes_at(0, 4), UE4M3.tolist(), scale)
    fields(d, d.words_at(4, 32).view(d.count, 4, 2), 4)
    d.table(d.values, E2M1.tolist(), d.values)
    d.scaled(scale)


def _tq1_0(d: Decoding) -> None:
    q, rest = _ints(d, d.bytes_at(0, 48)), _ints(d, d.bytes_at(48, 4))
    at = 0
    for fractions, digits in ((q[:, :32], 5), (q[:, 32:], 5), (rest, 4)):
        n = fractions.shape[1]
        digit = d.new(i32, n)
        for k in range(digits):
            d.do(torch.mul, fractions, 3**k, out=digit)
            d.do(torch.bitwise_and, digit, 255, out=digit)
            d.do(torch.mul, digit, 3, out=digit)
            d.do(torch.bitwise_right_shift, digit, 8, out=digit)
            d.do(d.values[:, at : at + n].copy_, digit)
            at += n
    d.centred(d.half_at(52), 1)


def _tq2_0(d: Decoding) -> None:
    fields(d, d.words_at(0, 64).view(d.count, 2, 8), 2)
    d.centred(d.half_at(64), 1)


DECODERS.update({
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
    "iq4_xs": _iq4_xs,
    "nvfp4": _nvfp4,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
})  # fmt: skip
