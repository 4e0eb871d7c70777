"""Linear attention: the recurrence, token by token, over all heads at once."""

from __future__ import annotations

from functools import partial

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.linear_attention import linear_attention_operands
from opweave_torch.kernels.binding import in_order, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor


def _arrays(step: Step) -> Arrays:
    """The states, a row of each head, how strongly tokens read their own values, the result; and operands packed, as
    products need them, where they are of another type or layout."""
    q, _, v, *_ = step.srcs
    batch, heads, _, size = q.shape
    dtype, width = widened(step.out.dtype), v.shape[3]
    arrays: Arrays = {
        "states": (dtype, (batch, heads, size, width)),
        "row": (dtype, (batch * heads, 1, width)),
        "weights": (dtype, q.shape),
        "factors": (dtype, (*q.shape[:3], 1)),
        "result": (dtype, v.shape),
    }
    packed = {
        f"packed{i}": (dtype, arg.shape)
        for i, arg in enumerate(step.srcs)
        if arg.dtype is not dtype or not arg.is_dense
    }
    return {**arrays, **packed}


@KERNELS("linear_attention", workspace=_arrays)
def linear_attention(
    stream: Stream,
    op: str,
    out: Arg,
    *srcs: Arg,
    decay: bool,
    bonus: bool,
    removal: bool,
    state: bool,
    last: bool,
    **arrays: Arg,
) -> Call:
    memory = {name: tensor(array) for name, array in arrays.items()}
    operands = [memory.get(f"packed{i}", tensor(arg)) for i, arg in enumerate(srcs)]
    calls: list[Call] = [
        partial(operands[i].copy_, tensor(arg)) for i, arg in enumerate(srcs) if f"packed{i}" in memory
    ]
    q, k, v, *rest = operands
    w, u, a, b, before = linear_attention_operands(rest, decay, bonus, removal, state)
    states, row, result = memory["states"], memory["row"], memory["result"]
    calls.append(states.zero_ if before is None else partial(states.copy_, before))
    if u is not None:
        weights, factors = memory["weights"], memory["factors"]
        calls.append(partial(torch.mul, q, u.unsqueeze(1), out=weights))
        calls.append(partial(torch.mul, weights, k, out=weights))
        calls.append(partial(torch.sum, weights, -1, keepdim=True, out=factors))
        calls.append(partial(torch.mul, v, factors, out=result))
    s = states.view(-1, *states.shape[2:])
    # Of each operand the rows of a token, (batch · heads, 1, size), and the same as columns.
    of_q, of_k, of_v, of_y = [_rows(x) for x in (q, k, v, result)]
    of_w, of_a, of_b = [None if x is None else _rows(x) for x in (w, a, b)]
    for t in range(q.shape[2]):
        if u is not None:
            calls.append(partial(torch.baddbmm, of_y[t], of_q[t], s, out=of_y[t]))
        if of_a is not None:
            calls.append(partial(torch.bmm, of_a[t], s, out=row))
        if of_w is not None:
            calls.append(partial(torch.mul, s, of_w[t].mT, out=s))
        if of_b is not None:
            calls.append(partial(torch.baddbmm, s, of_b[t].mT, row, out=s))
        calls.append(partial(torch.baddbmm, s, of_k[t].mT, of_v[t], out=s))
        if u is None:
            calls.append(partial(torch.bmm, of_q[t], s, out=of_y[t]))
    flat = tensor(out).view(-1) if last else None
    stored = tensor(out) if flat is None else flat[: v.numel()].view(v.shape)
    calls.append(partial(stored.copy_, result))
    if flat is not None:
        calls.append(partial(flat[v.numel() :].view(states.shape).copy_, states))
    return in_order(calls)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = x.view(-1, *x.shape[2:]).split(1, 1)
    return parts
