"""Encoding of quantized blocks in plain NumPy: the reference of ``quantize``.

q4_0, q4_1, q5_0, q5_1, q8_0, tq1_0 and tq2_0 are encoded as the ``gguf`` package does it, to the bit; mxfp4 too, but
for blocks whose largest value is by less than one part in 2^21 smaller than a power of two, of which gguf may round the
logarithm up; nvfp4 as ggml does it. The other types are fitted, and q4_0, q4_1, q5_0 and q5_1 are where importances are
given. For each part of a block one scale for each of `STEPS` is tried: it gives integers, and these the least squares
scale. The scale with the smallest sum of squared errors, each times its importance, is kept. Then the scales are
rounded to those of the type, and the integers are computed again with these.

Everything is computed in f32, each operation rounded, and sums are added by halves (`tree_sum`). So a device without
fused multiplication and with correctly rounded division gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from opweave.errors import DTypeError
from opweave.graph.dtypes import DType
from opweave.ops.blocks import fields_of
from opweave.ops.decoding import E2M1, IQ4_LEVELS, UE4M3, Array
from opweave.ops.fitting import STEPS, best_scales, inverse_of, packed, store, times, tree_sum

__all__ = ["ENCODED", "EQUAL", "FITTED", "IQ4_ENDS", "OF_ENTRIES", "WEIGHED", "encode", "encode_into"]

OF_ENTRIES: Final = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs")
"""Types whose elements are entries of codebooks: `opweave.ops.codebook_encoding` encodes to them."""

FITTED: Final = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", *OF_ENTRIES)
"""Types whose encoding looks for the smallest sum of squared errors."""

WEIGHED: Final = ("q4_0", "q4_1", "q5_0", "q5_1", *FITTED)
"""Types that are encoded with importances, the factors of squared errors. No type needs them."""

ENCODED: Final = (*WEIGHED, "q8_0", "tq2_0", "tq1_0", "mxfp4", "nvfp4")
"""The types to which values can be encoded."""

IQ4_ENDS: Final = tuple([end - 6 * step for end in (-127, 113) for step in range(-4, 5)])
"""For iq4_nl and iq4_xs, whose levels are not symmetric, the largest value is divided by each of these numbers."""

EQUAL: Final = np.float32(2.0**-16)
"""A determinant of so small a part of its first product is one of rounding errors."""

_AT_ONCE: Final = 1 << 16
"""Elements that are encoded at a time: few enough for intermediate results to stay in a cache."""


def encode(values: Array, dtype: DType, importance: Array | None = None) -> Array:
    """Values as quantized blocks.

    Args:
        values: f32, rows of whole blocks along the last axis. Blocks with a value that is not finite are unspecified.
        dtype: one of `ENCODED`.
        importance: f32, broadcasts to the values; for types of `WEIGHED`: the factors of squared errors.

    Returns:
        ``uint8``, the last axis in bytes.

    Raises:
        DTypeError: as `encode_into`.
    """
    out = np.empty((*values.shape[:-1], dtype.row_bytes(values.shape[-1])), np.uint8)
    if values.size:
        encode_into(values, out, dtype, importance)
    return out


def encode_into(values: Array, out: Array, dtype: DType, importance: Array | None = None) -> None:
    """`encode` into ``out``, ``uint8``, whose last axis has no gaps.

    Raises:
        DTypeError: a type to which values are not encoded, or importances for one that does not take them.
    """
    if dtype.name not in ENCODED or (importance is not None and dtype.name not in WEIGHED):
        raise DTypeError(f"{dtype} is not encoded" + (" with importances" if dtype.name in ENCODED else ""))
    if dtype.name in OF_ENTRIES and dtype.name not in _ENCODERS:
        from opweave.ops.codebook_encoding import encode_entries

        _ENCODERS.update({name: partial(encode_entries, name) for name in OF_ENTRIES})
    rows, blocks = values.reshape(-1, values.shape[-1]), fields_of(out, dtype)
    flat = blocks.reshape(len(rows), -1)
    weights = None if importance is None else np.broadcast_to(importance, values.shape).reshape(rows.shape)
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    with np.errstate(all="ignore"):
        for first in range(0, len(rows), step):
            some = slice(first, first + step)
            made = np.empty(flat[some].size, flat.dtype)
            each = None if weights is None else weights[some].reshape(-1, dtype.block)
            _ENCODERS[dtype.name](np.ascontiguousarray(rows[some], np.float32).reshape(-1, dtype.block), each, made)
            flat[some] = made.reshape(-1, flat.shape[1])
    if not np.shares_memory(flat, out):
        blocks[...] = flat.reshape(blocks.shape)  # the rows of ``out`` have gaps


_ENCODERS: Final[dict[str, Callable[[Array, Array | None, Array], None]]] = {}


def _encodes(name: str) -> Callable[[Callable[..., None]], None]:
    def register(function: Callable[..., None]) -> None:
        _ENCODERS[name] = function

    return register


# --- 32 elements, one scale (and offset) ----------------------------------------------------------------------------


def _half_steps(x: Array, importance: Array | None, highest: int) -> tuple[Array, Array]:
    """Scale and integers 0 .. 2 · highest - 1. The value of largest magnitude, of several the first, becomes 0; with
    importances they are fitted."""
    if importance is not None:
        scale, q = _one_scale(x, importance, _signed(highest))
        return scale, (q + highest).astype(np.uint8)
    largest = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
    scale = largest / np.float32(-highest)
    q = np.trunc(x * inverse_of(scale) + np.float32(highest + 0.5))
    return scale, np.minimum(q, 2 * highest - 1).astype(np.uint8)


def _steps(x: Array, importance: Array | None, highest: int) -> tuple[Array, Array, Array]:
    """Scale, offset and integers 0 .. highest: 0 for the smallest value, ``highest`` for the largest one; with
    importances they are fitted."""
    if importance is not None:
        scale, offset = map(_as_half, _fit_with_offset(x[:, None], importance[:, None], highest, signed=True))
        q = np.clip(np.rint((x + offset) * inverse_of(scale)), 0, highest)
        return scale, np.float32(0) - offset, q.astype(np.uint8)
    # The smallest of 0.0 and -0.0 may be either; adding 0.0 makes it 0.0 on every device.
    low, high = x.min(1, keepdims=True) + np.float32(0), x.max(1, keepdims=True) + np.float32(0)
    scale = (high - low) / np.float32(highest)
    q = np.trunc((x - low) * inverse_of(scale) + np.float32(0.5))
    return scale, low, np.minimum(q, highest).astype(np.uint8)


def _rounded(x: Array) -> Array:
    """To the nearest integer, halves away from zero."""
    size = np.abs(x)
    whole = np.floor(size)
    result: Array = np.copysign(whole + (size - whole >= 0.5), x)
    return result


def _one_scale(x: Array, importance: Array | None, integers: _Integers) -> tuple[Array, Array]:
    """Scales, and integers for these rounded to f16."""
    scale = _as_half(_fit(x[:, None], None if importance is None else importance[:, None], integers))
    return scale, integers.nearest(x * inverse_of(scale))


@_encodes("q4_0")
def _q4_0(x: Array, importance: Array | None, out: Array) -> None:
    scale, q = _half_steps(x, importance, 8)
    store(out, "d", scale)
    store(out, "q", packed(q, 4, 16))


@_encodes("q4_1")
def _q4_1(x: Array, importance: Array | None, out: Array) -> None:
    scale, low, q = _steps(x, importance, 15)
    store(out, "d", scale)
    store(out, "m", low)
    store(out, "q", packed(q, 4, 16))


def _store_five_bits(out: Array, q: Array) -> None:
    store(out, "fifth", np.packbits(q >> 4, 1, "little"))
    store(out, "q", packed(q & 15, 4, 16))


@_encodes("q5_0")
def _q5_0(x: Array, importance: Array | None, out: Array) -> None:
    scale, q = _half_steps(x, importance, 16)
    store(out, "d", scale)
    _store_five_bits(out, q)


@_encodes("q5_1")
def _q5_1(x: Array, importance: Array | None, out: Array) -> None:
    scale, low, q = _steps(x, importance, 31)
    store(out, "d", scale)
    store(out, "m", low)
    _store_five_bits(out, q)


@_encodes("q8_0")
def _q8_0(x: Array, importance: Array | None, out: Array) -> None:
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    store(out, "d", scale)
    store(out, "q", _rounded(x * inverse_of(scale)).astype(np.int8).view(np.uint8))


@_encodes("iq4_nl")
def _iq4_nl(x: Array, importance: Array | None, out: Array) -> None:
    scale, levels = _one_scale(x, importance, _IQ4)
    store(out, "d", scale)
    store(out, "q", packed(_iq4_index(levels), 4, 16))


def _iq4_index(levels: Array) -> Array:
    return np.searchsorted(IQ4_LEVELS, levels.astype(np.int8))


@_encodes("mxfp4")
def _mxfp4(x: Array, importance: Array | None, out: Array) -> None:
    largest = np.abs(x).max(1, keepdims=True)
    exponent = np.where(largest > 0, np.maximum(np.frexp(largest)[1] + 124, 0), 0)
    store(out, "e", exponent.astype(np.uint8))
    store(out, "q", packed(_e2m1_index(x, np.ldexp(np.float32(1), exponent - 128)), 4, 16))


@_encodes("nvfp4")
def _nvfp4(x: Array, importance: Array | None, out: Array) -> None:
    parts = x.reshape(-1, 16)
    wanted = np.abs(parts).max(1, keepdims=True) / np.float32(6)
    # Of an f32 the exponent and three bits of the fraction, rounded; below 2^-6 steps of 2^-9. ggml makes 126, the
    # largest one, of all with the largest exponent.
    bits = (np.ascontiguousarray(wanted).view(np.int32) + (1 << 19) >> 20) - 120 * 8
    exponent = np.where(wanted < 2**-6, np.floor(wanted * np.float32(512) + np.float32(0.5)), bits)
    exponent = np.where(exponent >= 120, 126, exponent).astype(np.uint8)
    store(out, "scales", exponent.reshape(-1, 4))
    store(out, "q", packed(_e2m1_index(parts, UE4M3.take(exponent)), 4, 8).reshape(len(x), -1))


def _e2m1_index(x: Array, steps: Array) -> Array:
    """The numbers of the levels of `E2M1` that are nearest to values, for steps of shape (blocks, 1)."""
    levels = steps * E2M1[:8].astype(np.float32)
    before = size = np.minimum(np.abs(x), levels[:, 7:])
    q = np.zeros(x.shape, np.uint8)
    for i in range(1, 8):
        error = np.abs(levels[:, i : i + 1] - size)
        q += error < before
        before = error
    return q | ((x < 0) & (q > 0)).astype(np.uint8) << 3


# --- 256 elements of three levels -----------------------------------------------------------------------------------


def _three_levels(x: Array) -> tuple[Array, Array]:
    scale = np.abs(x).max(1, keepdims=True)
    return scale, (_rounded(x * inverse_of(scale)) + 1).astype(np.uint8)


@_encodes("tq1_0")
def _tq1_0(x: Array, importance: Array | None, out: Array) -> None:
    scale, q = _three_levels(x)
    pieces = []
    for digits, group, part in ((5, 32, q[:, :160]), (5, 16, q[:, 160:240]), (4, 4, q[:, 240:])):
        powers = 3 ** np.arange(4, 4 - digits, -1)
        number = (part.reshape(len(q), digits, group) * powers[:, None]).sum(1)
        pieces.append(((number * 256 + 242) // 243).astype(np.uint8))  # the fraction of 243, rounded up, of 256
    store(out, "q", np.concatenate(pieces[:2], 1))
    store(out, "rest", pieces[2])
    store(out, "d", scale)


@_encodes("tq2_0")
def _tq2_0(x: Array, importance: Array | None, out: Array) -> None:
    scale, q = _three_levels(x)
    store(out, "q", packed(q, 2, 32))
    store(out, "d", scale)


# --- 256 elements: scales of parts of 16 or 32, themselves scaled by an f16 -----------------------------------------


class _Integers(NamedTuple):
    """Integers of which values are multiples, beginning with the one that is largest in magnitude.

    Attributes:
        ends: the numbers to which the value of a part that is largest in magnitude is scaled when scales are tried.
        nearest: of f32 numbers, as f32.
    """

    ends: Iterable[float]
    nearest: Callable[[Array], Array]


def _signed(highest: int) -> _Integers:
    """The integers -highest .. highest - 1."""
    return _Integers([-highest - step for step in STEPS], lambda x: np.clip(np.rint(x), -highest, highest - 1))


def _iq4_nearest(x: Array) -> Array:
    # Levels are integers, so that the numbers between two of them are multiples of a half.
    found: Array = _IQ4_AT.take(np.clip(np.floor(2 * x) + 254, 0, 508).astype(np.intp), mode="clip")
    return found


_IQ4_AT: Final = IQ4_LEVELS.astype(np.float32)[
    np.searchsorted(IQ4_LEVELS[1:].astype(np.int64) + IQ4_LEVELS[:-1], np.arange(-254, 255), "right")
]
"""The nearest level of numbers that are rounded down to multiples of a half, from -127 on; of two the upper one."""

_IQ4: Final = _Integers(IQ4_ENDS, _iq4_nearest)


def _fit(x: Array, importance: Array | None, integers: _Integers) -> Array:
    """Scales of parts, for values and importances of shape (blocks, parts, elements)."""
    low, high = x.min(-1), x.max(-1)
    weighted = times(x, importance)

    def products(inverse: Array) -> tuple[Array, Array]:
        q = integers.nearest(x * inverse[..., None])
        return tree_sum(weighted * q), tree_sum(times(q, importance) * q)

    return best_scales(np.where(-low > high, low, high), integers.ends, products)


def _fit_with_offset(x: Array, importance: Array | None, highest: int, *, signed: bool = False) -> tuple[Array, Array]:
    """Scales and offsets of parts for values scale · q - offset with integers q from 0 to ``highest``; scales are not
    negative, nor are offsets if not ``signed``. Arguments as for `_fit`."""
    low = x.min(-1) if signed else np.minimum(x.min(-1), np.float32(0))
    width = x.max(-1) - low
    scales, offsets = width - width, -low  # NaN where a value is not finite
    weighted = times(x, importance)
    count = np.full_like(low, x.shape[-1]) if importance is None else tree_sum(importance)
    total = tree_sum(weighted)
    # Where all values are one that is not positive, the offset alone represents it without an error.
    best = np.where(width == 0, np.float32(0), np.float32(np.inf))
    for step in STEPS:
        inverse = np.where(width == 0, np.float32(0), np.float32(highest + step) / width)
        q = np.clip(np.rint((x - low[..., None]) * inverse[..., None]), 0, highest)
        of_q = times(q, importance)
        sum_q, square, product = tree_sum(of_q), tree_sum(of_q * q), tree_sum(weighted * q)
        # The least squares of scale and offset, or of the scale alone where the offset would be negative. Where all
        # integers that count are one, which a determinant of rounding errors shows, any scale is as good.
        determinant = count * square - sum_q * sum_q
        plain = width / np.float32(highest + step)
        scale = np.where(determinant > EQUAL * (count * square), (count * product - total * sum_q) / determinant, plain)
        offset = np.where(count > 0, (scale * sum_q - total) / count, np.float32(0))
        if not signed:
            alone = offset < 0
            scale = np.where(alone, np.where(square > 0, product / square, np.float32(0)), scale)
            offset = np.where(alone, np.float32(0), offset)
        difference = q * scale[..., None] - offset[..., None] - x
        error = tree_sum(times(difference, importance) * difference)
        better = (error < best) & (scale >= 0)
        best = np.where(better, error, best)
        scales, offsets = np.where(better, scale, scales), np.where(better, offset, offsets)
    return scales, offsets


def _as_half(x: Array) -> Array:
    """Rounded to f16."""
    result: Array = x.astype(np.float16).astype(np.float32)
    return result


def _symmetric(
    x: Array, importance: Array | None, parts: int, integers: _Integers, most: int
) -> tuple[Array, Array, Array]:
    """The scales of blocks, those of parts as integers -most .. most - 1, and integers."""
    split = x.reshape(len(x), parts, -1)
    scales = _fit(split, None if importance is None else importance.reshape(split.shape), integers)
    low, high = scales.min(1, keepdims=True), scales.max(1, keepdims=True)
    whole = _as_half(np.where(-low > high, low, high) / np.float32(-most))
    of_parts = np.clip(np.rint(scales * inverse_of(whole)), -most, most - 1)
    q = integers.nearest(split * inverse_of(whole * of_parts)[..., None])
    return whole, of_parts, q.reshape(x.shape)


def _with_offsets(
    x: Array, importance: Array | None, parts: int, highest: int, most: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Scales and offsets of blocks, those of parts as integers 0 .. most, and integers 0 .. highest."""
    split = x.reshape(len(x), parts, -1)
    fitted = _fit_with_offset(split, None if importance is None else importance.reshape(split.shape), highest)
    wholes = [_as_half(each.max(1, keepdims=True) / np.float32(most) + np.float32(0)) for each in fitted]
    scales, offsets = (
        np.clip(np.rint(each * inverse_of(whole)), 0, most) for each, whole in zip(fitted, wholes, strict=True)
    )
    shifted = split + (wholes[1] * offsets)[..., None]
    q = np.clip(np.rint(shifted * inverse_of(wholes[0] * scales)[..., None]), 0, highest)
    return *wholes, scales.astype(np.uint8), offsets.astype(np.uint8), q.reshape(x.shape).astype(np.uint8)


