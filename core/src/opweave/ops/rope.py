"""Position encodings: rotary position embedding, and the sinusoidal embedding of timesteps."""

from __future__ import annotations

from math import ceil, floor, inf, isfinite, log, pi
from typing import Any, Final, Literal

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType, wide_type
from opweave.graph.layout import Shape, Strides
from opweave.graph.opdef import OpDef, build, flops_per_element
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.elementwise import mul
from opweave.ops.movement import concat
from opweave.ops.operands import (
    Array,
    as_flag,
    as_ids,
    as_integer,
    as_number,
    broadcast_to,
    builds,
    cast,
    check_shape_of,
    floating,
    misfit,
    unquantized,
    wide,
)
from opweave.ops.samples import measured, operand
from opweave.ops.windows import as_lengths

__all__ = ["rope", "timestep_embedding"]

Pairing = Literal["adjacent", "half"]


# --- rotary position embedding --------------------------------------------------------------------------------------


def rope_frequencies(
    dims: int,
    *,
    base: float,
    scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
    factors: Array | None = None,
) -> tuple[Array, float]:
    """The angle by which each pair is rotated for one position, and the factor by which its length is multiplied.

    Pair i of dims / 2 turns by base^(−2i / dims), divided by its entry of ``factors``. ``scale`` multiplies all of
    these ("position interpolation"); by YaRN, as far as ``ext_factor`` says, only those which turn slowly: pairs that
    make more than ``beta_fast`` turns over the original context keep their angle, those with less than ``beta_slow``
    get the scaled one, in between it goes over linearly in i. Lengths then grow by 1 + 0.1 · ln(1 / scale), and by
    ``attn_factor``.

    Returns:
        f64 of shape (dims / 2,), and a number.
    """
    half = dims // 2
    angles = base ** (np.arange(half) * (-2.0 / dims))
    if factors is not None:
        angles = angles / wide(factors)
    turned, magnitude = angles * scale, attn_factor
    if ext_factor:
        low = max(0, floor(_pair_with_turns(beta_fast, dims, base, original_context)))
        high = min(dims - 1, ceil(_pair_with_turns(beta_slow, dims, base, original_context)))
        ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
        kept = (1.0 - ramp) * ext_factor
        turned = turned * (1.0 - kept) + angles * kept
        magnitude *= 1.0 + 0.1 * log(1.0 / scale)
    return turned, magnitude


def _pair_with_turns(turns: float, dims: int, base: float, context: int) -> float:
    """The (fractional) pair that makes ``turns`` turns over ``context`` positions."""
    return dims * log(context / (turns * 2.0 * pi)) / (2.0 * log(base))


