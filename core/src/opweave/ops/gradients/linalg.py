"""Gradients of linear algebra beyond products."""

from __future__ import annotations

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of, sum_of

gradient_of("hadamard_transform")(lambda grad, out, x, *, scale: ops.hadamard_transform(grad, scale))


@gradient_of("solve_triangular")
def _solve_triangular(
    grad: Tensor, out: Tensor, a: Tensor, b: Tensor, *, upper: bool, unitriangular: bool
) -> tuple[Tensor, Tensor]:
    turned = ops.swapaxes(a, -1, -2)
    db = ops.solve_triangular(turned, grad, upper=not upper, unitriangular=unitriangular)
    outside = 1 if unitriangular else 0
    da = ops.neg(db @ ops.swapaxes(out, -1, -2))
    return (ops.triu(da, outside) if upper else ops.tril(da, -outside)), db


@gradient_of("sinkhorn")
def _sinkhorn(grad: Tensor, out: Tensor, x: Tensor, *, iterations: int, eps: float) -> Tensor:
    """The steps are computed again; each division m / (Σ m + ε) is differentiated by itself."""
    first = ops.softmax(x)
    matrices, axes = [first + eps], [-2, *([-1, -2] * (iterations - 1))]
    for axis in axes:
        m = matrices[-1]
        matrices.append(m / (sum_of(m, axis) + eps))
    for axis, m in zip(axes[::-1], matrices[-2::-1], strict=True):
        total = sum_of(m, axis) + eps
        grad = (grad - sum_of(grad * m, axis) / total) / total
    return first * (grad - sum_of(grad * first))
