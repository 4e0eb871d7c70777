"""Attention and rotary embedding of the domain com.microsoft, and weights of few bits. The operators of the standard
domain are built by the bodies that the standard defines."""

from __future__ import annotations

from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call


def _heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads · size) as (batch, heads, tokens, size)."""
    return ow.transpose(ow.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads)), (0, 2, 1, 3))


def _joined(x: Tensor) -> Tensor:
    """The inverse of `_heads`."""
    y = ow.transpose(x, (0, 2, 1, 3))
    return ow.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3]))


@operator("Attention", domain=MICROSOFT)
def _attention(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None, mask: Tensor | None = None,
    past: Tensor | None = None, extra: Tensor | None = None,
) -> Any:  # fmt: skip
    sizes = call.get("qkv_hidden_sizes", ()) or (w.shape[1] // 3,) * 3
    return attended_by_parts(call, x @ w if bias is None else x @ w + bias, sizes, mask, past, extra)


def attended_by_parts(
    call: Call, y: Tensor, sizes: Any, mask: Tensor | None, past: Tensor | None, extra: Tensor | None
) -> Any:
    """Attention of queries, keys and values of these sizes along the last axis of ``y``, behind those of ``past``; with
    the keys and values where the node wants them."""
    q, k, v = (_heads(part, call.get("num_heads", 1)) for part in ow.split(y, sizes, -1))
    if past is not None:
        k, v = ow.concat([past[0], k], 2), ow.concat([past[1], v], 2)
    result = _attended(call, q, k, v, mask, extra)
    return (result, ow.concat([ow.expand_dims(k, 0), ow.expand_dims(v, 0)], 0)) if call.wants(1) else result


def _attended(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Tensor | None) -> Tensor:
    """Attention of (batch, heads, tokens, size), masked as the node says, as (batch, tokens, heads · size); ``extra``
    is added to the scores."""
    hidden = _hidden(call, mask, q, k)
    if extra is not None:
        hidden = extra if hidden is None else hidden + extra
    if call.get("unidirectional", 0):
        hidden = _causal(q, k, hidden)
    return _joined(ow.attention(q, k, v, hidden, scale=_scale(call, q)))


def _scale(call: Call, q: Tensor) -> float:
    return call.get("scale", 0.0) or q.shape[-1] ** -0.5  # type: ignore[no-any-return]


def _hidden(call: Call, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask for the keys, of 1 and 0 or of the lengths of sequences, as a mask that is added to scores."""
    if mask is None:
        return None
    batch = q.shape[0]
    if mask.ndim == 1:
        if mask.shape[0] != batch:
            raise call.refuse("masks of starts and ends are not supported")
        mask = (ow.arange(k.shape[2], dtype=mask.dtype) < ow.expand_dims(mask, 1)).astype("i32")
    shape = (batch, *[1] * (4 - mask.ndim), *mask.shape[1:])
    low = call.get("mask_filter_value", -10000.0)
    return ow.mul(ow.sub(1.0, ow.reshape(mask, shape).astype(q.dtype)), low)


