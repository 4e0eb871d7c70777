"""Gradients of softmax and normalizations. Sums over rows are taken in f32 at least."""

from __future__ import annotations

from math import prod

import numpy as np

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor, constant
from opweave.ops.gradients.rules import at_least_f32, gradient_of, mean_of, rows_of, sum_of
from opweave.ops.normalization import alibi_slopes


def softmax_scores(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient of the scores: y · (g − Σ g y)."""
    g, y = at_least_f32(grad, out)
    return y * (g - sum_of(g * y))


@gradient_of("softmax")
def _softmax(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor | None = None, *, scale: float) -> tuple[Tensor, ...]:
    scores = softmax_scores(grad, out)
    return scores * scale, *(() if mask is None else (scores,))


@gradient_of("head_softmax")
def _head_softmax(
    grad: Tensor, out: Tensor, x: Tensor, sinks: Tensor, mask: Tensor | None = None, *, scale: float, max_bias: float
) -> tuple[Tensor, ...]:
    scores = softmax_scores(grad, out)
    slopes = head_slopes(sinks.shape[0], max_bias, scores)
    z, dot = scale * x, sum_of(grad * out)
    if mask is not None:
        z = z + slopes * mask
    return scores * scale, sink_gradient(dot, z, sinks), *(() if mask is None else (slopes * scores,))


def head_slopes(heads: int, max_bias: float, like: Tensor) -> Tensor:
    """The factor of the mask of each head, shape (heads, 1, 1)."""
    return constant(np.reshape(alibi_slopes(heads, max_bias), (-1, 1, 1)), like.dtype)


def sink_gradient(dot: Tensor, scores: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, one for each head along axis -3: − Σ p · Σ g y, with the share p of the sink.

    Args:
        dot: Σ g y of each row, shape (..., heads, queries, 1).
        scores: of the keys, shape (..., heads, queries, keys).
        sinks: shape (heads,).
    """
    column = ops.broadcast_to(ops.reshape(sinks, (-1, 1, 1)), (*scores.shape[:-1], 1))
    share = ops.softmax(ops.concat([scores, column], -1))[..., -1:]
    terms = -share * dot
    return ops.sum(terms, (*range(terms.ndim - 3), terms.ndim - 2, terms.ndim - 1))


@gradient_of("log_softmax")
def _log_softmax(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    g, y = at_least_f32(grad, out)
    return g - ops.exp(y) * sum_of(g)


# --- layer and RMS normalization ------------------------------------------------------------------------------------


@gradient_of("layer_norm")
def _layer_norm(grad: Tensor, out: Tensor, x: Tensor, *parameters: Tensor, eps: float) -> tuple[Tensor, ...]:
    g, y, *weights = at_least_f32(grad, x, *parameters)
    normal = ops.layer_norm(y, eps=eps)
    inner = g * weights[0] if weights else g
    dx = _deviation(y, eps) * (inner - mean_of(inner) - normal * mean_of(inner * normal))
    return dx, *_rows(g, normal)[: len(weights)]


def _deviation(x: Tensor, eps: float) -> Tensor:
    """The reciprocal of the standard deviation of each row."""
    return ops.rsqrt(ops.var(x, -1, 0.0, keepdims=True) + eps)


def _rows(grad: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a weight and a bias along the last axis."""
    return ops.sum(rows_of(grad * normal), 0), ops.sum(rows_of(grad), 0)


@gradient_of("rms_norm")
def _rms_norm(grad: Tensor, out: Tensor, x: Tensor, *weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    g, y, *weights = at_least_f32(grad, x, *weight)
    normal = ops.rms_norm(y, eps=eps)
    inner = g * weights[0] if weights else g
    dx = ops.rsqrt(mean_of(ops.square(y)) + eps) * (inner - normal * mean_of(inner * normal))
    return dx, *_rows(g, normal)[: len(weights)]


@gradient_of("group_norm")
def _group_norm(
    grad: Tensor, out: Tensor, x: Tensor, *parameters: Tensor, groups: int, eps: float
) -> tuple[Tensor, ...]:
    g, y, *weights = at_least_f32(grad, x, *parameters)
    shape: Shape = (x.shape[0], groups, prod(x.shape[1:]) // groups)
    rows = ops.reshape(y, shape)
    normal = ops.layer_norm(rows, eps=eps)
    inner = g
    if weights:
        inner = g * ops.reshape(weights[0], (-1, *[1] * (x.ndim - 2)))
    inner = ops.reshape(inner, shape)
    dx = _deviation(rows, eps) * (inner - mean_of(inner) - normal * mean_of(inner * normal))
    others = (0, *range(2, x.ndim))
    sums = ops.sum(g * ops.reshape(normal, x.shape), others), ops.sum(g, others)
    return ops.reshape(dx, x.shape), *sums[: len(weights)]


@gradient_of("l2_norm")
def _l2_norm(grad: Tensor, out: Tensor, x: Tensor, *, eps: float) -> Tensor:
    g, y, z = at_least_f32(grad, x, out)
    length = ops.sqrt(sum_of(ops.square(y)))
    along = ops.where(ops.step(eps - length), 0.0, sum_of(g * z))  # a row shorter than eps is only divided
    return (g - z * along) / ops.maximum(length, eps)
