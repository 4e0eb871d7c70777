"""The gradient of attention: its probabilities are computed again, as nothing of them is kept."""

from __future__ import annotations

import numpy as np

from opweave import ops
from opweave.graph.tensor import Tensor, constant
from opweave.ops.gradients.normalization import head_slopes, sink_gradient
from opweave.ops.gradients.rules import gradient_of, sum_of
from opweave.ops.operands import optional_operands
from opweave.ops.row_gradients import softmax_backward


@gradient_of("attention")
def _attention(
    grad: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Tensor,
    scale: float,
    causal: bool,
    max_bias: float,
    soft_cap: float,
    masked: bool,
) -> tuple[Tensor, ...]:
    mask, sinks = optional_operands(rest, masked)
    batch, heads, tokens, size = q.shape
    groups, keys = k.shape[1:3]
    # The heads of a group are further rows of its products.
    merged = (batch, groups, heads // groups * tokens)
    by_head = (batch, heads, tokens, keys)
    rows = ops.reshape(q, (*merged, size))
    products = ops.reshape(ops.matmul(rows, ops.swapaxes(k, -1, -2)), by_head) * scale
    capped = soft_cap * ops.tanh(products * (1 / soft_cap)) if soft_cap else products
    slopes = head_slopes(heads, max_bias, q)
    scores = capped if mask is None else capped + (slopes * mask if max_bias else mask)
    if causal:
        hidden = np.arange(keys) > np.arange(keys - tokens, keys)[:, None]
        scores = scores + constant(np.where(hidden, -np.inf, 0.0), q.dtype)
    shares = ops.softmax(scores, sinks=sinks)
    g = ops.reshape(grad, (*merged, v.shape[3]))
    dshares = ops.reshape(ops.matmul(g, ops.swapaxes(v, -1, -2)), by_head)
    if mask is None and not soft_cap:
        dproducts = dscores = softmax_backward(dshares, shares, scale)
    else:
        dscores = softmax_backward(dshares, shares)
        dproducts = (dscores * (1.0 - ops.square(capped * (1 / soft_cap))) if soft_cap else dscores) * scale
    inner = ops.reshape(dproducts, (*merged, keys))
    gradients = [
        ops.reshape(ops.matmul(inner, k), q.shape),
        ops.matmul(ops.swapaxes(inner, -1, -2), rows),
        ops.matmul(ops.swapaxes(ops.reshape(shares, (*merged, keys)), -1, -2), g),
    ]
    if mask is not None:
        gradients.append(slopes * dscores if max_bias else dscores)
    if sinks is not None:
        gradients.append(sink_gradient(sum_of(grad * out), scores, sinks))
    return tuple(gradients)
