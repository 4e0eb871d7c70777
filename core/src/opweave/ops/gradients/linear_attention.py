"""The gradient of linear attention: its states are computed again, and their gradients flow from token to token."""

from __future__ import annotations

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import at_least_f32, gradient_of, sum_of, zeros
from opweave.ops.linear_attention import linear_attention_operands


def _turned(x: Tensor) -> Tensor:
    return ops.transpose(x, (0, 1, 3, 2))


def _row(x: Tensor, t: int) -> Tensor:
    """The elements of token ``t`` as a row for each head: (batch, heads, 1, size)."""
    return x[:, :, t : t + 1]


def _column(x: Tensor, t: int) -> Tensor:
    """The same as a column: (batch, heads, size, 1)."""
    return _turned(_row(x, t))


def _next_state(
    state: Tensor, t: int, k: Tensor, v: Tensor, w: Tensor | None, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """The state behind token ``t``, of the one before it."""
    s = state if w is None else _column(w, t) * state
    s = s + _column(k, t) * _row(v, t)
    return s if a is None or b is None else s + _column(b, t) * (_row(a, t) @ state)


@gradient_of("linear_attention")
def _linear_attention(
    grad: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Tensor,
    decay: bool,
    bonus: bool,
    removal: bool,
    state: bool,
    last: bool,
) -> tuple[Tensor | None, ...]:
    """Built token by token, because each state depends on the one before by a matrix: about 20 nodes for each token."""
    given = linear_attention_operands(rest, decay, bonus, removal, state)
    dtypes = [x.dtype for x in (q, k, v, *rest)]
    grad, q, k, v = at_least_f32(grad, q, k, v)
    w, u, a, b, h = [None if x is None else at_least_f32(x)[0] for x in given]
    batch, heads, tokens, size = q.shape
    last_shape = (batch, heads, size, v.shape[3])
    dy = ops.reshape(grad[: v.size], v.shape) if last else grad
    ds: Tensor = ops.reshape(grad[v.size :], last_shape) if last else zeros(last_shape, q.dtype)

    before = [h if h is not None else zeros(last_shape, q.dtype)]
    for t in range(tokens - 1 if bonus else tokens):  # with a bonus nothing reads the last state
        before.append(_next_state(before[t], t, k, v, w, a, b))
    per_token: dict[str, list[Tensor]] = {name: [] for name in ("q", "k", "v", "w", "a", "b")}
    du: Tensor | None = None
    for t in reversed(range(tokens)):
        key, value, query = _column(k, t), _row(v, t), _column(q, t)
        dread = query * _row(dy, t)
        if u is None:
            read, ds = before[t + 1], ds + dread
            dadded = ds
        else:
            weight = ops.reshape(u, (1, heads, size, 1))
            added = key * value
            read = before[t] + weight * added
            dadded = ds + weight * dread
            term = ops.sum(ops.reshape(dread * added, (batch, heads, size, v.shape[3])), (0, 3))
            du = term if du is None else du + term
        per_token["q"].append(_row(dy, t) @ _turned(read))
        per_token["k"].append(value @ _turned(dadded))
        per_token["v"].append(_turned(key) @ dadded)
        carried = ds if w is None else _column(w, t) * ds
        if w is not None:
            shrunk = sum_of(ds * before[t])
            per_token["w"].append(_turned(shrunk if w.shape[3] == size else ops.sum(shrunk, 2, keepdims=True)))
        if a is not None and b is not None:
            dremoved = _row(b, t) @ ds
            per_token["b"].append((_row(a, t) @ before[t]) @ _turned(ds))
            per_token["a"].append(dremoved @ _turned(before[t]))
            carried = carried + _column(a, t) * dremoved
        ds = carried if u is None else carried + dread

    def gathered(name: str, like: Tensor) -> Tensor:
        return ops.concat(per_token[name][::-1], 2) if tokens else zeros(like.shape, like.dtype)

    gradients = [gathered("q", q), gathered("k", k), gathered("v", v)]
    if w is not None:
        gradients.append(gathered("w", w))
    if u is not None:
        gradients.append(zeros(u.shape, u.dtype) if du is None else du)
    if a is not None and b is not None:
        gradients += [gathered("a", a), gathered("b", b)]
    if h is not None:
        gradients.append(ds)
    return tuple([g if g.dtype is dtype else ops.cast(g, dtype) for g, dtype in zip(gradients, dtypes, strict=True)])
