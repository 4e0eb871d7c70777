"""Gradients of position encodings."""

from __future__ import annotations

from typing import Any

from opweave import ops
from opweave.graph.tensor import Tensor, constant
from opweave.ops.gradients.rules import at_least_f32, gradient_of, rows_of
from opweave.ops.rope import pair_rows, pair_slices, rope_frequencies


@gradient_of("rope")
def _rope(
    grad: Tensor, out: Tensor, x: Tensor, positions: Tensor, *factors: Tensor, **attrs: Any
) -> tuple[Tensor | None, ...]:
    # The transpose of a rotation by an angle is the rotation by its opposite.
    dx = ops.rope(grad, -positions, *factors, **attrs)
    return dx, None, *[_factors(grad, out, positions, f, **attrs) for f in factors]


def _factors(
    grad: Tensor,
    out: Tensor,
    positions: Tensor,
    factors: Tensor,
    *,
    pairing: str,
    dims: int,
    sections: tuple[int, ...],
    interleaved: bool,
    **frequencies: Any,
) -> Tensor:
    """The gradient of the factors f: with φ = position · ω / f, dφ/df = −φ / f and d(a, b)/dφ = (−b, a)."""
    g, y, f = *at_least_f32(grad, out), factors
    first, second = pair_slices(pairing, dims)
    by_angle = g[..., second] * y[..., first] - g[..., first] * y[..., second]
    if sections:
        rows = pair_rows(sections, interleaved, dims // 2)
        places = ops.concat([ops.expand_dims(positions[int(row)], -1) for row in rows], -1)
    else:
        places = ops.expand_dims(positions, -1)
    turned, _ = rope_frequencies(dims, **frequencies)
    total = ops.sum(rows_of(by_angle * ops.cast(places, by_angle.dtype)), 0)
    return -total * constant(turned, f.dtype) / ops.square(f)


@gradient_of("timestep_embedding")
def _timestep_embedding(grad: Tensor, out: Tensor, t: Tensor, *, dim: int, max_period: float) -> Tensor:
    half = dim // 2
    cosines, sines = (slice(None), slice(half)), (slice(None), slice(half, 2 * half))
    frequencies = constant([max_period ** -(i / half) for i in range(half)], grad.dtype)
    return ops.sum((grad[sines] * out[cosines] - grad[cosines] * out[sines]) * frequencies, 1)