def _causal(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    later = np.triu(np.full((q.shape[2], k.shape[2]), -np.inf, np.float32), k.shape[2] - q.shape[2] + 1)
    hidden = ow.constant(later).astype(q.dtype)
    return hidden if bias is None else bias + hidden


@operator("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(
    call: Call, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, extra: Tensor | None = None, past_k: Tensor | None = None, past_v: Tensor | None = None,
) -> Any:  # fmt: skip
    heads = call.get("num_heads", 1)
    if k is None:
        raise call.refuse("packed queries, keys and values are not supported")
    if bias is not None:
        n, m = q.shape[-1], v.shape[-1] if v is not None and v.ndim == 3 else q.shape[-1]
        q, k = q + bias[:n], k + bias[n : 2 * n] if k.ndim == 3 else k
        v = v + bias[2 * n : 2 * n + m] if v is not None and v.ndim == 3 else v
    assert v is not None
    parts = [_heads(t, heads) if t.ndim == 3 else t for t in (q, k, v)]
    queries, keys, values = parts
    if past_k is not None and past_v is not None:
        keys, values = ow.concat([past_k, keys], 2), ow.concat([past_v, values], 2)
    result = _attended(call, queries, keys, values, mask, extra)
    return (result, keys, values) if call.wants(1) else result


@operator("GroupQueryAttention", domain=MICROSOFT)
def _group_query_attention(
    call: Call, q: Tensor, k: Tensor | None, v: Tensor | None, past_k: Tensor | None, past_v: Tensor | None,
    lengths: Tensor, total: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *rest: Tensor | None,
) -> Any:  # fmt: skip
    if any(r is not None for r in rest):
        raise call.refuse("position ids, a bias and head sinks are not supported")
    heads, groups = call.get("num_heads", 1), call.get("kv_num_heads", 1)
    if k is None or v is None:
        size = q.shape[-1] // (heads + 2 * groups)
        q, k, v = ow.split(q, (heads * size, groups * size, groups * size), -1)
    queries, keys, values = _heads(q, heads), _heads(k, groups), _heads(v, groups)
    known = call.integers(lengths)
    before = 0 if past_k is None else past_k.shape[2]
    if len(set(known)) > 1:
        raise call.refuse("sequences of different lengths in one batch are not supported")
    start = known[0] + 1 - q.shape[1]
    if call.get("do_rotary", 0):
        assert cos is not None
        assert sin is not None
        places = slice(start, start + q.shape[1])
        interleaved = bool(call.get("rotary_interleaved", 0))
        queries, keys = (_rotated(t, cos[places], sin[places], interleaved) for t in (queries, keys))
    if past_k is not None and past_v is not None and start:
        keys = ow.concat([past_k[:, :, : min(start, before)], keys], 2)
        values = ow.concat([past_v[:, :, : min(start, before)], values], 2)
    hidden = _causal(queries, keys, None)
    window = call.get("local_window_size", -1)
    if window > 0:
        n, m = queries.shape[2], keys.shape[2]
        far = np.tril(np.full((n, m), -np.inf, np.float32), m - n - window)
        hidden = hidden + ow.constant(far).astype(hidden.dtype)
    result = ow.attention(queries, keys, values, hidden, scale=_scale(call, queries), soft_cap=call.get("softcap", 0.0))
    return _joined(result), keys, values


@composite
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` (batch, heads, tokens, size) rotated by the angles whose cosines and sines are given, shape (..., tokens,
    n / 2); elements from n on stay as they are."""
    n = 2 * cos.shape[-1]
    part, rest = x[..., :n], x[..., n:]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., : n // 2], part[..., n // 2 :])
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        turned = ow.reshape(ow.concat([ow.expand_dims(real, -1), ow.expand_dims(imaginary, -1)], -1), part.shape)
    else:
        turned = ow.concat([real, imaginary], -1)
    return turned if n == x.shape[-1] else ow.concat([turned, rest], -1)


@operator("RotaryEmbedding", domain=MICROSOFT)
def _rotary(call: Call, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = call.get("num_heads", 0) or x.shape[-1] // (2 * cos.shape[-1]) if x.ndim == 3 else x.shape[1]
    y = _heads(x, heads) if x.ndim == 3 else x
    places = positions
    if positions.size == 1:
        places = ow.reshape(positions, (1, 1)) + ow.arange(y.shape[2], dtype=positions.dtype)
    c, s = (ow.expand_dims(ow.embedding(t, places), 1) for t in (cos, sin))
    turned = _rotated(y, c, s, bool(call.get("interleaved", 0)))
    return _joined(turned) if x.ndim == 3 else turned


# --- weights of few bits --------------------------------------------------------------------------------------------


@host_operation("unpack_bits")
def _unpack_bits(x: Array, *, bits: int, count: int) -> Array:
    """Integers of few bits, several in a byte, the first one in the lowest bits, along the last axis."""
    parts = [(x >> (i * bits)) & ((1 << bits) - 1) for i in range(8 // bits)]
    return np.stack(parts, -1).reshape(*x.shape[:-1], -1)[..., :count]


@operator("MatMulNBits", domain=MICROSOFT)
def _matmul_n_bits(
    call: Call, x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    n, k, bits, block = (call.get(name, 4 if name == "bits" else 0) for name in ("N", "K", "bits", "block_size"))
    if groups is not None or bits not in (2, 4, 8):
        raise call.refuse("an order of groups, or weights of other than 2, 4 or 8 bits, are not supported")
    blocks = -(-k // block)
    integers = _unpack_bits(w, shape=(n, blocks, block), dtype="u8", bits=bits, count=block) if bits < 8 else w
    if zeros is None:
        shift: Any = float(1 << (bits - 1))
    elif zeros.dtype.is_float:
        shift = ow.reshape(zeros, (n, blocks, 1)).astype(f32)
    else:
        packed = ow.reshape(zeros, (n, -1))
        whole = _unpack_bits(packed, shape=(n, blocks), dtype="u8", bits=bits, count=blocks) if bits < 8 else packed
        shift = ow.expand_dims(whole, -1).astype(f32)
    values = (ow.reshape(integers, (n, blocks, block)).astype(f32) - shift) * ow.reshape(scales, (n, blocks, 1)).astype(
        f32
    )
    matrix = ow.reshape(values, (n, blocks * block))[:, :k].astype(x.dtype)
    return ow.linear(x, matrix, bias)
