"""Hyper-connections: several residual streams, mixed before and behind each block.

Zhu et al., "Hyper-Connections", 2024; Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025. The mixing
matrices of the latter are computed by `sinkhorn`. Both functions are built from products and sums.
"""

from __future__ import annotations

from typing import Any

from opweave.graph.tensor import Tensor
from opweave.ops.elementwise import add, mul
from opweave.ops.matmul import matmul
from opweave.ops.movement import expand_dims, squeeze, swapaxes
from opweave.ops.operands import composite, floats, misfit

__all__ = ["hyper_connection_post", "hyper_connection_pre"]


def hyper_connection_pre(streams: Any, weights: Any) -> Tensor:
    """The input of a block: for each token the sum of its streams times its weights.

    Operands are promoted to one float dtype.

    Args:
        streams: shape (..., n, size).
        weights: shape (..., n).

    Returns:
        Shape (..., size).

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized operand.
    """
    x, w = floats("hyper_connection_pre", streams, weights)
    if x.ndim < 2 or w.shape != x.shape[:-1]:
        raise misfit("hyper_connection_pre", "streams (..., n, size) and weights (..., n)", x, w)
    return squeeze(matmul(expand_dims(w, -2), x), -2)


def hyper_connection_post(x: Any, streams: Any, weights: Any, mixing: Any) -> Tensor:
    """The streams after a block: the streams before it, mixed, plus the result of the block times a weight for each.

    y[d] = weights[d] · x + Σₛ mixing[s, d] · streams[s] for each token. Operands are promoted to one float dtype.

    Args:
        x: the result of the block, shape (..., size).
        streams: shape (..., n, size).
        weights: shape (..., n).
        mixing: shape (..., n, n), from the stream of the first axis to that of the second.

    Returns:
        Shape (..., n, size).

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized operand.
    """
    y, old, w, mixed = floats("hyper_connection_post", x, streams, weights, mixing)
    lead = y.shape[:-1]
    if (
        old.ndim < 2
        or old.shape != (*lead, *old.shape[-2:-1], *y.shape[-1:])
        or w.shape != old.shape[:-1]
        or (mixed.shape != (*w.shape, *w.shape[-1:]))
    ):
        needs = "x (..., size), streams (..., n, size), weights (..., n) and mixing (..., n, n)"
        raise misfit("hyper_connection_post", needs, y, old, w, mixed)
    return _mixed(y, old, w, mixed)


@composite
def _mixed(y: Tensor, old: Tensor, w: Tensor, mixed: Tensor) -> Tensor:
    return add(mul(expand_dims(w, -1), expand_dims(y, -2)), matmul(swapaxes(mixed, -1, -2), old))
