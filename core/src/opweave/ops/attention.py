"""Attention: sums of values, weighted by the softmax of the products of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any, Final, TypedDict, Unpack

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import ROUGH, Limits, OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.normalization import alibi_slopes, softmax_of
from opweave.ops.operands import (
    Array,
    as_flag,
    as_mask,
    as_number,
    builds,
    check_shape_of,
    floats,
    misfit,
    optional_operands,
    wide,
)
from opweave.ops.samples import measured, operand

__all__ = ["attention"]


class AttentionOptions(TypedDict):
    """The attributes of attention and of its gradient."""

    scale: float
    causal: bool
    max_bias: float
    soft_cap: float
    masked: bool


def _attention_infer(
    q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Unpack[AttentionOptions]
) -> tuple[Shape, DType]:
    if (
        not q.ndim == k.ndim == v.ndim == 4
        or k.shape[:3] != v.shape[:3]
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
        or not k.shape[1]
        or q.shape[1] % k.shape[1]
    ):
        needs = ("q (batch, heads, tokens, size), k (batch, groups, keys, size) and v (batch, groups, keys, out), the "
                 "heads a multiple of the groups")  # fmt: skip
        raise misfit("attention", needs, q, k, v)
    scores = (*q.shape[:3], k.shape[2])
    mask, sinks = optional_operands(rest, options["masked"])
    check_shape_of("attention", "the mask", mask, scores)
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise misfit("attention", f"({q.shape[1]},) sinks, one a head", sinks)
    if not k.shape[2]:
        raise ShapeError(f"attention: there are no keys to choose from: {k.describe()}")
    return (*q.shape[:3], v.shape[3]), q.dtype


def attention_shares(
    q: Array, k: Array, rest: Sequence[Array], *, scale: float, causal: bool, max_bias: float, soft_cap: float,
    masked: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """The weights of the values and, before the mask is added, the scores, both (batch, heads, tokens, keys)."""
    mask, sinks = optional_operands([wide(x) for x in rest], masked)
    heads, tokens, keys = q.shape[1], q.shape[2], k.shape[2]
    # In place, because the pages of each further array of this size cost more time than the arithmetic.
    scores: Array = np.matmul(wide(q), np.repeat(wide(k), heads // k.shape[1], 1).swapaxes(-1, -2))
    scores *= scale
    if soft_cap:
        scores /= soft_cap
        np.tanh(scores, out=scores)
        scores *= soft_cap
    capped = scores
    if mask is not None:
        scores = scores + (alibi_slopes(heads, max_bias)[:, None, None] * mask if max_bias else mask)
    if causal:
        last = np.arange(keys - tokens, keys)[:, None]
        scores = np.where(np.arange(keys) > last, -np.inf, scores)
    return softmax_of(scores, sinks), capped


def _attention(q: Array, k: Array, v: Array, *rest: Array, **options: Unpack[AttentionOptions]) -> Array:
    shares, _ = attention_shares(q, k, rest, **options)
    result: Array = np.matmul(shares, np.repeat(wide(v), q.shape[1] // k.shape[1], 1))
    return result


def attention_samples() -> list[Tensor]:
    return [attention(q, q, q) for q in (operand(1, 2, 8, 16), operand(1, 4, 64, 32), operand(1, 8, 256, 64))]


ATTENTION: Final = OpDef(
    "attention",
    infer=_attention_infer,
    attributes=tuple(AttentionOptions.__annotations__),
    reference=_attention,
    flops=lambda out: 2 * (out.srcs[0].size + out.size) * out.srcs[1].shape[2],
    formula="softmax(cap(scale · q kᵀ) + slope · mask) v, cap(s) = soft_cap · tanh(s / soft_cap)",
    product=True,
    slack=4.0,
    # A mean over many keys is small compared with the rounding errors of the values.
    rough={**ROUGH, "bf16": Limits(2e-4, 8e-2)},
    samples=measured(attention_samples, attention_samples),
)


def _values_of(x: Any) -> Any:
    return opdef.build("dequantize", x) if isinstance(x, Tensor) and x.dtype.is_quantized else x


@builds(ATTENTION)
def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    max_bias: float = 0.0,
    soft_cap: float = 0.0,
    sinks: Any = None,
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2), with groups of
    heads that share keys and values (Ainslie et al., "GQA", 2023).

    q, k, v and the sinks are promoted to one float dtype; quantized keys and values are decoded first, to f32.

    Args:
        q: queries, shape (batch, heads, tokens, size).
        k: keys, shape (batch, groups, keys, size); ``heads`` is a multiple of ``groups``, and the first
            heads / groups heads read the first group.
        v: values, shape (batch, groups, keys, out).
        mask: broadcasts to (batch, heads, tokens, keys). Of a float type it is added to the scores: 0 keeps, -inf
            hides. Of bool, True means that the key takes part, as in torch's ``scaled_dot_product_attention``; a query
            of which all keys are hidden gives NaN (with sinks 0).
        scale: multiplies the products, 1 / √size by default.
        causal: the last query sees all keys, the one before it all but the last key, and so on. (With torch's
            ``is_causal`` the first query sees the first key, and so on, which is the same for as many queries as keys.)
            A query that sees no key gives NaN.
        max_bias: if not 0, ALiBi: the mask, which then holds minus the distances, is multiplied by a slope for each
            head (`opweave.ops.normalization.alibi_slopes`, as in `softmax`).
        soft_cap: if not 0, scores s become soft_cap · tanh(s / soft_cap) before the mask is added (Gemma Team,
            "Gemma 2", 2024).
        sinks: shape (heads,): a score for each head that takes part in the sum of its softmax, without a value (Xiao et
            al., "Efficient Streaming Language Models with Attention Sinks", 2023; learned as in gpt-oss).

    Nodes tell by the attribute ``masked`` whether the fourth source is a mask; sinks are the last source.

    Returns:
        Shape (batch, heads, tokens, out).

    Raises:
        ShapeError: shapes that do not fit, no keys, ``max_bias`` without a mask.
        DTypeError: quantized queries, mask or sinks, a mask that is neither of a float type nor bool, a bool mask with
            ``max_bias``, options that are no numbers, a ``max_bias`` or ``soft_cap`` that is negative or not finite.
    """
    query, key, value, *rest = floats("attention", q, *map(_values_of, (k, v)), optional=[sinks])
    bias, cap = as_number("attention", "max_bias", max_bias), as_number("attention", "soft_cap", soft_cap)
    if not (0 <= bias < inf and 0 <= cap < inf):
        raise DTypeError(
            f"attention: max_bias and soft_cap are finite and not negative; got {max_bias!r} and {soft_cap!r}"
        )
    if scale is None:
        scale = 1.0 / sqrt(query.shape[-1]) if query.ndim and query.shape[-1] else 1.0
    attrs = {
        "scale": as_number("attention", "scale", scale),
        "causal": as_flag("attention", "causal", causal),
        "max_bias": bias,
        "soft_cap": cap,
        "masked": mask is not None,
    }
    if mask is not None:
        rest = [as_mask("attention", mask, (*query.shape[:3], *key.shape[2:3]), query, bias), *rest]
    elif bias:
        raise ShapeError("attention: max_bias multiplies a mask that holds minus the distances, and there is no mask")
    return node(ATTENTION, (query, key, value, *rest), attrs)