@_encodes("q2_k")
def _q2_k(x: Array, importance: Array | None, out: Array) -> None:
    whole, shift, scales, offsets, q = _with_offsets(x, importance, 16, 3, 15)
    store(out, "scales", scales | offsets << 4)
    store(out, "q", packed(q, 2, 32))
    store(out, "d", whole)
    store(out, "m", shift)


@_encodes("q3_k")
def _q3_k(x: Array, importance: Array | None, out: Array) -> None:
    whole, scales, signed = _symmetric(x, importance, 16, _signed(4), 32)
    q, six = (signed + 4).astype(np.uint8), (scales + 32).astype(np.uint8)
    store(out, "third", packed(q >> 2, 1, 32))
    store(out, "q", packed(q & 3, 2, 32))
    store(out, "low", packed(six & 15, 4, 8))
    store(out, "high", packed(six >> 4, 2, 4))
    store(out, "d", whole)


def _store_scales_of_8(x: Array, importance: Array | None, highest: int, out: Array) -> Array:
    """Eight scales and eight offsets of 6 bits in 12 bytes; returns the integers."""
    whole, shift, scales, offsets, q = _with_offsets(x, importance, 8, highest, 63)
    store(out, "d", whole)
    store(out, "m", shift)
    for field, six in (("scales", scales), ("offsets", offsets)):
        store(out, field, six[:, :4] | six[:, 4:] >> 4 << 6)
    store(out, "rest", scales[:, 4:] & 15 | offsets[:, 4:] << 4)
    return q


