"""Gradients of reductions and running sums."""

from __future__ import annotations

from math import inf, prod

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of, unreduced
from opweave.ops.operands import composite

gradient_of("sum")(lambda grad, out, x, *, axes: unreduced(grad, x, axes))
gradient_of("mean")(lambda grad, out, x, *, axes: unreduced(grad * (1 / max(_count(x, axes), 1)), x, axes))


def _count(x: Tensor, axes: Shape) -> int:
    return prod([x.shape[a] for a in axes])


@gradient_of("prod")
@composite
def _prod(grad: Tensor, out: Tensor, x: Tensor, *, axes: Shape) -> Tensor:
    """The gradient of an element is the product of all others. Without zeros that is the product divided by the
    element; with one zero it is the product of the others at the zero, and 0 elsewhere; with more zeros it is 0."""
    others = ops.where(x, x, 1.0)
    zeros = unreduced(ops.sum(ops.where(x, ops.full(x.shape, 0, x.dtype), 1.0), axes), x, axes)
    rest = unreduced(grad * ops.prod(others, axes), x, axes)
    return ops.where(x, ops.where(zeros, 0.0, rest / others), ops.where(zeros - 1.0, 0.0, rest))


@gradient_of("var")
@composite
def _var(grad: Tensor, out: Tensor, x: Tensor, *, axes: Shape, correction: float) -> Tensor:
    n = _count(x, axes)
    factor = 2 / (n - correction) if n > correction else inf
    return unreduced(grad * factor, x, axes) * (x - unreduced(ops.mean(x, axes), x, axes))


@gradient_of("max", "min")
def _extreme(grad: Tensor, out: Tensor, x: Tensor, *, axes: Shape) -> Tensor:
    """Equal extremes share the gradient evenly, as with torch's ``amax``."""
    assert out.op is not None
    return _shared(grad, out, x, axes, out.op.name == "max")


@composite
def _shared(grad: Tensor, out: Tensor, x: Tensor, axes: Shape, largest: bool) -> Tensor:
    best = unreduced(out, x, axes)
    worse = ops.step(best - x if largest else x - best)
    chosen = 1.0 - worse
    return ops.where(worse, 0.0, unreduced(grad / ops.sum(chosen, axes), x, axes))


gradient_of("cumsum")(lambda grad, out, x, *, axis: ops.flip(ops.cumsum(ops.flip(grad, axis), axis), axis))
