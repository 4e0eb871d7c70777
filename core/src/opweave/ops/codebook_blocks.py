"""Decoding of the block types of fewer than four bits an element, of iq4_xs and of nvfp4.

These types store an index into a codebook for each 4 or 8 elements, with signs apart (iq1, iq2, iq3); digits in base 3
(tq1_0, tq2_0); or levels of four bits with scales for parts of a block (iq4_xs, nvfp4). Imported by
`opweave.ops.blocks` when the first tensor of such a type is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from opweave.ops.codebooks import SIGN_BYTES, codebook
from opweave.ops.decoding import E2M1, IQ4_LEVELS, UE4M3, Array, Decoding, decodes

__all__: list[str] = []

_MASKS: Final = (np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little") * np.uint8(255)).view("<u8")
"""For each byte of signs eight bytes: 255 where the bit is set, else 0; that of the lowest bit first."""
_MASKS_OF_7: Final = _MASKS[SIGN_BYTES]


def _fields(t: Decoding, words: Array, shifts: Sequence[int], mask: int) -> Array:
    """``(word >> shift) & mask`` for each word and shift: indices, of shape (count, words · shifts)."""
    count, n = words.shape
    wide, result = t.scratch(n * len(shifts), words.dtype), t.scratch(n * len(shifts), np.intp)
    each = wide.reshape(count, n, len(shifts))
    t.call(np.right_shift, words[..., None], np.array(shifts, words.dtype), each)
    t.call(np.bitwise_and, wide, np.array(mask, words.dtype), wide)
    t.call(np.copyto, result, wide)
    return result


def _indices(t: Decoding, low: Array, high: Array, bits: int, width: int = 8) -> Array:
    """Indices: their lowest 8 bits are the bytes of ``low``, the ``bits`` above them are fields of the words in
    ``high``.

    Args:
        width: the distance in bits from one field to the next in a word of ``high``.
    """
    count = low.shape[1] // high.shape[1]
    result = _fields(t, high, [width * i for i in range(count)], (1 << bits) - 1)
    t.call(np.left_shift, result, np.array(8), result)
    t.call(np.bitwise_or, result, low, result)
    return result


def _entries(t: Decoding, name: str, indices: Array) -> Array:
    """The groups of levels that a codebook has at ``indices``."""
    table = codebook(name)
    whole = np.dtype(f"<u{table.shape[1]}")
    result = t.scratch(indices.shape[1] * table.shape[1])
    # In any mode but "raise" NumPy writes straight into the output.
    t.call(table.view(whole).reshape(-1).take, indices, 0, result.view(whole), "clip")
    return result


def _signed(t: Decoding, values: Array, signs: Array, masks: Array) -> Array:
    """``values`` with signs: of each eight values those are negated for which the row of ``masks`` at their index in
    ``signs`` is 255."""
    negative = t.scratch(values.shape[1])
    t.call(masks.take, signs, 0, negative.view("<u8"), "clip")
    # In two's complement -x is ~x + 1: with all bits set, x ^ 255 - 255.
    t.call(np.bitwise_xor, values, negative, values)
    t.call(np.subtract, values, negative, values)
    return values.view(np.int8)


def _as_indices(t: Decoding, x: Array) -> Array:
    result = t.scratch(x.shape[1], np.intp)
    t.call(np.copyto, result, x)
    return result


def _scales(t: Decoding, integers: Array, plus: float, times: float, half: Array) -> Array:
    """``half · (integers + plus) · times``, exact in f32."""
    result = t.scratch(integers.shape[1], np.float32)
    t.call(np.copyto, result, integers)
    t.call(np.add, result, np.float32(plus), result)
    t.call(np.multiply, result, np.float32(times), result)
    t.call(np.multiply, result, half, result)
    return result


def _nibbles(t: Decoding, x: Array) -> Array:
    """The low and the high half of each byte, alternating."""
    return t.planes(x, 4, 1)


# --- indices into codebooks, and signs ------------------------------------------------------------------------------


@decodes("iq2_xxs", d="<f2", q="V64")
def _iq2_xxs(t: Decoding) -> None:
    # For 32 elements four indices, then a word: four times 7 bits of signs, and 4 bits of the scale.
    q = t.field("q", 64)
    indices = t.scratch(32, np.intp)
    t.call(np.copyto, indices.reshape(-1, 8, 4), q.reshape(-1, 8, 8)[..., :4])
    words = q.view("<u4")[:, 1::2]
    integers = _signed(t, _entries(t, "iq2_xxs", indices), _fields(t, words, range(0, 28, 7), 127), _MASKS_OF_7)
    t.finish(integers, _scales(t, _fields(t, words, [28], 15), 0.5, 0.25, t.half("d")))


@decodes("iq2_xs", d="<f2", q="V64", scales="V8")
def _iq2_xs(t: Decoding) -> None:
    words = t.field("q", 64).view("<u2")  # 9 bits of the index, 7 of signs
    indices, signs = _fields(t, words, [0], 511), _fields(t, words, [9], 127)
    integers = _signed(t, _entries(t, "iq2_xs", indices), signs, _MASKS_OF_7)
    t.finish(integers, _scales(t, _nibbles(t, t.field("scales", 8)), 0.5, 0.25, t.half("d")))


@decodes("iq2_s", d="<f2", q="V32", signs="V32", high="V8", scales="V8")
def _iq2_s(t: Decoding) -> None:
    indices = _indices(t, t.field("q", 32), t.field("high", 8), 2, 2)
    integers = _signed(t, _entries(t, "iq2_s", indices), _as_indices(t, t.field("signs", 32)), _MASKS)
    t.finish(integers, _scales(t, _nibbles(t, t.field("scales", 8)), 0.5, 0.25, t.half("d")))


@decodes("iq3_xxs", d="<f2", q="V64", words="V32")
def _iq3_xxs(t: Decoding) -> None:
    words = t.field("words", 32).view("<u4")  # as in iq2_xxs
    values = _entries(t, "iq3_xxs", _as_indices(t, t.field("q", 64)))
    integers = _signed(t, values, _fields(t, words, range(0, 28, 7), 127), _MASKS_OF_7)
    t.finish(integers, _scales(t, _fields(t, words, [28], 15), 0.5, 0.5, t.half("d")))


@decodes("iq3_s", d="<f2", q="V64", high="V8", signs="V32", scales="V4")
def _iq3_s(t: Decoding) -> None:
    indices = _indices(t, t.field("q", 64), t.field("high", 8), 1, 1)
    integers = _signed(t, _entries(t, "iq3_s", indices), _as_indices(t, t.field("signs", 32)), _MASKS)
    t.finish(integers, _scales(t, _nibbles(t, t.field("scales", 4)), 0.5, 2, t.half("d")))


def _shifted(t: Decoding, low: Array, high: Array, shift: Array) -> Array:
    """Eight times the levels of iq1, plus 1 for those whose bit in ``shift`` is 0, minus 1 for those whose bit is 1."""
    values = _entries(t, "iq1", _indices(t, low, high, 3, 4 if high.dtype.itemsize == 1 else 3)).view(np.int8)
    t.call(np.left_shift, values, np.array(3, np.int8), values)
    delta = t.scratch(shift.shape[1], np.int8)
    t.call(np.not_equal, shift, np.array(0, shift.dtype), delta.view(np.bool_))
    t.call(np.left_shift, delta, np.array(1, np.int8), delta)
    t.call(np.subtract, np.array(1, np.int8), delta, delta)
    parts = values.reshape(t.count, shift.shape[1], -1)
    t.call(np.add, parts, delta[..., None], parts)
    return values


@decodes("iq1_s", d="<f2", q="V32", high="V16")
def _iq1_s(t: Decoding) -> None:
    # For 32 elements four times 3 bits above the indices, 3 bits of the scale, and the sign of the shift.
    words = t.field("high", 16).view("<u2")
    integers = _shifted(t, t.field("q", 32), words, _fields(t, words, [15], 1))
    # 1/8 · (2 · scale + 1)
    t.finish(integers, _scales(t, _fields(t, words, [12], 7), 0.5, 0.25, t.half("d")))


@decodes("iq1_m", q="V32", high="V16", scales="V8")
def _iq1_m(t: Decoding) -> None:
    # For 16 elements a byte: two times 3 bits above the indices and the sign of the shift; four scales of 3 bits in
    # each word, whose upper four bits are a quarter of the f16 of the block.
    high, words = t.field("high", 16), t.field("scales", 8).view("<u2")
    integers = _shifted(t, t.field("q", 32), high, _fields(t, high, [3, 7], 1))
    quarters = t.scratch(4, np.uint16)
    t.call(np.right_shift, words, np.array(12, np.uint16), quarters)
    t.call(np.left_shift, quarters, np.array([0, 4, 8, 12], np.uint16), quarters)
    bits, half = t.scratch(1, np.uint16), t.scratch(1, np.float32)
    t.call(np.bitwise_or.reduce, quarters, 1, None, bits.reshape(-1))
    t.call(np.copyto, half, bits.view(np.float16))
    t.finish(integers, _scales(t, _fields(t, words, [0, 3, 6, 9], 7), 0.5, 0.25, half))


# --- levels of four bits --------------------------------------------------------------------------------------------


@decodes("iq4_xs", d="<f2", high="V2", low="V4", q="V128")
def _iq4_xs(t: Decoding) -> None:
    scales = _indices_of_six(t, t.field("low", 4), t.field("high", 2).view("<u2"))
    t.finish(t.lookup(t.field("q", 128), IQ4_LEVELS, 16), _scales(t, scales, -32, 1, t.half("d")))


def _indices_of_six(t: Decoding, low: Array, high: Array) -> Array:
    """Eight numbers of 6 bits: the lowest four bits are the halves of ``low``, the others two bits of a word each."""
    result = _fields(t, high, range(0, 16, 2), 3)
    t.call(np.left_shift, result, np.array(4), result)
    t.call(np.bitwise_or, result, _nibbles(t, low), result)
    return result


@decodes("nvfp4", scales="V4", q="V32")
def _nvfp4(t: Decoding) -> None:
    scale = t.scratch(4, np.float32)
    t.call(UE4M3.take, _as_indices(t, t.field("scales", 4)), 0, scale, "clip")
    t.finish(t.lookup(t.field("q", 32), E2M1, 8), scale)


# --- digits in base 3 -----------------------------------------------------------------------------------------------


@decodes("tq1_0", q="V48", rest="V4", d="<f2")
def _tq1_0(t: Decoding) -> None:
    # A byte divided by 256 is a fraction with five digits in base 3; in the last four bytes it has four. The integer
    # part of three times the fraction is the next digit.
    whole, at = t.scratch(256), 0
    q, rest = t.field("q", 48), t.field("rest", 4)
    for fractions, digits in ((q[:, :32], 5), (q[:, 32:], 5), (rest, 4)):
        n = fractions.shape[1]
        fraction, tripled = t.scratch(n), t.scratch(n, np.uint16)
        for k in range(digits):
            t.call(np.multiply, fractions, np.array(3**k, np.uint8), fraction)
            t.call(np.multiply, fraction, np.array(3, np.uint16), tripled)
            t.call(np.right_shift, tripled, np.array(8, np.uint16), tripled)
            t.call(np.copyto, whole[:, at : at + n], tripled, "unsafe")
            at += n
    t.finish(t.less(whole, 1), t.half("d"))


@decodes("tq2_0", q="V64", d="<f2")
def _tq2_0(t: Decoding) -> None:
    t.finish(t.less(t.planes(t.field("q", 64), 2, 32), 1), t.half("d"))
