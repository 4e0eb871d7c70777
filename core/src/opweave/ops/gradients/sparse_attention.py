"""Gradients of sparse attention, which compute the products of queries and keys again."""

from __future__ import annotations

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of


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
