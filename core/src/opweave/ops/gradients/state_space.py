"""Gradients of the causal convolution and of the selective scan."""

from __future__ import annotations

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of, zeros
from opweave.ops.operands import optional_operands


@gradient_of("causal_conv1d")
def _causal_conv1d(grad: Tensor, out: Tensor, x: Tensor, w: Tensor, *rest: Tensor, biased: bool) -> tuple[Tensor, ...]:
    bias, before = optional_operands(rest, biased)
    taps, tokens = w.shape[1], x.shape[2]
    earlier = zeros((*x.shape[:2], taps - 1), x.dtype) if before is None else before
    line = ops.concat([earlier, x], 2)
    # The same convolution, applied to the reversed gradient.
    backwards = ops.pad(ops.flip(grad, 2), [(0, 0), (0, 0), (0, taps - 1)])
    dline = ops.flip(ops.causal_conv1d(backwards, w), 2)
    dw = ops.concat([ops.sum(grad * line[..., j : j + tokens], (0, 2)).reshape(-1, 1) for j in range(taps)], 1)
    gradients = [dline[..., taps - 1 :], dw]
    if bias is not None:
        gradients.append(ops.sum(grad, (0, 2)))
    if before is not None:
        gradients.append(dline[..., : taps - 1])
    return tuple(gradients)


def _recurrence(a: Tensor, b: Tensor) -> Tensor:
    """All h of h[t] = a[t] · h[t − 1] + b[t], h[−1] = 0, along the last axis, in log₂ tokens passes.

    Two successive steps can be written as one step of the same form, so each pass doubles the number of steps that
    every entry combines: Hillis and Steele, "Data Parallel Algorithms", 1986.
    """
    covered, tokens = 1, a.shape[-1]
    while covered < tokens:
        far_a, far_b = a[..., :-covered], b[..., :-covered]
        late_a = a[..., covered:]
        b = ops.concat([b[..., :covered], b[..., covered:] + late_a * far_b], -1)
        a = ops.concat([a[..., :covered], late_a * far_a], -1)
        covered *= 2
    return b


@gradient_of("selective_scan")
def _selective_scan(
    grad: Tensor,
    out: Tensor,
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *rest: Tensor,
    softplus: bool,
    skip: bool,
    last: bool,
) -> tuple[Tensor | None, ...]:
    """The states are computed again, for all tokens, shape (batch, channels, n, tokens); so are their gradients, by the
    recurrence that runs backwards."""
    d, state = optional_operands(rest, skip)
    batch, channels, tokens = u.shape
    if not tokens:
        kept = [ops.reshape(grad, state.shape)] if last and state is not None else []
        return *[None] * (5 + len(rest) - len(kept)), *kept
    n, groups = a.shape[1], b.shape[1]
    dy = ops.reshape(grad[: u.size], u.shape) if last else grad
    steps = ops.softplus(delta) if softplus else delta
    step, value = ops.expand_dims(steps, 2), ops.expand_dims(u, 2)
    rates = ops.expand_dims(a, -1)
    keys, queries = _of_channels(b, channels), _of_channels(c, channels)
    decay = ops.exp(step * rates)
    entering = step * keys * value
    if state is not None:
        first = entering[..., :1] + decay[..., :1] * ops.expand_dims(state, -1)
        entering = ops.concat([first, entering[..., 1:]], -1)
    states = _recurrence(decay, entering)
    before = zeros((batch, channels, n, 1), u.dtype) if state is None else ops.expand_dims(state, -1)
    before = ops.concat([before, states[..., :-1]], -1)

    arriving = queries * ops.expand_dims(dy, 2)
    if last:
        final = ops.reshape(grad[u.size :], (batch, channels, n, 1))
        arriving = ops.concat([arriving[..., :-1], arriving[..., -1:] + final], -1)
    following = ops.concat([decay[..., 1:], decay[..., :1]], -1)  # the value of the last one is not used
    dstates = ops.flip(_recurrence(ops.flip(following, -1), ops.flip(arriving, -1)), -1)

    carried = dstates * decay * before
    du = steps * ops.sum(dstates * keys, 2)
    dsteps = ops.sum(carried * rates + dstates * keys * value, 2)
    gradients: list[Tensor | None] = [
        du if d is None else du + ops.reshape(d, (-1, 1)) * dy,
        dsteps * ops.sigmoid(delta) if softplus else dsteps,
        ops.sum(carried * step, (0, 3)),
        _of_groups(dstates * step * value, groups),
        _of_groups(states * ops.expand_dims(dy, 2), groups),
    ]
    if d is not None:
        gradients.append(ops.sum(dy * u, (0, 2)))
    if state is not None:
        gradients.append((dstates * decay)[..., 0])
    return tuple(gradients)


def _of_channels(x: Tensor, channels: int) -> Tensor:
    """B or C, (batch, groups, n, tokens), repeated for the channels: (batch, channels, n, tokens)."""
    return ops.repeat(x, channels // x.shape[1], 1)


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """The sums over the channels of each group: (batch, groups, n, tokens)."""
    batch, channels, n, tokens = x.shape
    return ops.sum(ops.reshape(x, (batch, groups, channels // groups, n, tokens)), 2)