def pair_slices(pairing: str, dims: int) -> tuple[slice, slice]:
    """Where the first and the second elements of the pairs lie on the last axis."""
    if pairing == "adjacent":
        return slice(0, dims, 2), slice(1, dims, 2)
    return slice(0, dims // 2), slice(dims // 2, dims)


def section_parts(sections: tuple[int, ...], interleaved: bool, pairs: int) -> list[tuple[int, slice]]:
    """Which pairs take their angle from which row of positions: a list of (row, slice of pairs).

    Interleaved, pairs are assigned to the first three rows in turn as long as these have pairs left, then to the rows
    that still have some, in order.
    """
    if not sections:
        return [(0, slice(0, pairs))]
    ends = np.cumsum(sections).tolist()
    if not interleaved:
        return [(row, slice(end - n, end)) for row, (n, end) in enumerate(zip(sections, ends, strict=True)) if n]
    turns, left, parts = min(3, len(sections)), list(sections), []
    free = np.ones(pairs, bool)
    for row in range(turns):
        count = min(left[row], len(range(row, pairs, turns)))
        if count:
            parts.append((row, slice(row, row + turns * (count - 1) + 1, turns)))
            free[parts[-1][1]] = False
            left[row] -= count
    rest = np.flatnonzero(free).tolist()
    for row, count in enumerate(left):
        mine, rest = rest[:count], rest[count:]
        while mine:
            run = next((i for i, pair in enumerate(mine) if pair != mine[0] + i), len(mine))
            parts.append((row, slice(mine[0], mine[0] + run)))
            mine = mine[run:]
    return parts


def pair_rows(sections: tuple[int, ...], interleaved: bool, pairs: int) -> Array:
    """The row of positions of each pair, i64 of shape (pairs,)."""
    rows = np.zeros(pairs, np.int64)
    for row, part in section_parts(sections, interleaved, pairs):
        rows[part] = row
    return rows


def pair_positions(positions: Array, sections: tuple[int, ...], interleaved: bool) -> Array:
    """The position of each pair, or, without sections, one for all of them: (..., tokens, pairs or 1)."""
    if not sections:
        return positions[..., None]
    return np.moveaxis(positions[pair_rows(sections, interleaved, sum(sections))], 0, -1)


def distinct_positions(shape: Shape, strides: Strides, sections: tuple[int, ...]) -> Shape:
    """The shape of the positions without their repetitions: axes along which they are broadcast (stride 0) have length
    1. Kernels compute one row of angles for each of these. The axis of sections, if there is one, keeps its length."""
    lengths = [n if stride else 1 for n, stride in zip(shape, strides, strict=True)]
    return (len(sections), *lengths[1:]) if sections else tuple(lengths)


def _rope_infer(
    x: Tensor, positions: Tensor, factors: Tensor | None = None, *, dims: int, sections: tuple[int, ...], **options: Any
) -> tuple[Shape, DType]:
    if x.ndim < 2 or dims > x.shape[-1]:
        raise misfit("rope", f"x (..., tokens, size) of at least {dims} elements a token", x)
    want = (*([len(sections)] if sections else []), *x.shape[:-1])
    check_shape_of("rope", "the positions", positions, want, f"for {x.describe()}")
    if factors is not None and factors.shape != (dims // 2,):
        raise misfit("rope", f"({dims // 2},) frequency factors, one a pair", factors)
    if factors is not None and factors.dtype is not wide_type(x.dtype):
        raise DTypeError(
            f"rope: frequency factors are {wide_type(x.dtype)} where x is {x.dtype}, as angles are computed in "
            f"it; got {factors.describe()}"
        )
    return x.shape, x.dtype


def _rope(
    x: Array,
    positions: Array,
    factors: Array | None = None,
    *,
    pairing: str,
    dims: int,
    sections: tuple[int, ...],
    interleaved: bool,
    **frequencies: Any,
) -> Array:
    per_position, magnitude = rope_frequencies(dims, factors=factors, **frequencies)
    angles = pair_positions(positions, sections, interleaved) * per_position
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    first, second = pair_slices(pairing, dims)
    y = np.array(wide(x))
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return y


ROPE: Final = OpDef(
    "rope",
    infer=_rope_infer,
    attributes=("attn_factor", "base", "beta_fast", "beta_slow", "ext_factor", "original_context", "scale"),
    reference=_rope,
    inplace=(0,),
    indices=(1,),
    flops=flops_per_element(3),
    formula="(a, b) → (a cos φ − b sin φ, a sin φ + b cos φ), φ = position · scale · base^(−2i / dims)",
    samples=measured(
        lambda: [build("rope", operand(h, r, 64), operand(r, dtype="i32")) for h, r in ((2, 4), (8, 64), (16, 256))]
    ),
)


@builds(ROPE)
def rope(
    x: Any,
    positions: Any,
    factors: Any = None,
    *,
    pairing: Pairing = "adjacent",
    base: float = 10000.0,
    dims: int | None = None,
    offset: int = 0,
    sections: Any = (),
    interleaved: bool = False,
    restart: bool = False,
    scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
) -> Tensor:
    """Rotary position embedding: pairs of elements of each token turn by angles that grow with its position.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Longer contexts: Peng et al.,
    "YaRN: Efficient Context Window Extension of Large Language Models", 2023, by the four arguments from ``ext_factor``
    on and ``original_context``. Several positions for each token, of which parts of the frequencies take one each: Wang
    et al., "Qwen2-VL", 2024, section 2.1.

    Args:
        x: shape (..., tokens, size), as `attention` takes it; integers become f32.
        positions: i32 or i64, broadcasts to (..., tokens): (tokens,), or (batch, 1, tokens) for one of their own for
            each batch. With sections there is an axis of their number in front: (sections, tokens).
        factors: divides the angles, one number a pair: shape (dims / 2,), or ``None``. The node has them in f32, in f64
            where ``x`` is f64, whatever half type ``x`` has.
        pairing: which elements make a pair: ``"adjacent"`` ones, 2i and 2i + 1; or those of the first and the second
            ``"half"``, i and i + dims / 2.
        base: pair i turns by base^(−2i / dims) a position.
        dims: even number of elements that turn, all behind ``offset`` by default; the others stay.
        offset: elements of each token in front of those that turn, which stay too.
        sections: number of pairs that take their angle from the first, second, ... row of positions; together dims / 2.
        interleaved: pairs belong to the first three rows in turn, as long as these have pairs left, instead of section
            by section (Qwen3-VL).
        restart: the frequencies of each section begin anew, at those of a whole operand of twice its pairs, as vision
            encoders have it: (h, w) sections of equal length, each over its own axis.
        scale: multiplies all angles: the length of the context seen in training divided by the one now.
        ext_factor: how far YaRN's choice by frequency replaces that, 0 .. 1.
        attn_factor: multiplies the result, besides YaRN's own 1 + 0.1 · ln(1 / scale).
        beta_fast, beta_slow: pairs that turn more often than this over the original context are not scaled; less often,
            wholly.
        original_context: tokens of the context seen in training; needed where ``ext_factor`` is not 0.

    Raises:
        ShapeError: shapes that do not fit, odd ``dims``, sections that do not add up, no such pairing.
        DTypeError: positions of another dtype, options that are no such numbers, a quantized operand.
    """
    y = floating("rope", x)
    at = as_ids("rope", "positions", positions)
    if not isinstance(pairing, str) or pairing not in ("adjacent", "half"):
        raise ShapeError(f"rope: there is no pairing {pairing!r}; there are: adjacent, half")
    before = as_integer("rope", "offset", offset)
    size = y.shape[-1] if y.ndim else 0
    if not 0 <= before <= size:
        raise ShapeError(f"rope: offset {before} does not lie within the last axis of {y.describe()}")
    (turned,) = as_lengths("rope", "dims", size - before if dims is None else dims, 1, 2)
    if turned % 2:
        raise ShapeError(f"rope: dims is even, two a pair, not {turned}; the operand is {y.describe()}")
    if not isinstance(sections, (tuple, list)):
        raise ShapeError(f"rope: sections are numbers of pairs, one for each row of positions, not {sections!r:.60}")
    parts = as_lengths("rope", "sections", sections, len(sections), 0) if sections else ()
    if parts and sum(parts) != turned // 2:
        raise ShapeError(f"rope: sections {parts} do not add up to {turned // 2} pairs; the operand is {y.describe()}")
    turns, anew = as_flag("rope", "interleaved", interleaved), as_flag("rope", "restart", restart)
    if (turns and anew) or ((turns or anew) and not parts):
        raise ShapeError("rope: interleaved and restart are two ways to lay out sections: give one, and sections")
    attrs: dict[str, Any] = {"pairing": pairing, "dims": turned, "sections": parts, "interleaved": turns}
    numbers = {"base": base, "scale": scale, "ext_factor": ext_factor, "attn_factor": attn_factor}
    attrs |= _frequency_attrs(numbers | {"beta_fast": beta_fast, "beta_slow": beta_slow}, original_context)
    if y.ndim < 2:
        raise misfit("rope", "x (..., tokens, size)", y)
    divisors = None if factors is None else cast(unquantized("rope", factors), wide_type(y.dtype))
    if anew:
        own = constant(_restarting(parts, attrs["base"]), wide_type(y.dtype))
        divisors = own if divisors is None else mul(own, divisors)
    moved = y[..., before:] if before else y
    srcs = (moved, _spread_positions(at, moved, parts))
    result = node(ROPE, srcs if divisors is None else (*srcs, divisors), attrs)
    return concat([y[..., :before], result], -1) if before else result


def _frequency_attrs(numbers: dict[str, Any], original_context: Any) -> dict[str, Any]:
    """The attributes from which angles are computed, checked."""
    attrs: dict[str, Any] = {}
    for name, value in numbers.items():
        attrs[name] = as_number("rope", name, value)
        if name in ("ext_factor", "attn_factor"):
            if not isfinite(attrs[name]):
                raise DTypeError(f"rope: {name} is a finite number, not {value!r}")
        elif not 0 < attrs[name] < inf:
            raise DTypeError(f"rope: {name} is a positive number, not {value!r}")
    least = 1 if attrs["ext_factor"] else 0
    (attrs["original_context"],) = as_lengths("rope", "original_context", original_context, 1, least)
    if attrs["ext_factor"] and attrs["base"] == 1:
        raise DTypeError("rope: with a base of 1 all pairs turn alike, and ext_factor has nothing to choose by")
    return attrs


def _restarting(sections: tuple[int, ...], base: float) -> Array:
    """What the frequencies base^(−2i / dims) of all pairs are divided by, so that those of each section are
    base^(−2j / (2 · pairs of the section)), j counted within it."""
    dims = 2 * sum(sections)
    wanted: Array = np.concatenate([base ** (-np.arange(n) / n) for n in sections])
    divisors: Array = base ** (np.arange(dims // 2) * (-2.0 / dims)) / wanted
    return divisors


def _spread_positions(at: Tensor, x: Tensor, sections: tuple[int, ...]) -> Tensor:
    try:
        if not sections:
            return broadcast_to(at, x.shape[:-1])
        if at.ndim and at.shape[0] == len(sections) and at.ndim <= x.ndim:
            between = (1,) * (x.ndim - at.ndim)
            return broadcast_to(at.reshape(len(sections), *between, *at.shape[1:]), (len(sections), *x.shape[:-1]))
    except ShapeError:
        pass
    kind = f"one row for each of {len(sections)} sections, each broadcast" if sections else "broadcast"
    raise ShapeError(f"rope: positions are {kind} to {x.shape[:-1]} of {x.describe()}, not {at.describe()}")


# --- timesteps ------------------------------------------------------------------------------------------------------


def _timestep_infer(t: Tensor, *, dim: int, max_period: float) -> tuple[Shape, DType]:
    if t.ndim != 1:
        raise misfit("timestep_embedding", "timesteps (n,)", t)
    return (t.shape[0], dim), t.dtype


def _timestep_embedding(t: Array, *, dim: int, max_period: float) -> Array:
    half = dim // 2
    angles = wide(t)[:, None] * max_period ** -(np.arange(half) / half)
    return np.concatenate([np.cos(angles), np.sin(angles), np.zeros((len(t), dim % 2))], -1)


TIMESTEP_EMBEDDING: Final = OpDef(
    "timestep_embedding",
    infer=_timestep_infer,
    reference=_timestep_embedding,
    flops=flops_per_element(2),
    formula="cos(t · max_period^(−i / h)) for i < h = dim // 2, then the sines, then 0 where dim is odd",
    runs_like="exp",
)


@builds(TIMESTEP_EMBEDDING)
def timestep_embedding(timesteps: Any, dim: int, max_period: float = 10000.0) -> Tensor:
    """Cosines and sines of the timesteps of diffusion models, at frequencies from 1 down to almost 1 / max_period.

    Vaswani et al., "Attention Is All You Need", 2017, section 3.5, in the order that Dhariwal and Nichol, "Diffusion
    Models Beat GANs on Image Synthesis", 2021, use: all cosines first.

    Args:
        timesteps: shape (n,); integers become f32.
        dim: length of the result's rows, at least 2; an odd one ends with a 0.
        max_period: a number of at least 1.

    Returns:
        Shape (n, dim).

    Raises:
        ShapeError: timesteps of another number of axes, no such ``dim``.
        DTypeError: a period that is no such number, a quantized operand.
    """
    (length,) = as_lengths("timestep_embedding", "dim", dim, 1, 2)
    period = as_number("timestep_embedding", "max_period", max_period)
    if not period >= 1:
        raise DTypeError(f"timestep_embedding: max_period is a number of at least 1, not {max_period!r}")
    t = floating("timestep_embedding", timesteps)
    return node(TIMESTEP_EMBEDDING, (t,), {"dim": length, "max_period": period})
