"""Gradients of products of matrices and of mixtures of experts. Quantized weights have none."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave import ops
from opweave.graph.tensor import Tensor, constant
from opweave.ops.gradients.rules import gradient_of, rows_of, sum_of

gradient_of("matmul")(
    lambda grad, out, a, b: (ops.matmul(grad, ops.swapaxes(b, -1, -2)), ops.matmul(ops.swapaxes(a, -1, -2), grad))
)


def decoded(w: Tensor) -> Tensor:
    """Quantized weights as f32."""
    return ops.dequantize(w) if w.dtype.is_quantized else w


@gradient_of("linear")
def _linear(grad: Tensor, out: Tensor, x: Tensor, w: Tensor, *bias: Tensor, **blocks: Any) -> tuple[Tensor | None, ...]:
    g = rows_of(grad)
    dw = None if blocks else ops.matmul(ops.transpose(g), rows_of(x))
    return ops.matmul(grad, decoded(w)), dw, *[ops.sum(g, 0) for _ in bias]


@gradient_of("expert_linear")
def _expert_linear(
    grad: Tensor, out: Tensor, x: Tensor, w: Tensor, ids: Tensor, **blocks: Any
) -> tuple[Tensor | None, ...]:
    dx = ops.expert_linear(grad, ops.swapaxes(decoded(w), 1, 2), ids)
    if x.shape[1] != ids.shape[1]:
        dx = sum_of(dx, 1)
    if blocks:
        return dx, None, None
    # One product for each expert, in which the rows of the others are 0.
    experts = w.shape[0]
    sent = ops.embedding(constant(np.eye(experts), grad.dtype), ops.flatten(ids))
    own = ops.expand_dims(ops.transpose(sent), 2) * rows_of(grad)
    rows = rows_of(ops.broadcast_to(x, (*ids.shape, x.shape[2])))
    return dx, ops.matmul(ops.swapaxes(own, 1, 2), rows), None


gradient_of("add_expert")(lambda grad, out, x, table, ids: (grad, ops.index_add(ids, grad, table.shape[0]), None))


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
