"""Attention, whole and as the kernels of torch that it is decomposed into."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.dtypes import wide_type
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.table import operator

__all__ = ["attention"]


def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """torch's scaled_dot_product_attention: any number of axes in front, the first query sees the first key where it is
    causal, queries that see no key give 0."""
    lead = q.shape[:-2]
    four = (*[1] * (2 - len(lead)), *lead) if len(lead) <= 2 else (int(np.prod(lead[:-1])), lead[-1])

    def heads(x: Tensor) -> Tensor:
        own = x.shape[:-2]
        wanted = (*[1] * (2 - len(own)), *own) if len(own) <= 2 else (int(np.prod(own[:-1])), own[-1])
        if wanted[0] != four[0]:
            x, wanted = ow.broadcast_to(x, (*lead[:-1], *x.shape[-3:])), (four[0], wanted[1])
        return ow.reshape(x, (*wanted, *x.shape[-2:]))

    dtype = q.dtype
    queries, keys = q.shape[-2], k.shape[-2]
    if causal and queries != keys:
        seen = np.tri(queries, keys, dtype=bool)
        mask, causal = ow.constant(seen), False
    if mask is not None and len(lead) > 2:
        mask = ow.reshape(ow.broadcast_to(mask, (*lead, queries, keys)), (*four, queries, keys))
    if mask is not None and mask.dtype.is_float:
        mask = mask.astype(dtype)
    y = ow.attention(heads(q), heads(k), heads(v), mask, scale=scale, causal=causal)
    if mask is not None and not _sees_something(call, mask):
        if mask.dtype.kind == "b":
            seen_any = ow.greater(ow.sum(mask, -1, True), ow.constant(0, "i64"))
        else:
            seen_any = ow.greater(ow.max(mask, -1, True), ow.constant(-inf, mask.dtype))
        y = ow.where(seen_any, y, ow.constant(0, y.dtype))
    return ow.reshape(y, (*lead, queries, v.shape[-1]))


def _logsumexp(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """The logarithm of the sum of the exponentials of the scores of each query, which torch keeps for the gradient."""
    wide = wide_type(q.dtype)
    if k.shape[-3] != q.shape[-3]:
        k = ow.repeat(k, q.shape[-3] // k.shape[-3], -3)
    scores = ow.matmul(q.astype(wide), ow.swapaxes(k.astype(wide), -1, -2)) * (scale or q.shape[-1] ** -0.5)
    if causal:
        mask = ow.constant(np.tri(q.shape[-2], k.shape[-2], dtype=bool))
    if mask is not None and mask.dtype.kind == "b":
        scores = ow.where(mask, scores, ow.constant(-inf, wide))
    elif mask is not None:
        scores = scores + mask.astype(wide)
    most = ow.max(scores, -1, True)
    return ow.log(ow.sum(ow.exp(scores - most), -1)) + ow.reshape(most, most.shape[:-1])


def _sees_something(call: Call, mask: Tensor) -> bool:
    """Whether it is known that every query sees a key."""
    known = call.known(mask)
    if known is not None:
        return bool((known if known.dtype.is_floating_point is False else known > -inf).any(-1).all())
    data = mask.leaf.data if mask.leaf is not None and mask.leaf.kind == "constant" else None
    return data is not None and data.dtype == bool and bool(data.any(-1).all())


@operator("scaled_dot_product_attention")
def _whole(
    call: Call, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if dropout_p:
        return call.fallback(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return attention(call, q, k, v, attn_mask, is_causal, scale)


@operator("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
def _flash(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: Any,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p or any(call.wants(i) for i in range(2, 9)):
        more = {"scale": scale} if attn_mask is None else {"attn_mask": attn_mask, "scale": scale}
        return call.fallback(q, k, v, dropout_p, is_causal, **more)
    kept = _logsumexp(q, k, attn_mask, is_causal, scale) if call.wants(1) else None
    return attention(call, q, k, v, attn_mask, is_causal, scale), kept, *[None] * 7


@operator("_scaled_dot_product_efficient_attention")
def _efficient(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p or call.wants(1):
        return call.fallback(q, k, v, mask, compute_log_sumexp, dropout_p, is_causal, scale=scale)
    return attention(call, q, k, v, mask, is_causal, scale), *[None] * 3
