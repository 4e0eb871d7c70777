"""State-space models: short causal convolutions tap by tap, and the selective scan in chunks of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.operands import optional_operands
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor
from opweave_torch.native import out_function
from opweave_torch.tunables import limit

# --- causal convolution ---------------------------------------------------------------------------------------------


def _conv_arrays(step: Step) -> Arrays:
    dtype = widened(step.out.dtype)
    sums = {} if step.out.dtype is dtype else {"sums": (dtype, step.out.shape)}
    return {**conversion_arrays(dtype, step.srcs), **sums}


@KERNELS("causal_conv1d", workspace=_conv_arrays)
def causal_conv1d(stream: Stream, op: str, out: Arg, *srcs: Arg, biased: bool, **arrays: Arg) -> Call:
    (source, weights, *others), calls = converted(widened(out.dtype), srcs, arrays)
    bias, before = optional_operands(others, biased)
    total = tensor(arrays.get("sums", out))
    tokens, last = source.shape[2], weights.shape[1] - 1
    calls.append(partial(torch.mul, source, weights[:, last:], out=total))
    for j in range(last):
        factors, late = weights[:, j : j + 1], last - j
        if late < tokens:
            part = total[..., late:]
            calls.append(partial(torch.addcmul, part, source[..., : tokens - late], factors, out=part))
        if before is not None:
            count = min(late, tokens)
            part = total[..., :count]
            calls.append(partial(torch.addcmul, part, before[..., j : j + count], factors, out=part))
    if bias is not None:
        calls.append(partial(torch.add, total, bias.unsqueeze(1), out=total))
    if "sums" in arrays:
        calls.append(partial(tensor(out).copy_, total))
    return in_order(calls)


# --- selective scan -------------------------------------------------------------------------------------------------

CHUNK: Final = limit("scan_chunk", 1 << 22, 1, 1 << 26)
"""Elements of a chunk: the numbers of the state of so many tokens."""


def _scan_arrays(step: Step) -> Arrays:
    """The state after each token of a chunk, the state after the last token, and the operands of a chunk in the type to
    compute in. Axes are (tokens of a chunk, batch, groups, channels of a group, numbers of a state)."""
    u, _, _, b, *_ = step.srcs
    dtype = widened(step.out.dtype)
    batch, channels, tokens = u.shape
    groups, n = b.shape[1:3]
    by_group = (groups, channels // groups)
    chunk = max(1, min(tokens, CHUNK.value // (batch * channels * n)))
    channel_rows, state_rows = (chunk, batch, *by_group), (chunk, batch, groups, n)
    shapes = {
        "decay": (*channel_rows, n),
        "states": (*channel_rows, n),
        "steps": channel_rows,
        "inputs": channel_rows,
        "outputs": channel_rows,
        "reads": state_rows,
        "writes": state_rows,
        "last_state": (batch, *by_group, n),
        "rates": (*by_group, n),
        "through": by_group,
    }
    return {name: (dtype, shape) for name, shape in shapes.items()}


@KERNELS("selective_scan", workspace=_scan_arrays)
def selective_scan(
    stream: Stream, op: str, out: Arg, *srcs: Arg, softplus: bool, skip: bool, last: bool, **arrays: Arg
) -> Call:
    u, delta, a, b, c, *rest = srcs
    memory = {name: tensor(array) for name, array in arrays.items()}
    rates, through, last_state = [memory[name] for name in ("rates", "through", "last_state")]
    d, state = optional_operands(rest, skip)
    by_group, tokens, chunk = through.shape, u.shape[2], len(memory["decay"])
    inputs, deltas = [tensor(x).unflatten(1, by_group).movedim(-1, 0) for x in (u, delta)]
    reads, writes = [tensor(x).movedim(-1, 0) for x in (b, c)]
    flat = tensor(out).view(-1) if last else None
    results = tensor(out) if flat is None else flat[: u.size].view(u.shape)
    results = results.unflatten(1, by_group).movedim(-1, 0)
    calls: list[Call] = [partial(rates.copy_, tensor(a).unflatten(0, by_group))]
    if d is not None:
        calls.append(partial(through.copy_, tensor(d).unflatten(0, by_group)))
    if state is None:
        calls.append(last_state.zero_)
    else:
        calls.append(partial(last_state.copy_, tensor(state).unflatten(1, by_group)))
    for first in range(0, tokens, chunk):
        ts = slice(first, min(first + chunk, tokens))
        calls += _bind_chunk(memory, inputs[ts], deltas[ts], reads[ts], writes[ts], results[ts], softplus, skip)
    if flat is not None:
        calls.append(partial(flat[u.size :].view(last_state.shape).copy_, last_state))
    return in_order(calls)


def _bind_chunk(
    memory: Mapping[str, Tensor],
    u: Tensor,
    delta: Tensor,
    b: Tensor,
    c: Tensor,
    results: Tensor,
    softplus: bool,
    skip: bool,
) -> list[Call]:
    """The calls that compute the states and results of some tokens, whose axis is the first one of all operands."""
    names = ("decay", "states", "steps", "inputs", "outputs", "reads", "writes")
    decay, states, step, x, y, read, write = [memory[name][: len(u)] for name in names]
    last_state = memory["last_state"]
    calls: list[Call] = [partial(step.copy_, delta)]
    if softplus:
        calls.append(partial(out_function("softplus"), step, 1, 50, out=step))
    calls += [
        partial(x.copy_, u),
        partial(read.copy_, b),
        partial(write.copy_, c),
        partial(torch.mul, step.unsqueeze(-1), memory["rates"], out=decay),
        partial(torch.exp, decay, out=decay),
        partial(torch.mul, step, x, out=y),
        partial(torch.mul, y.unsqueeze(-1), read.unsqueeze(-2), out=states),
    ]
    before = last_state
    for state, factor in zip(states, decay, strict=True):
        calls.append(partial(torch.addcmul, state, factor, before, out=state))
        before = state
    calls += [
        partial(last_state.copy_, before),
        partial(torch.matmul, states, write.unsqueeze(-1), out=y.unsqueeze(-1)),
    ]
    if skip:
        calls.append(partial(torch.addcmul, y, x, memory["through"], out=y))
    calls.append(partial(results.copy_, y))
    return calls
