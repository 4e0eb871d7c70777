"""Sparse attention: the scores by which keys are selected."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, builds, floats, misfit, wide

__all__ = ["indexer_scores"]


def _infer(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Shape, DType]:
    if (
        q.ndim != 4
        or k.ndim != 3
        or k.shape[0] != q.shape[0]
        or k.shape[2] != q.shape[3]
        or not q.shape[1]
        or weights.shape != q.shape[:3]
    ):
        needs = "q (batch, heads, tokens, size), k (batch, keys, size) and weights (batch, heads, tokens)"
        raise misfit("indexer_scores", needs, q, k, weights)
    return (q.shape[0], q.shape[2], k.shape[1]), q.dtype


def _reference(q: Array, k: Array, weights: Array) -> Array:
    products = wide(q) @ wide(k)[:, None].swapaxes(-1, -2)
    scores: Array = (np.maximum(products, 0) * wide(weights)[..., None]).sum(1)
    return scores


INDEXER_SCORES: Final = OpDef(
    "indexer_scores",
    infer=_infer,
    reference=_reference,
    flops=lambda out: out.size * out.srcs[0].shape[1] * (2 * out.srcs[0].shape[3] + 3),
    formula="y[t, s] = Σₕ weights[h, t] · max(q[h, t] · k[s], 0)",
    slack=4.0,
)


@builds(INDEXER_SCORES)
def indexer_scores(q: Any, k: Any, weights: Any) -> Tensor:
    """How much each token wants to attend to each key, for `top_k`: the lightning indexer of sparse attention.

    DeepSeek-AI, "DeepSeek-V3.2", 2025, equation 1: products of queries and keys that all heads share, below 0 cut off,
    and added up over the heads with weights of the token. The products of the heads are not kept. Operands are promoted
    to one float dtype.

    Args:
        q: shape (batch, heads, tokens, size).
        k: shape (batch, keys, size).
        weights: shape (batch, heads, tokens), with any scale of the products folded in.

    Returns:
        Shape (batch, tokens, keys). Keys that a token may not see are masked by whoever selects.

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized operand.
    """
    return node(INDEXER_SCORES, floats("indexer_scores", q, k, weights), {})