@_encodes("q4_k")
def _q4_k(x: Array, importance: Array | None, out: Array) -> None:
    store(out, "q", packed(_store_scales_of_8(x, importance, 15, out), 4, 32))


@_encodes("q5_k")
def _q5_k(x: Array, importance: Array | None, out: Array) -> None:
    q = _store_scales_of_8(x, importance, 31, out)
    store(out, "fifth", packed(q >> 4, 1, 32))
    store(out, "q", packed(q & 15, 4, 32))


@_encodes("iq4_xs")
def _iq4_xs(x: Array, importance: Array | None, out: Array) -> None:
    whole, scales, levels = _symmetric(x, importance, 8, _IQ4, 32)
    six = (scales + 32).astype(np.uint8)
    store(out, "d", whole)
    store(out, "low", packed(six & 15, 4, 1))
    store(out, "high", packed(six >> 4, 2, 1))
    store(out, "q", packed(_iq4_index(levels), 4, 16))


@_encodes("q6_k")
def _q6_k(x: Array, importance: Array | None, out: Array) -> None:
    whole, scales, signed = _symmetric(x, importance, 16, _signed(32), 128)
    q = (signed + 32).astype(np.uint8)
    store(out, "low", packed(q & 15, 4, 64))
    store(out, "high", packed(q >> 4, 2, 32))
    store(out, "scales", scales.astype(np.int8).view(np.uint8))
    store(out, "d", whole)
