"""State-space models: short causal convolutions tap by tap, and the selective scan in chunks of tokens."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave_torch.kernels.binding import Scratch, converted, converted_bytes, in_turn, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor

# --- causal convolution ---------------------------------------------------------------------------------------------


def _conv_workspace(step: Step) -> int:
    return converted_bytes((step.out, *step.srcs), widened(step.out.dtype))


@KERNELS("causal_conv1d", workspace=_conv_workspace)
def causal_conv1d(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, *rest: Arg, biased: bool, workspace: Arg | None
) -> Call:
    scratch, dtype = Scratch(workspace), widened(out.dtype)
    (source, weights, *others), calls = converted((x, w, *rest), dtype, scratch)
    stored = tensor(out)
    total = stored if out.dtype is dtype else scratch.take(out.shape, dtype)
    tokens, before = x.shape[2], w.shape[1] - 1
    calls.append(partial(torch.mul, source, weights[:, before:], out=total))
    for j in range(before):
        factors, late = weights[:, j : j + 1], before - j
        if late < tokens:
            part = total[..., late:]
            calls.append(partial(torch.addcmul, part, source[..., : tokens - late], factors, out=part))
        if len(others) > biased:
            count = min(late, tokens)
            part = total[..., :count]
            calls.append(partial(torch.addcmul, part, others[-1][..., j : j + count], factors, out=part))
    if biased:
        calls.append(partial(torch.add, total, others[0].unsqueeze(1), out=total))
    if total is not stored:
        calls.append(partial(stored.copy_, total))
    return in_turn(calls)


# --- selective scan -------------------------------------------------------------------------------------------------

CHUNK: Final = 1 << 22
"""Elements of a chunk: the numbers of the state of so many tokens."""


class _Scan:
    """The memory of a scan. Axes are (tokens of a chunk, batch, groups, channels of a group, numbers of a state)."""

    def __init__(self, out: Arg, u: Arg, a: Arg, b: Arg, scratch: Scratch) -> None:
        dtype = widened(out.dtype)
        batch, channels, tokens = u.shape
        groups, n = b.shape[1:3]
        self.lead = (batch, groups, channels // groups)
        self.chunk = max(1, min(tokens, CHUNK // (batch * channels * n)))
        self.decay = scratch.take((self.chunk, *self.lead, n), dtype)
        self.states = scratch.take((self.chunk, *self.lead, n), dtype)
        self.rows = [scratch.take((self.chunk, *self.lead), dtype) for _ in range(3)]
        self.columns = [scratch.take((self.chunk, *self.lead[:2], n), dtype) for _ in range(2)]
        self.last = scratch.take((*self.lead, n), dtype)
        self.rates = scratch.take((*self.lead[1:], n), dtype)
        self.through = scratch.take(self.lead[1:], dtype)


def _scan_workspace(step: Step) -> int:
    u, _, a, b, *_ = step.srcs
    scratch = Scratch(None)
    _Scan(step.out, u, a, b, scratch)
    return scratch.used


@KERNELS("selective_scan", workspace=_scan_workspace)
def selective_scan(
    stream: Stream,
    op: str,
    out: Arg,
    u: Arg,
    delta: Arg,
    a: Arg,
    b: Arg,
    c: Arg,
    *rest: Arg,
    softplus: bool,
    skip: bool,
    last: bool,
    workspace: Arg,
) -> Call:
    plan = _Scan(out, u, a, b, Scratch(workspace))
    by_group, tokens = plan.lead[1:], u.shape[2]
    inputs, deltas = [tensor(x).unflatten(1, by_group).movedim(-1, 0) for x in (u, delta)]
    reads, writes = [tensor(x).movedim(-1, 0) for x in (b, c)]
    flat = tensor(out).view(-1) if last else None
    results = tensor(out) if flat is None else flat[: u.size].view(u.shape)
    results = results.unflatten(1, by_group).movedim(-1, 0)
    calls: list[Call] = [partial(plan.rates.copy_, tensor(a).unflatten(0, by_group))]
    if skip:
        calls.append(partial(plan.through.copy_, tensor(rest[0]).unflatten(0, by_group)))
    if len(rest) > skip:
        calls.append(partial(plan.last.copy_, tensor(rest[-1]).unflatten(1, by_group)))
    else:
        calls.append(plan.last.zero_)
    for first in range(0, tokens, plan.chunk):
        ts = slice(first, min(first + plan.chunk, tokens))
        calls += _bind_chunk(
            plan, ts.stop - first, inputs[ts], deltas[ts], reads[ts], writes[ts], results[ts], softplus, skip
        )
    if flat is not None:
        calls.append(partial(flat[u.size :].view(plan.last.shape).copy_, plan.last))
    return in_turn(calls)


def _bind_chunk(
    plan: _Scan,
    count: int,
    u: torch.Tensor,
    delta: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    results: torch.Tensor,
    softplus: bool,
    skip: bool,
) -> list[Call]:
    """The calls that take the state through ``count`` tokens."""
    decay, states = plan.decay[:count], plan.states[:count]
    step, x, y = [room[:count] for room in plan.rows]
    read, write = [room[:count] for room in plan.columns]
    calls: list[Call] = [partial(step.copy_, delta)]
    if softplus:
        calls.append(partial(torch.ops.aten.softplus.out, step, 1, 50, out=step))
    calls += [
        partial(x.copy_, u),
        partial(read.copy_, b),
        partial(write.copy_, c),
        partial(torch.mul, step.unsqueeze(-1), plan.rates, out=decay),
        partial(torch.exp, decay, out=decay),
        partial(torch.mul, step, x, out=y),
        partial(torch.mul, y.unsqueeze(-1), read.unsqueeze(-2), out=states),
    ]
    before = plan.last
    for now, factor in zip(states, decay, strict=True):
        calls.append(partial(torch.addcmul, now, factor, before, out=now))
        before = now
    calls += [
        partial(plan.last.copy_, before),
        partial(torch.matmul, states, write.unsqueeze(-1), out=y.unsqueeze(-1)),
    ]
    if skip:
        calls.append(partial(torch.addcmul, y, x, plan.through, out=y))
    calls.append(partial(results.copy_, y))
    return calls
