"""Linear attention, whose state is a matrix for each head: gated linear attention, delta rules, RWKV.

All of them are one recurrence with different gates, so they are one operation, `linear_attention`; the builders named
after models compute its operands.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import exp, mul, neg
from opweave.ops.movement import expand_dims, reshape
from opweave.ops.operands import Array, as_flag, as_number, builds, check_shape_of, floating, floats, misfit, wide

__all__ = ["gated_delta_rule", "gated_linear_attention", "linear_attention", "rwkv6", "rwkv7"]

OPTIONAL: Final = ("decay", "bonus", "removal", "insertion", "state")
"""The sources behind q, k and v, as far as a node has them; its attributes of these names (but ``insertion``, which
goes with ``removal``) tell which."""


def linear_attention_operands(rest: Any, decay: bool, bonus: bool, removal: bool, state: bool) -> list[Any]:
    """The optional sources of a node, in the order of `OPTIONAL`; ``None`` for those that it does not have."""
    given = iter(rest)
    return [next(given) if has else None for has in (decay, bonus, removal, removal, state)]


def _infer(
    q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, decay: bool, bonus: bool, removal: bool, state: bool, last: bool
) -> tuple[Shape, DType]:
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3] or not q.shape[3]:
        needs = "q and k (batch, heads, tokens, size) and v (batch, heads, tokens, v_size)"
        raise misfit("linear_attention", needs, q, k, v)
    batch, heads, _, size = q.shape
    w, u, a, b, h = linear_attention_operands(rest, decay, bonus, removal, state)
    if w is not None and w.shape not in (q.shape, (*q.shape[:3], 1)):
        raise ShapeError(f"linear_attention: the decay must have shape {q.shape} or {(*q.shape[:3], 1)}; "
                         f"got {w.describe()}")  # fmt: skip
    check_shape_of("linear_attention", "the bonus", u, (heads, size))
    check_shape_of("linear_attention", "the removal", a, q.shape)
    check_shape_of("linear_attention", "the insertion", b, q.shape)
    check_shape_of("linear_attention", "the state", h, (batch, heads, size, v.shape[3]))
    return ((v.size + batch * heads * size * v.shape[3],) if last else v.shape), q.dtype


def _reference(
    q: Array, k: Array, v: Array, *rest: Array, decay: bool, bonus: bool, removal: bool, state: bool, last: bool
) -> Array:
    q, k, v = wide(q), wide(k), wide(v)
    w, u, a, b, h = linear_attention_operands([wide(x) for x in rest], decay, bonus, removal, state)
    s = np.zeros((*q.shape[:2], q.shape[3], v.shape[3])) if h is None else np.array(h)
    y = np.empty(v.shape)
    for t in range(q.shape[2]):
        added = k[:, :, t, :, None] * v[:, :, t, None, :]
        before = s
        if a is not None and b is not None:
            removed = (a[:, :, t, :, None] * before).sum(2, keepdims=True)
            added = added + b[:, :, t, :, None] * removed
        s = (before if w is None else w[:, :, t, :, None] * before) + added
        read = s if u is None else before + u[:, :, None] * added
        y[:, :, t] = (q[:, :, t, :, None] * read).sum(2)
    return np.concatenate([y.reshape(-1), s.reshape(-1)]) if last else y


LINEAR_ATTENTION: Final = OpDef(
    "linear_attention",
    infer=_infer,
    reference=_reference,
    flops=lambda out: 8 * out.srcs[0].size * out.srcs[2].shape[3],
    formula="Sₜ = diag(wₜ) Sₜ₋₁ + bₜ (aₜᵀ Sₜ₋₁) + kₜ vₜᵀ, yₜ = qₜᵀ Sₜ; with a bonus yₜ = qₜᵀ (Sₜ₋₁ + diag(u) kₜ vₜᵀ)",
    slack=4.0,
)


@builds(LINEAR_ATTENTION)
def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    bonus: Any = None,
    removal: Any = None,
    insertion: Any = None,
    state: Any = None,
    return_last_state: bool = False,
) -> Any:
    """Attention without softmax as a recurrence over the tokens, with a state S (size, v_size) for each head.

    S = diag(decay) · S + insertion · (removalᵀ · S) + k · vᵀ, and y = qᵀ · S. Katharopoulos et al., "Transformers are
    RNNs", 2020, without the gates; `gated_linear_attention`, `gated_delta_rule`, `rwkv6` and `rwkv7` are this with the
    gates of the models. Operands are promoted to one float dtype.

    Args:
        q, k: shape (batch, heads, tokens, size). ``q`` is not scaled.
        v: shape (batch, heads, tokens, v_size).
        decay: factors by which the rows of S shrink, the shape of ``q``, or (batch, heads, tokens, 1); ``None``: 1.
        bonus: shape (heads, size): y reads S as it was before the token, and ``bonus · k · vᵀ`` of the token itself.
        removal, insertion: both or neither, the shape of ``q``: what is read from S before the token, and where it is
            added.
        state: S before the first token, shape (batch, heads, size, v_size); ``None``: zeros.
        return_last_state: also return S after the last token.

    Nodes tell by the attributes ``decay``, ``bonus``, ``removal`` and ``state`` which sources follow the first three,
    in this order (the insertion after the removal), and by ``last`` whether the output is y alone, or y and then the
    last state in one row of numbers.

    Returns:
        y, the shape of ``v``; or a tuple of y and the last state.

    Raises:
        ShapeError: shapes that do not fit; one of ``removal`` and ``insertion`` without the other; a bonus with these.
        DTypeError: a quantized operand.
    """
    if (removal is None) != (insertion is None):
        raise ShapeError("linear_attention: removal and insertion are given together")
    if bonus is not None and removal is not None:
        raise ShapeError("linear_attention: a bonus does not go with removal and insertion")
    srcs = floats("linear_attention", q, k, v, optional=[decay, bonus, removal, insertion, state])
    last = as_flag("linear_attention", "return_last_state", return_last_state)
    attrs = {"decay": decay is not None, "bonus": bonus is not None, "removal": removal is not None}
    result = node(LINEAR_ATTENTION, srcs, attrs | {"state": state is not None, "last": last})
    if not last:
        return result
    queries, values = srcs[0], srcs[2]
    shape = (*queries.shape[:2], queries.shape[3], values.shape[3])
    return reshape(result[: values.size], values.shape), reshape(result[values.size :], shape)


def gated_linear_attention(
    q: Any, k: Any, v: Any, g: Any, *, scale: float | None = None, state: Any = None, return_last_state: bool = False
) -> Any:
    """Gated linear attention: S = diag(exp(g)) · S + k · vᵀ, y = scale · qᵀ · S.

    Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023, equation 3.

    Args:
        q, k: shape (batch, heads, tokens, size).
        v: shape (batch, heads, tokens, v_size).
        g: logarithms of the gates, the shape of ``k``, at most 0 in models.
        scale: by default 1 / √size.
        state, return_last_state: as of `linear_attention`, as are the result and what is raised; `DTypeError` for a
            scale that is no number, too.
    """
    return linear_attention(_scaled("gated_linear_attention", q, scale), k, v, decay=exp(g), state=state,
                            return_last_state=return_last_state)  # fmt: skip


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    state: Any = None,
    return_last_state: bool = False,
) -> Any:
    """The gated delta rule: S is multiplied by exp(g), then the value that it holds for the key k moves towards v by
    beta.

    S = exp(g) · S; S = S + beta · k · (v − Sᵀ · k)ᵀ; y = scale · qᵀ · S. Yang et al., "Gated Delta Networks", 2024,
    equation 10. Keys are of length 1 in models.

    Args:
        q, k: shape (batch, heads, tokens, size).
        v: shape (batch, heads, tokens, v_size).
        g: logarithms of the gates, shape (batch, heads, tokens), or that of ``k`` for one a row of S (Kimi delta
            attention).
        beta: strengths of writing, shape (batch, heads, tokens).
        scale: by default 1 / √size.
        state, return_last_state: as of `linear_attention`, as are the result and what is raised; `DTypeError` for a
            scale that is no number, too.
    """
    op = "gated_delta_rule"
    keys, gates, strengths = floating(op, k), floating(op, g), floating(op, beta)
    if keys.ndim != 4 or gates.shape not in (keys.shape, keys.shape[:3]) or strengths.shape != keys.shape[:3]:
        needs = "k (batch, heads, tokens, size), g of its shape or (batch, heads, tokens), beta (batch, heads, tokens)"
        raise misfit(op, needs, keys, gates, strengths)
    decay = exp(gates if gates.ndim == 4 else expand_dims(gates, -1))
    written = mul(expand_dims(strengths, -1), keys)
    # The key reads S after it has shrunk: kᵀ · diag(decay) · S.
    return linear_attention(
        _scaled(op, q, scale),
        written,
        v,
        decay=decay,
        removal=mul(decay, keys),
        insertion=neg(written),
        state=state,
        return_last_state=return_last_state,
    )


def rwkv6(
    r: Any, k: Any, v: Any, w: Any, u: Any, *, scale: float = 1.0, state: Any = None, return_last_state: bool = False
) -> Any:
    """The time mixing of RWKV 6: y = rᵀ · (S + diag(u) · k · vᵀ), S = diag(exp(w)) · S + k · vᵀ.

    Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024, equation 19.

    Args:
        r, k: shape (batch, heads, tokens, size).
        v: shape (batch, heads, tokens, v_size).
        w: logarithms of the decays, the shape of ``k``: −exp of what the model computes.
        u: bonus of the token itself, shape (heads, size).
        scale: multiplies y.
        state, return_last_state: as of `linear_attention`, as are the result and what is raised; `DTypeError` for a
            scale that is no number, too.
    """
    return linear_attention(_scaled("rwkv6", r, scale), k, v, decay=exp(w), bonus=u, state=state,
                            return_last_state=return_last_state)  # fmt: skip


def rwkv7(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    *,
    scale: float = 1.0,
    state: Any = None,
    return_last_state: bool = False,
) -> Any:
    """The time mixing of RWKV 7: S = diag(exp(w)) · S + b · (aᵀ · S) + k · vᵀ, y = rᵀ · S.

    Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025, equation 17; its state is the transpose
    of S.

    Args:
        r, k: shape (batch, heads, tokens, size).
        w: logarithms of the decays, the shape of ``k``.
        v: shape (batch, heads, tokens, v_size).
        a, b: the shape of ``k``: what is read from S, and where it is added. The model has a = −κ̂, b = κ̂ · η.
        scale: multiplies y.
        state, return_last_state: as of `linear_attention`, as are the result and what is raised; `DTypeError` for a
            scale that is no number, too.
    """
    return linear_attention(_scaled("rwkv7", r, scale), k, v, decay=exp(w), removal=a, insertion=b, state=state,
                            return_last_state=return_last_state)  # fmt: skip


def _scaled(op: str, q: Any, scale: float | None) -> Tensor:
    queries = floating(op, q)
    if queries.ndim != 4 or not queries.shape[3]:
        raise misfit(op, "queries (batch, heads, tokens, size)", queries)
    factor = queries.shape[3] ** -0.5 if scale is None else as_number(op, "scale", scale)
    return queries if factor == 1 else mul(queries, factor)
