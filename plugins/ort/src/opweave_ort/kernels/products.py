"""Products of matrices, and attention."""

from __future__ import annotations

from math import prod

import numpy as np

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_ort.kernels.table import NUMBERS, emits
from opweave_ort.model import Model, Operand


@emits("linear", dtypes=NUMBERS, when=lambda step: of_other_type(step, 1, 2))
def linear(m: Model, op: str, out: Operand, x: Operand, w: Operand, b: Operand | None = None) -> str:
    source, weights = m.expanded(x), m.expanded(w)
    if out.dtype.is_integer:
        result = m("MatMul", source, m("Transpose", weights, perm=[1, 0]))
        return result if b is None else m("Add", result, b.name)
    rows, columns = prod(x.shape[:-1]), x.shape[-1]
    flat = source if len(x.shape) == 2 else m.reshape(source, (rows, columns))
    biases = () if b is None else (b.name,)
    result = m("Gemm", flat, weights, *biases, transB=1)
    return result if len(x.shape) == 2 else m.reshape(result, out.shape)


def _attention_why_not(step: Step) -> str | None:
    return of_other_type(step, *range(1, len(step.srcs)))


@emits("attention", when=_attention_why_not)
def attention(
    m: Model,
    op: str,
    out: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    *rest: Operand,
    scale: float,
    causal: bool,
    max_bias: float,
    soft_cap: float,
    masked: bool,
) -> str:
    mask, sinks = optional_operands(rest, masked)
    batch, heads, tokens, size = q.shape
    groups, keys, dtype = k.shape[1], k.shape[2], q.dtype
    shared = heads // groups
    query, key, value = m.expanded(q), m.expanded(k), m.expanded(v)
    if shared > 1:
        query = m.reshape(query, (batch, groups, shared * tokens, size))
    scores = m("MatMul", query, m("Transpose", key, perm=[0, 1, 3, 2]))
    if scale != 1:
        scores = m("Mul", scores, m.constant(scale, dtype))
    if shared > 1:
        scores = m.reshape(scores, (batch, heads, tokens, keys))
    if soft_cap:
        cap = m.constant(soft_cap, dtype)
        scores = m("Mul", m("Tanh", m("Div", scores, cap)), cap)
    if mask is not None:
        bias = mask.name
        if max_bias:
            bias = m("Mul", bias, m.constant(alibi_slopes(heads, max_bias).reshape(-1, 1, 1), dtype))
        scores = m("Add", scores, bias)
    if causal and tokens > 1:
        hidden = np.arange(keys) > np.arange(keys - tokens, keys)[:, None]
        scores = m("Where", m.constant(hidden), m.constant(-np.inf, dtype), scores)
    if sinks is None:
        weights = m("Softmax", scores, axis=-1)
    else:
        weights = softmax_with_sinks(m, scores, sinks, (batch, heads, tokens, keys))
    if shared > 1:
        weights = m.reshape(weights, (batch, groups, shared * tokens, keys))
    result = m("MatMul", weights, value)
    return m.reshape(result, out.shape) if shared > 1 else result


def softmax_with_sinks(m: Model, scores: str, sinks: Operand, shape: tuple[int, ...]) -> str:
    """The softmax over the last axis with one more column, the sink of each head along axis -3, which is dropped."""
    *lead, keys = shape
    column = m("Expand", m.reshape(m.expanded(sinks), (-1, 1, 1)), m.integers(*lead, 1))
    whole = m("Softmax", m("Concat", scores, column, axis=-1), axis=-1)
    return m("Slice", whole, m.integers(0), m.integers(keys), m.integers(len(shape) - 1))
