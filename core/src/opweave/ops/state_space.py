"""State-space models: the causal short convolution and the selective scan of Mamba.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023. Shapes and names are those of its
code: channels before tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.activation import silu
from opweave.ops.elementwise import add, mul
from opweave.ops.indexing import embedding
from opweave.ops.movement import concat, expand_dims, reshape
from opweave.ops.operands import (
    Array,
    as_flag,
    as_integer,
    broadcast_to,
    builds,
    check_shape_of,
    floats,
    make,
    misfit,
    optional_operands,
    wide,
)

__all__ = ["causal_conv1d", "selective_scan"]


# --- causal convolution ---------------------------------------------------------------------------------------------


def _conv_infer(x: Tensor, w: Tensor, *rest: Tensor, biased: bool) -> tuple[Shape, DType]:
    if x.ndim != 3 or w.ndim != 2 or w.shape[0] != x.shape[1] or not w.shape[1]:
        raise misfit("causal_conv1d", "x (batch, channels, tokens) and weights (channels, k)", x, w)
    bias, before = optional_operands(rest, biased)
    check_shape_of("causal_conv1d", "the bias", bias, w.shape[:1])
    check_shape_of("causal_conv1d", "the elements before", before, (*x.shape[:2], w.shape[1] - 1))
    return x.shape, x.dtype


def _causal_conv1d(x: Array, w: Array, *rest: Array, biased: bool) -> Array:
    tokens, taps = x.shape[2], w.shape[1]
    bias, before = optional_operands([wide(operand) for operand in rest], biased)
    if before is None:
        before = np.zeros((*x.shape[:2], taps - 1))
    line = np.concatenate([before, wide(x)], -1)
    y = np.zeros(x.shape)
    for j in range(taps):
        y += wide(w)[:, j, None] * line[..., j : j + tokens]
    return y if bias is None else y + bias[:, None]


CAUSAL_CONV1D: Final = OpDef(
    "causal_conv1d",
    infer=_conv_infer,
    reference=_causal_conv1d,
    flops=lambda out: 2 * out.size * out.srcs[1].shape[1],
    formula="y[b, c, t] = Σⱼ w[c, j] · x[b, c, t + j − (k − 1)] + bias[c]; what lies before x is the state, or 0",
)


@builds(CAUSAL_CONV1D)
def causal_conv1d(
    x: Any, weight: Any, bias: Any = None, *, initial_states: Any = None, return_final_states: bool = False
) -> Any:
    """A short convolution over the tokens, channel by channel, in which no token sees a later one.

    Operands are promoted to one float dtype.

    Args:
        x: shape (batch, channels, tokens).
        weight: shape (channels, k); the last column meets the token itself. NaN or infinite, and before the first
            token without ``initial_states``, its product with 0 is NaN, or left out: devices differ.
        bias: shape (channels,), or ``None``.
        initial_states: the k − 1 elements before ``x``, shape (batch, channels, k − 1); ``None``: zeros.
        return_final_states: also return the last k − 1 elements of the line, for the tokens that follow.

    Nodes tell by the attribute ``biased`` whether the third source is a bias; what lies before is the last source.

    Returns:
        Shape (batch, channels, tokens); or a tuple of this and the final states, (batch, channels, k − 1).

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized operand.
    """
    srcs = floats("causal_conv1d", x, weight, optional=[bias, initial_states])
    y = node(CAUSAL_CONV1D, srcs, {"biased": bias is not None})
    if not as_flag("causal_conv1d", "return_final_states", return_final_states):
        return y
    line, kept = srcs[0], srcs[1].shape[1] - 1
    if line.shape[2] < kept:
        before = broadcast_to(make("causal_conv1d", 0, line), (*line.shape[:2], kept))
        line = concat([before if initial_states is None else srcs[-1], line], 2)
    return y, line[..., line.shape[2] - kept :]


# --- selective scan -------------------------------------------------------------------------------------------------


def _scan_infer(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *rest: Tensor, softplus: bool, skip: bool, last: bool
) -> tuple[Shape, DType]:
    if (
        u.ndim != 3
        or delta.shape != u.shape
        or a.ndim != 2
        or a.shape[0] != u.shape[1]
        or not a.shape[1]
        or b.ndim != 4
        or b.shape != (u.shape[0], b.shape[1], a.shape[1], u.shape[2])
        or not b.shape[1]
        or u.shape[1] % b.shape[1]
        or c.shape != b.shape
    ):
        needs = "u and delta (batch, channels, tokens), A (channels, n), B and C (batch, groups, n, tokens)"
        raise misfit("selective_scan", needs, u, delta, a, b, c)
    d, state = optional_operands(rest, skip)
    check_shape_of("selective_scan", "D", d, a.shape[:1], "one a channel")
    check_shape_of("selective_scan", "the state", state, (u.shape[0], *a.shape))
    return ((u.size + u.shape[0] * a.size,) if last else u.shape), u.dtype


def _selective_scan(
    u: Array, delta: Array, a: Array, b: Array, c: Array, *rest: Array, softplus: bool, skip: bool, last: bool
) -> Array:
    batch, channels, tokens = u.shape
    groups, n = b.shape[1:3]
    grouped = (groups, channels // groups)
    inputs, rates = wide(u).reshape(batch, *grouped, tokens), wide(a).reshape(*grouped, n)
    # The channels of a group share B and C, which broadcast along them.
    b, c = wide(b)[:, :, None], wide(c)[:, :, None]
    steps = (np.logaddexp(0.0, wide(delta)) if softplus else wide(delta)).reshape(inputs.shape)
    d, state = optional_operands([wide(operand) for operand in rest], skip)
    h = (np.zeros((batch, *a.shape)) if state is None else state).reshape(batch, *rates.shape)
    y = np.empty(inputs.shape)
    for t in range(tokens):
        step = steps[..., t, None]
        h = np.exp(step * rates) * h + step * b[..., t] * inputs[..., t, None]
        y[..., t] = (h * c[..., t]).sum(-1)
    if d is not None:
        y += d.reshape(*grouped, 1) * inputs
    y = y.reshape(u.shape)
    return np.concatenate([y.reshape(-1), h.reshape(-1)]) if last else y


SELECTIVE_SCAN: Final = OpDef(
    "selective_scan",
    infer=_scan_infer,
    reference=_selective_scan,
    flops=lambda out: 8 * out.srcs[0].size * out.srcs[2].shape[1],
    formula="hₜ = exp(Δₜ A) hₜ₋₁ + Δₜ Bₜ uₜ, yₜ = Cₜ hₜ + D uₜ",
    slack=4.0,
)


@builds(SELECTIVE_SCAN)
def selective_scan(
    u: Any,
    delta: Any,
    A: Any,  # noqa: N803 - the paper's names, and those of its code
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    *,
    state: Any = None,
    state_ids: Any = None,
    return_last_state: bool = False,
    snapshots: Sequence[int] | None = None,
) -> Any:
    """The recurrence of a selective state-space model over the tokens, section 3 of the Mamba paper.

    A state h of n numbers for each channel: h = exp(delta · A) · h + delta · B · u, and y = C · h + D · u. Operands are
    promoted to one float dtype.

    Args:
        u: input, shape (batch, channels, tokens).
        delta: step sizes, the shape of ``u``.
        A: shape (channels, n), negative in models. Where heads share one number, as in Mamba-2, broadcast it.
        B, C: shape (batch, n, tokens), or (batch, groups, n, tokens) with each group serving as many channels.
        D: shape (channels,), or ``None`` for 0.
        z: gate, the shape of ``u``: the result is multiplied by silu(z).
        delta_bias: shape (channels,), added to ``delta``.
        delta_softplus: the step size is softplus(delta + delta_bias), log(1 + eˣ).
        state: h before the first token, shape (batch, channels, n); ``None``: zeros.
        state_ids: i32 or i64, shape (batch,): the row of ``state``, which then has any number of rows, that each batch
            begins with.
        return_last_state: also return h after the last token.
        snapshots: numbers of tokens, ascending: also return h after so many tokens, for each of these numbers, to go
            back to when drafted tokens are rejected. The recurrence then runs in as many parts.

    Nodes have B and C of four axes, tell by the attribute ``skip`` whether the sixth source is D, and by ``last``
    whether the output is y alone, or y and then the last state in one row of numbers. A state is the last source.

    Returns:
        y, the shape of ``u``; or a tuple of y and the last state, (batch, channels, n), or of y and the snapshots,
        (snapshots, batch, channels, n).

    Raises:
        ShapeError: shapes that do not fit; ``state_ids`` without a state; snapshots that are not ascending numbers of
            tokens, or beside ``return_last_state``.
        DTypeError: a quantized operand, ``state_ids`` of another dtype.
    """
    softplus = as_flag("selective_scan", "delta_softplus", delta_softplus)
    last = as_flag("selective_scan", "return_last_state", return_last_state)
    if state_ids is not None:
        if state is None:
            raise ShapeError("selective_scan: state_ids choose rows of a state, and there is none")
        kept = make("selective_scan", state)
        rows = embedding(reshape(kept, (kept.shape[0], -1)), state_ids)
        state = reshape(rows, (rows.shape[0], *kept.shape[1:]))
    if snapshots is not None:
        if last:
            raise ShapeError("selective_scan: return_last_state and snapshots are two forms of one result; give one")
        by_token: dict[str, Any] = {"u": u, "delta": delta, "B": B, "C": C, "z": z}
        lines = {name: make("selective_scan", x) for name, x in by_token.items() if x is not None}
        rest = {"A": A, "D": D, "delta_bias": delta_bias, "delta_softplus": softplus}
        return _with_snapshots(lines, rest, state, snapshots)
    steps = make("selective_scan", delta)
    if delta_bias is not None:
        bias = make("selective_scan", delta_bias)
        if bias.ndim != 1:
            raise ShapeError(f"selective_scan: delta_bias must have shape (channels,); got {bias.describe()}")
        steps = add(steps, reshape(bias, (-1, 1)))
    b, c = [_grouped(make("selective_scan", m)) for m in (B, C)]
    srcs = floats("selective_scan", u, steps, A, b, c, optional=[D, state])
    attrs = {"softplus": softplus, "skip": D is not None, "last": last}
    result = node(SELECTIVE_SCAN, srcs, attrs)
    x, a = srcs[0], srcs[2]
    y = reshape(result[: x.size], x.shape) if last else result
    h = reshape(result[x.size :], (x.shape[0], *a.shape)) if last else None
    if z is not None:
        gate = make("selective_scan", z)
        if gate.shape != y.shape:
            raise ShapeError(f"selective_scan: z must have the shape of u: {x.describe()} and {gate.describe()}")
        y = mul(y, silu(gate))
    return y if h is None else (y, h)


def _with_snapshots(
    lines: Mapping[str, Tensor], rest: Mapping[str, Any], state: Any, snapshots: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The scan in parts, each of which goes on from the last state of the one before; ``lines`` are cut by tokens."""
    tokens = lines["u"].shape[-1] if lines["u"].ndim else 0
    ends = [as_integer("selective_scan", "a snapshot", n) for n in snapshots]
    if not ends or ends != sorted(set(ends)) or ends[0] < 1 or ends[-1] > tokens:
        raise ShapeError(f"selective_scan: snapshots ascend from 1 to at most {tokens} tokens, not {list(snapshots)}")
    outputs, states = [], []
    for start, end in pairwise([0, *ends, *([tokens] if ends[-1] < tokens else [])]):
        part: dict[str, Any] = {name: x[..., start:end] for name, x in lines.items()}
        y, state = selective_scan(**part, **rest, state=state, return_last_state=True)
        outputs.append(y)
        states.append(expand_dims(state, 0))
    return concat(outputs, -1), concat(states[: len(ends)], 0)


def _grouped(x: Tensor) -> Tensor:
    return reshape(x, (x.shape[0], 1, *x.shape[1:])) if x.ndim == 3 else x
