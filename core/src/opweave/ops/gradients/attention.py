"""The gradients of attention, of its gradient and of sparse attention, which compute the weights of the values again,
because the forward operation does not return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from opweave import ops
from opweave.graph.tensor import Tensor, constant
from opweave.ops.attention import AttentionOptions
from opweave.ops.attention_gradient import attention_backward, attention_gradient_sizes
from opweave.ops.gradients.normalization import head_slopes, sink_gradient
from opweave.ops.gradients.rules import at_least_f32, gradient_of, sum_of
from opweave.ops.operands import optional_operands
from opweave.ops.row_gradients import softmax_backward


@gradient_of("attention")
def _attention(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, ...]:
    packed = attention_backward(grad, q, k, v, *rest, **options)
    given = _parts(packed, q, k, v)
    if not rest:
        return given
    # The nodes of the gradients of mask and sinks are part of a graph only where these gradients are asked for.
    weights = _Weights(q, k, rest, options)
    dscores = softmax_backward(weights.by_keys(grad, v), weights.shares)
    return *given, *weights.rest(dscores, sum_of(grad * out), rest)


@gradient_of("attention_backward")
def _attention_backward(
    grad: Tensor,
    out: Tensor,
    given: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Tensor,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, ...]:
    """`attention_backward` returns (s', s'ᵀ, pᵀ) times (k, q, given), with the shares p, d = given vᵀ,
    s = softmax_backward(d, p) and s' = s · cap' · scale. ``uq``, ``uk`` and ``uv`` are the gradients of these three."""
    grad, given, q, k, v, *rest = at_least_f32(grad, given, q, k, v, *rest)  # type: ignore[assignment]
    scale, cap = options["scale"], options["soft_cap"]
    uq, uk, uv = _parts(grad, q, k, v)
    weights = _Weights(q, k, rest, options)
    p, d = weights.shares, weights.by_keys(given, v)
    s = softmax_backward(d, p)
    inner = (weights.by_keys(uq, k) + weights.by_keys(q, uk)) * scale  # the gradient of s · cap'
    us = inner * weights.slope if cap else inner
    ud = softmax_backward(us, p)
    up = us * (d - sum_of(d * p)) - d * sum_of(us * p) + weights.by_keys(given, uv)
    dscores = softmax_backward(up, p)
    dcapped = dscores
    if cap:  # cap' = 1 − (capped / cap)² depends on the scores too
        dcapped = dscores - inner * s * weights.capped * (2 / cap**2)
        dcapped = dcapped * weights.slope
    along, through = dcapped * scale, (s * weights.slope if cap else s) * scale
    return (
        weights.over_keys(p, uv) + weights.over_keys(ud, v),
        weights.over_keys(along, k) + weights.over_keys(through, uk),
        weights.over_rows(along, q) + weights.over_rows(through, uq),
        weights.over_rows(ud, given),
        *weights.rest(dscores, sum_of(up * p), rest),
    )


def _parts(packed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients that `attention_backward` returns in one tensor, in the shapes of q, k and v."""
    queries, keys, _ = attention_gradient_sizes(q.shape, k.shape, v.shape)
    first, second = packed[..., :queries], packed[..., queries : queries + keys]
    return (
        ops.reshape(first, q.shape),
        ops.reshape(second, k.shape),
        ops.reshape(packed[..., queries + keys :], v.shape),
    )


class _Weights:
    """The weights of the values in attention, built from operations, and products with them. In products the heads of a
    group are further rows.

    Attributes:
        capped: the scores before the mask is added, shape (batch, heads, tokens, keys) as all of these.
        slope: the derivative of ``capped`` with respect to the scaled products of queries and keys; without a
            ``soft_cap``, where that is 1, it is not used.
        slopes: the factor of the mask for each head.
        scores: ``capped`` plus the mask.
        shares: the softmax of the scores.
    """

    def __init__(self, q: Tensor, k: Tensor, rest: Sequence[Tensor], options: AttentionOptions) -> None:
        mask, sinks = optional_operands(rest, options["masked"])
        heads, tokens, keys = q.shape[1], q.shape[2], k.shape[2]
        cap, max_bias = options["soft_cap"], options["max_bias"]
        self.by_head = (q.shape[0], heads, tokens)
        self.by_group = (q.shape[0], k.shape[1], heads // k.shape[1] * tokens)
        self.masked, self.sloped = mask is not None, bool(max_bias)
        products = self.by_keys(q, k) * options["scale"]
        self.capped = cap * ops.tanh(products * (1 / cap)) if cap else products
        self.slope = 1.0 - ops.square(self.capped * (1 / cap)) if cap else self.capped
        self.slopes = head_slopes(heads, max_bias, q)
        scores = self.capped if mask is None else self.capped + (self.slopes * mask if max_bias else mask)
        if options["causal"]:
            hidden = np.arange(keys) > np.arange(keys - tokens, keys)[:, None]
            scores = scores + constant(np.where(hidden, -np.inf, 0.0), q.dtype)
        self.scores, self.shares = scores, ops.softmax(scores, sinks=sinks)

    def _rows(self, x: Tensor) -> Tensor:
        return ops.reshape(x, (*self.by_group, x.shape[-1]))

    def _by_head(self, x: Tensor) -> Tensor:
        return ops.reshape(x, (*self.by_head, x.shape[-1]))

    def by_keys(self, x: Tensor, keys: Tensor) -> Tensor:
        """Rows of queries times keys or values, shape (batch, heads, tokens, keys)."""
        return self._by_head(ops.matmul(self._rows(x), ops.swapaxes(keys, -1, -2)))

    def over_keys(self, weights: Tensor, keys: Tensor) -> Tensor:
        """The sum over keys or values, shape (batch, heads, tokens, size)."""
        return self._by_head(ops.matmul(self._rows(weights), keys))

    def over_rows(self, weights: Tensor, x: Tensor) -> Tensor:
        """The sum over the queries of a group, shape (batch, groups, keys, size)."""
        return ops.matmul(ops.swapaxes(self._rows(weights), -1, -2), self._rows(x))

    def rest(self, dscores: Tensor, along: Tensor, rest: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of those of mask and sinks that the node has; ``along``: Σ p dp of each row."""
        made = [self.slopes * dscores if self.sloped else dscores] if self.masked else []
        if len(rest) > self.masked:
            made.append(sink_gradient(along, self.scores, rest[-1]))
        return made


@gradient_of("indexer_scores")
def _indexer_scores(grad: Tensor, out: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    keys = ops.expand_dims(k, 1)
    products = ops.matmul(q, ops.swapaxes(keys, -1, -2))
    each = ops.expand_dims(grad, 1)
    dproducts = ops.where(ops.step(products), each * ops.expand_dims(weights, -1), 0.0)
    return (
        ops.matmul(dproducts, keys),
        ops.sum(ops.matmul(ops.swapaxes(dproducts, -1, -2), q), 1),
        ops.sum(ops.relu(products) * each, -1),
    )
