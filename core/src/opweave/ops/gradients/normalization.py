"""Gradients of softmax and normalizations. Sums over rows are taken in f32 at least."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor, constant
from opweave.ops.gradients.rules import at_least_f32, gradient_of, mean_of, rows_of, sum_of
from opweave.ops.normalization import alibi_slopes
from opweave.ops.row_gradients import layer_norm_backward, log_softmax_backward, rms_norm_backward, softmax_backward


@gradient_of("softmax")
def _softmax(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor | None = None, *, scale: float) -> tuple[Tensor, ...]:
    if mask is None:
        return (softmax_backward(grad, out, scale),)
    scores = softmax_backward(grad, out)
    return scores * scale, scores


@gradient_of("softmax_backward")
def _softmax_backward(grad: Tensor, out: Tensor, given: Tensor, y: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    u, g, y = at_least_f32(grad, given, y)
    return softmax_backward(u, y, scale), (u * (g - sum_of(g * y)) - g * sum_of(u * y)) * scale


@gradient_of("head_softmax")
def _head_softmax(
    grad: Tensor, out: Tensor, x: Tensor, sinks: Tensor, mask: Tensor | None = None, *, scale: float, max_bias: float
) -> tuple[Tensor, ...]:
    scores = softmax_backward(grad, out)
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


gradient_of("log_softmax")(lambda grad, out, x: log_softmax_backward(grad, out))


@gradient_of("log_softmax_backward")
def _log_softmax_backward(grad: Tensor, out: Tensor, given: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    u, g, y = at_least_f32(grad, given, y)
    through = u * ops.exp(y)
    return u - sum_of(through), -through * sum_of(g)


# --- layer and RMS normalization ------------------------------------------------------------------------------------


@gradient_of("layer_norm")
def _layer_norm(grad: Tensor, out: Tensor, x: Tensor, *parameters: Tensor, eps: float) -> tuple[Tensor, ...]:
    dx = layer_norm_backward(grad, x, *parameters[:1], eps=eps)
    if not parameters:
        return (dx,)
    g, y = at_least_f32(grad, x)
    return dx, *_rows(g, ops.layer_norm(y, eps=eps))[: len(parameters)]


@gradient_of("layer_norm_backward")
def _layer_norm_backward(
    grad: Tensor, out: Tensor, given: Tensor, x: Tensor, *weight: Tensor, eps: float
) -> tuple[Tensor, ...]:
    u, g, y, *weights = at_least_f32(grad, given, x, *weight)
    inner = g * weights[0] if weights else g
    by_inner = layer_norm_backward(u, y, eps=eps)
    by_x = _norm_by_x(u - mean_of(u), inner - mean_of(inner), y - mean_of(y), eps)
    return _by_operands(by_inner, by_x - mean_of(by_x), g, weights)


def _norm_by_x(u: Tensor, g: Tensor, x: Tensor, eps: float) -> Tensor:
    """The gradient of Σ u · r · (g − x · r² · mean(g x)) with respect to x, with r = 1 / √(mean x² + eps)."""
    r = ops.rsqrt(mean_of(ops.square(x)) + eps)
    gx, ux = mean_of(g * x), mean_of(u * x)
    along_x = 3.0 * ops.square(r) * gx * ux - mean_of(u * g)
    return r * ops.square(r) * (x * along_x - g * ux - u * gx)


def _by_operands(by_inner: Tensor, by_x: Tensor, grad: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of the three operands of a norm's gradient: of ``grad``, of x and, if there is one, of the weight.

    Args:
        by_inner: the gradient of ``grad`` times the weight.
        by_x: the gradient of x.
    """
    if not weights:
        return by_inner, by_x
    return by_inner * weights[0], by_x, ops.sum(rows_of(by_inner * grad), 0)


def _deviation(x: Tensor, eps: float) -> Tensor:
    """The reciprocal of the standard deviation of each row."""
    return ops.rsqrt(ops.var(x, -1, 0.0, keepdims=True) + eps)


def _rows(grad: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a weight and a bias along the last axis."""
    return ops.sum(rows_of(grad * normal), 0), ops.sum(rows_of(grad), 0)


@gradient_of("rms_norm")
def _rms_norm(grad: Tensor, out: Tensor, x: Tensor, *weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    dx = rms_norm_backward(grad, x, *weight, eps=eps)
    if not weight:
        return (dx,)
    g, y = at_least_f32(grad, x)
    return dx, ops.sum(rows_of(g * ops.rms_norm(y, eps=eps)), 0)


@gradient_of("rms_norm_backward")
def _rms_norm_backward(
    grad: Tensor, out: Tensor, given: Tensor, x: Tensor, *weight: Tensor, eps: float
) -> tuple[Tensor, ...]:
    u, g, y, *weights = at_least_f32(grad, given, x, *weight)
    inner = g * weights[0] if weights else g
    return _by_operands(rms_norm_backward(u, y, eps=eps), _norm_by_x(u, inner, y, eps), g, weights)


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
    along = ops.where(ops.step(eps - length), 0.0, sum_of(g * z))  # shorter rows are divided by a constant
    return (g - z * along) / ops.maximum(length, eps)
