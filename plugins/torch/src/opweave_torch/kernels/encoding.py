"""Encoding of quantized blocks in torch's operations: those of ``opweave.ops.encoding``, in the same order, so that the
bytes are the same.

Values for which they have no room are made anew in each call, as many as torch keeps in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from opweave.contract import Call
from opweave.ops.decoding import E2M1, IQ4_LEVELS, UE4M3
from opweave.ops.encoding import EQUAL, IQ4_ENDS
from opweave.ops.fitting import STEPS
from opweave_torch.tunables import limit

__all__ = ["ENCODED", "encoder"]

_AT_ONCE: Final = limit("encoded_at_once", 1 << 20, 1, 1 << 24)
"""Elements that are encoded at a time."""


def encoder(name: str, out: Tensor, x: Tensor, importance: Tensor | None) -> Call:
    """The call that encodes ``x``.

    Args:
        name: of the block type.
        out: ``uint8``, shape (..., blocks, bytes of a block).
        x, importance: f32, shape (..., elements), any strides.
    """
    for values in (_LEVELS, _SCALES):
        _table(values, x.device)  # while a graph is captured nothing can be copied to the device
    return partial(_encode, _ENCODERS[name], _AT_ONCE.value, out, x, importance)


_LEVELS: Final = tuple(IQ4_LEVELS.tolist())
_SCALES: Final = tuple(UE4M3.tolist())


@lru_cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _encode(
    encode: Callable[..., Sequence[Tensor]], at_once: int, out: Tensor, x: Tensor, importance: Tensor | None
) -> None:
    if x.numel() > at_once and x.ndim > 1 and len(x) > 1:
        step = max(1, at_once * len(x) // x.numel())
        for first in range(0, len(x), step):
            some = slice(first, first + step)
            _encode(encode, at_once, out[some], x[some], None if importance is None else importance[some])
        return
    length = x.numel() // out.shape[:-1].numel()
    values = x.reshape(-1, length)
    weights = None if importance is None else importance.reshape(-1, length)
    out.copy_(torch.cat(list(encode(values, weights)), 1).view(out.shape))


def _half(x: Tensor) -> Tensor:
    """The bytes of an f16."""
    return x.to(torch.float16).contiguous().view(torch.uint8)


def _packed(integers: Tensor, width: int, group: int) -> Tensor:
    """Fields of ``width`` bits of each ``group`` of bytes: all lowest ones first, then the next ones."""
    fields = integers.to(torch.uint8).reshape(len(integers), -1, 8 // width, group)
    result = fields[:, :, 0].clone()
    for i in range(1, 8 // width):
        result |= fields[:, :, i] << (i * width)
    return result.view(len(integers), -1)


def _quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, rounded once: of a number and a tensor torch computes the product with a reciprocal."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return torch.div(*[v if isinstance(v, Tensor) else like.new_full((1,), v) for v in (a, b)])


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, 0.0, 1 / x)


# --- 32 elements, one scale (and offset) ----------------------------------------------------------------------------


def _half_steps(x: Tensor, importance: Tensor | None, highest: int) -> tuple[Tensor, Tensor]:
    if importance is not None:
        scale, q = _one_scale(x, importance, *_signed(highest))
        return scale, q + highest
    size = x.abs()
    peak = size.amax(1, True)
    # The first of the largest: torch's argmax may give any.
    places = torch.arange(x.shape[1], device=x.device)
    first = torch.where(size == peak, places, x.shape[1] - 1).amin(1, True)
    scale = torch.where(peak.isnan(), peak, x.gather(1, first) / -highest)
    return scale, torch.trunc(x * _inverse(scale) + (highest + 0.5)).clamp(max=2 * highest - 1)


def _steps(x: Tensor, importance: Tensor | None, highest: int) -> tuple[Tensor, Tensor, Tensor]:
    if importance is not None:
        fitted = _fit_with_offset(x.unsqueeze(1), importance.unsqueeze(1), highest, signed=True)
        scale, offset = map(_as_half, fitted)
        return scale, 0.0 - offset, torch.round((x + offset) * _inverse(scale)).clamp(0, highest)
    low, high = x.amin(1, True) + 0.0, x.amax(1, True) + 0.0
    scale = _quotient(high - low, highest)
    return scale, low, torch.trunc((x - low) * _inverse(scale) + 0.5).clamp(max=highest)


def _rounded(x: Tensor) -> Tensor:
    """To the nearest integer, halves away from zero."""
    size = x.abs()
    whole = size.floor()
    return torch.copysign(whole + (size - whole >= 0.5), x)


def _five_bits(q: Tensor) -> tuple[Tensor, Tensor]:
    q = q.to(torch.uint8)
    fifths = (q >> 4).view(-1, 4, 8) << torch.arange(8, device=q.device, dtype=torch.uint8)
    return fifths.sum(2, dtype=torch.uint8), _packed(q & 15, 4, 16)


def _q4_0(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, q = _half_steps(x, importance, 8)
    return _half(scale), _packed(q, 4, 16)


def _q4_1(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, low, q = _steps(x, importance, 15)
    return _half(scale), _half(low), _packed(q, 4, 16)


def _q5_0(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, q = _half_steps(x, importance, 16)
    return _half(scale), *_five_bits(q)


def _q5_1(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, low, q = _steps(x, importance, 31)
    return _half(scale), _half(low), *_five_bits(q)


def _q8_0(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale = _quotient(x.abs().amax(1, True), 127)
    return _half(scale), _rounded(x * _inverse(scale)).to(torch.int8).view(torch.uint8)


def _iq4_nl(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, levels = _one_scale(x, importance, IQ4_ENDS, _iq4_nearest)
    return _half(scale), _packed(_iq4_index(levels), 4, 16)


def _mxfp4(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    largest = x.abs().amax(1, True)
    exponent = torch.where(largest > 0, (torch.frexp(largest).exponent + 124).clamp(min=0), 0)
    step = torch.ldexp(torch.ones_like(largest), exponent - 128)
    return exponent.to(torch.uint8), _packed(_e2m1_index(x, step), 4, 16)


def _nvfp4(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    parts = x.reshape(-1, 16)
    wanted = _quotient(parts.abs().amax(1, True), 6)
    bits = (wanted.contiguous().view(torch.int32) + (1 << 19) >> 20) - 120 * 8
    exponent = torch.where(wanted < 2**-6, torch.floor(wanted * 512 + 0.5).to(torch.int32), bits)
    exponent = torch.where(exponent >= 120, 126, exponent.clamp(min=0))
    step = _table(_SCALES, x.device)[exponent]
    return exponent.to(torch.uint8).view(-1, 4), _packed(_e2m1_index(parts, step), 4, 8).view(len(x), -1)


def _e2m1_index(x: Tensor, step: Tensor) -> Tensor:
    before = size = torch.minimum(x.abs(), step * 12)
    q = torch.zeros_like(x)
    for level in E2M1[1:8].tolist():
        error = (step * level - size).abs()
        q += error < before
        before = error
    return torch.where((x < 0) & (q > 0), q + 8, q)


# --- 256 elements of three levels -----------------------------------------------------------------------------------


def _three_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, True)
    return scale, _rounded(x * _inverse(scale)) + 1


def _tq1_0(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, q = _three_levels(x)
    pieces = []
    for digits, part in ((5, q[:, :160]), (5, q[:, 160:240]), (4, q[:, 240:])):
        number = part.to(torch.int32).view(len(q), digits, -1)
        total = number[:, 0] * 81
        for i in range(1, digits):
            total += number[:, i] * 3 ** (4 - i)
        pieces.append(torch.div(total * 256 + 242, 243, rounding_mode="floor").to(torch.uint8))
    return *pieces, _half(scale)


def _tq2_0(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    scale, q = _three_levels(x)
    return _packed(q, 2, 32), _half(scale)


# --- 256 elements: scales of parts of 16 or 32, themselves scaled by an f16 -----------------------------------------


def _tree_sum(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _times(x: Tensor, importance: Tensor | None) -> Tensor:
    return x if importance is None else x * importance


Nearest = Callable[[Tensor], Tensor]


def _signed(highest: int) -> tuple[Sequence[float], Nearest]:
    return [-highest - step for step in STEPS], lambda x: torch.round(x).clamp(-highest, highest - 1)


def _iq4_nearest(x: Tensor) -> Tensor:
    levels = _table(_LEVELS, x.device)
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2, right=True)]


def _iq4_index(levels: Tensor) -> Tensor:
    return torch.searchsorted(_table(_LEVELS, levels.device), levels.contiguous())


def _one_scale(x: Tensor, importance: Tensor | None, ends: Sequence[float], nearest: Nearest) -> tuple[Tensor, Tensor]:
    scale = _as_half(_fit(x.unsqueeze(1), None if importance is None else importance.unsqueeze(1), ends, nearest))
    return scale, nearest(x * _inverse(scale))


def _fit(x: Tensor, importance: Tensor | None, ends: Sequence[float], nearest: Nearest) -> Tensor:
    low, high = x.amin(-1), x.amax(-1)
    largest = torch.where(-low > high, low, high)
    scales, best = largest - largest, torch.zeros_like(largest)
    weighted = _times(x, importance)
    for end in ends:
        inverse = torch.where(largest == 0, 0.0, _quotient(end, largest))
        q = nearest(x * inverse.unsqueeze(-1))
        product, square = _tree_sum(weighted * q), _tree_sum(_times(q, importance) * q)
        scale = torch.where(square > 0, product / square, 0.0)
        less = scale * product
        better = less > best
        best, scales = torch.where(better, less, best), torch.where(better, scale, scales)
    return scales


def _fit_with_offset(
    x: Tensor, importance: Tensor | None, highest: int, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    low = x.amin(-1) if signed else x.amin(-1).clamp(max=0)
    width = x.amax(-1) - low
    scales, offsets = width - width, -low
    weighted = _times(x, importance)
    count = torch.full_like(low, x.shape[-1]) if importance is None else _tree_sum(importance)
    total = _tree_sum(weighted)
    best = torch.where(width == 0, 0.0, torch.inf)
    for step in STEPS:
        inverse = torch.where(width == 0, 0.0, _quotient(highest + step, width))
        q = torch.round((x - low.unsqueeze(-1)) * inverse.unsqueeze(-1)).clamp(0, highest)
        of_q = _times(q, importance)
        sum_q, square, product = _tree_sum(of_q), _tree_sum(of_q * q), _tree_sum(weighted * q)
        determinant = count * square - sum_q * sum_q
        several = determinant > float(EQUAL) * (count * square)
        plain = _quotient(width, highest + step)
        scale = torch.where(several, (count * product - total * sum_q) / determinant, plain)
        offset = torch.where(count > 0, (scale * sum_q - total) / count, 0.0)
        if not signed:
            alone = offset < 0
            scale = torch.where(alone, torch.where(square > 0, product / square, 0.0), scale)
            offset = torch.where(alone, 0.0, offset)
        difference = q * scale.unsqueeze(-1) - offset.unsqueeze(-1) - x
        error = _tree_sum(_times(difference, importance) * difference)
        better = (error < best) & (scale >= 0)
        best = torch.where(better, error, best)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    return scales, offsets


def _as_half(x: Tensor) -> Tensor:
    return x.to(torch.float16).to(torch.float32)


def _symmetric(
    x: Tensor, importance: Tensor | None, parts: int, ends: Sequence[float], nearest: Nearest, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    split = x.reshape(len(x), parts, -1)
    scales = _fit(split, None if importance is None else importance.reshape(split.shape), ends, nearest)
    low, high = scales.amin(1, True), scales.amax(1, True)
    whole = _as_half(torch.where(-low > high, low, high) / -most)
    of_parts = torch.round(scales * _inverse(whole)).clamp(-most, most - 1)
    q = nearest(split * _inverse(whole * of_parts).unsqueeze(-1))
    return whole, of_parts, q.view(x.shape)


def _with_offsets(
    x: Tensor, importance: Tensor | None, parts: int, highest: int, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    split = x.reshape(len(x), parts, -1)
    fitted = _fit_with_offset(split, None if importance is None else importance.reshape(split.shape), highest)
    whole, shift = [_as_half(_quotient(each.amax(1, True), most) + 0.0) for each in fitted]
    scales, offsets = [
        torch.round(each * _inverse(of)).clamp(0, most) for each, of in zip(fitted, (whole, shift), strict=True)
    ]
    shifted = split + (shift * offsets).unsqueeze(-1)
    q = torch.round(shifted * _inverse(whole * scales).unsqueeze(-1)).clamp(0, highest)
    return whole, shift, scales.to(torch.uint8), offsets.to(torch.uint8), q.view(x.shape).to(torch.uint8)


def _q2_k(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    whole, shift, scales, offsets, q = _with_offsets(x, importance, 16, 3, 15)
    return scales | offsets << 4, _packed(q, 2, 32), _half(whole), _half(shift)


def _q3_k(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    whole, scales, signed = _symmetric(x, importance, 16, *_signed(4), 32)
    q, six = (signed + 4).to(torch.uint8), (scales + 32).to(torch.uint8)
    low, high = _packed(six & 15, 4, 8), _packed(six >> 4, 2, 4)
    return _packed(q >> 2, 1, 32), _packed(q & 3, 2, 32), low, high, _half(whole)


def _scales_of_8(x: Tensor, importance: Tensor | None, highest: int) -> tuple[Sequence[Tensor], Tensor]:
    whole, shift, scales, offsets, q = _with_offsets(x, importance, 8, highest, 63)
    sixes = [six[:, :4] | six[:, 4:] >> 4 << 6 for six in (scales, offsets)]
    return (_half(whole), _half(shift), *sixes, scales[:, 4:] & 15 | offsets[:, 4:] << 4), q


def _q4_k(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    fields, q = _scales_of_8(x, importance, 15)
    return *fields, _packed(q, 4, 32)


def _q5_k(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    fields, q = _scales_of_8(x, importance, 31)
    return *fields, _packed(q >> 4, 1, 32), _packed(q & 15, 4, 32)


def _q6_k(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    whole, scales, signed = _symmetric(x, importance, 16, *_signed(32), 128)
    q = (signed + 32).to(torch.uint8)
    return _packed(q & 15, 4, 64), _packed(q >> 4, 2, 32), scales.to(torch.int8).view(torch.uint8), _half(whole)


def _iq4_xs(x: Tensor, importance: Tensor | None) -> Sequence[Tensor]:
    whole, scales, levels = _symmetric(x, importance, 8, IQ4_ENDS, _iq4_nearest, 32)
    six = (scales + 32).to(torch.uint8)
    return _half(whole), _packed(six >> 4, 2, 1), _packed(six & 15, 4, 1), _packed(_iq4_index(levels), 4, 16)


_ENCODERS: Final[dict[str, Callable[[Tensor, Tensor | None], Sequence[Tensor]]]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}

ENCODED: Final = tuple(_ENCODERS)
"""The types that these devices encode; to those of codebooks the CPU does."""
