"""Products of matrices, and attention."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave.ops.attention_gradient import attention_gradient_sizes
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_ort.kernels.sums import reduced
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
def attention(m: Model, op: str, out: Operand, q: Operand, k: Operand, v: Operand, *rest: Operand, **given: Any) -> str:
    weights, _ = _attention_weights(m, q, k, rest, **given)
    result = m("MatMul", _by_group(m, weights, q, k), m.expanded(v))
    return m.reshape(result, out.shape) if q.shape[1] > k.shape[1] else result


@emits("attention_backward", when=_attention_why_not)
def attention_backward(
    m: Model, op: str, out: Operand, grad: Operand, q: Operand, k: Operand, v: Operand, *rest: Operand, **given: Any
) -> str:
    by_head, capped = _attention_weights(m, q, k, rest, **given)
    grouped = (*k.shape[:2], q.shape[1] // k.shape[1] * q.shape[2], k.shape[2])
    shares, query, arriving = [_by_group(m, x, q, k) for x in (by_head, m.expanded(q), m.expanded(grad))]
    along = m("MatMul", arriving, _transposed(m, m.expanded(v)))
    total = reduced(m, "ReduceSum", m("Mul", shares, along), out.dtype, grouped, (3,))
    along = m("Mul", m("Sub", along, total), shares)
    if given["soft_cap"]:
        part = m("Div", _by_group(m, capped, q, k), m.constant(given["soft_cap"], out.dtype))
        along = m("Mul", along, m("Sub", m.constant(1, out.dtype), m("Mul", part, part)))
    along = m("Mul", along, m.constant(given["scale"], out.dtype))
    parts = (along, m.expanded(k)), (_transposed(m, along), query), (_transposed(m, shares), arriving)
    sizes = attention_gradient_sizes(q.shape, k.shape, v.shape)
    packed = [m.reshape(m("MatMul", a, b), (*k.shape[:2], n)) for (a, b), n in zip(parts, sizes, strict=True)]
    return m("Concat", *packed, axis=-1)


def _transposed(m: Model, x: str) -> str:
    return m("Transpose", x, perm=[0, 1, 3, 2])


def _by_group(m: Model, x: str, q: Operand, k: Operand) -> str:
    """The heads of a group as further rows, of values that begin with the axes of ``q``."""
    batch, heads, tokens, _ = q.shape
    groups = k.shape[1]
    return x if heads == groups else m.reshape(x, (batch, groups, heads // groups * tokens, -1))


def _attention_weights(
    m: Model,
    q: Operand,
    k: Operand,
    rest: tuple[Operand, ...],
    *,
    scale: float,
    causal: bool,
    max_bias: float,
    soft_cap: float,
    masked: bool,
) -> tuple[str, str]:
    """The weights of the values and, before the mask is added, the scores."""
    mask, sinks = optional_operands(rest, masked)
    heads, tokens, keys, dtype = q.shape[1], q.shape[2], k.shape[2], q.dtype
    scores = m("MatMul", _by_group(m, m.expanded(q), q, k), _transposed(m, m.expanded(k)))
    if scale != 1:
        scores = m("Mul", scores, m.constant(scale, dtype))
    if heads > k.shape[1]:
        scores = m.reshape(scores, (*q.shape[:3], keys))
    if soft_cap:
        cap = m.constant(soft_cap, dtype)
        scores = m("Mul", m("Tanh", m("Div", scores, cap)), cap)
    capped = scores
    if mask is not None:
        bias = mask.name
        if max_bias:
            bias = m("Mul", bias, m.constant(alibi_slopes(heads, max_bias).reshape(-1, 1, 1), dtype))
        scores = m("Add", scores, bias)
    if causal and tokens > 1:
        hidden = np.arange(keys) > np.arange(keys - tokens, keys)[:, None]
        scores = m("Where", m.constant(hidden), m.constant(-np.inf, dtype), scores)
    if sinks is None:
        return m("Softmax", scores, axis=-1), capped
    return softmax_with_sinks(m, scores, sinks, (*q.shape[:3], keys)), capped


def softmax_with_sinks(m: Model, scores: str, sinks: Operand, shape: tuple[int, ...]) -> str:
    """The softmax over the last axis with one more column, the sink of each head along axis -3, which is dropped."""
    *lead, keys = shape
    column = m("Expand", m.reshape(m.expanded(sinks), (-1, 1, 1)), m.integers(*lead, 1))
    whole = m("Softmax", m("Concat", scores, column, axis=-1), axis=-1)
    return m("Slice", whole, m.integers(0), m.integers(keys), m.integers(len(shape) - 1))
