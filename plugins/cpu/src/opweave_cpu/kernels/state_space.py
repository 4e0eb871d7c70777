"""State-space models: short causal convolutions, and the selective scan in chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.operands import optional_operands
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, compute_dtype, constant, in_turn, window, worker_scratch
from opweave_cpu.tunables import TILE, limit
from opweave_cpu.workers import Cut, bind_workers, cuts_of, worker_count

# --- causal convolution ---------------------------------------------------------------------------------------------


def _conv_jobs(out: Arg) -> list[tuple[int, Cut]]:
    elements = TILE.value // compute_dtype(out.dtype).itemsize
    return cuts_of(out.shape[0], out.shape[1:2], max(1, elements // out.shape[2]))


def _conv_workspace(step: Step) -> Arrays:
    """The products of a tile with one column of the weights; of half types also its sums, and the weights widened."""
    out, w, dtype = step.out, step.srcs[1], compute_dtype(step.out.dtype)
    jobs = _conv_jobs(out)
    tile = max(cut.stop - cut.start for _, (cut,) in jobs) * out.shape[2]
    workers, half = worker_count(len(jobs), out.size * w.shape[1]), out.dtype.is_half
    arrays = worker_scratch(workers, dtype, products=tile, sums=tile * half)
    # NumPy would round products of two half types to that type.
    return {**arrays, "wide": (dtype, w.shape)} if half else arrays


@KERNELS("causal_conv1d", workspace=_conv_workspace)
def causal_conv1d(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, *rest: Arg, biased: bool, products: Arg, **half: Arg
) -> Call:
    sums, wide = half.get("sums"), half.get("wide")
    source, weights, target = x.view, (wide or w).view, out.view
    bias, state = optional_operands([arg.view for arg in rest], biased)
    tokens, before = x.shape[2], w.shape[1] - 1

    def tile_calls(job: tuple[int, Cut], worker: int) -> Iterator[Call]:
        n, (channels,) = job
        result, inputs = target[n, channels], source[n, channels]
        part = window(products.view[worker], result.shape)
        total = result if sums is None else window(sums.view[worker], result.shape)
        yield partial(np.copyto, total, 0 if bias is None else bias[channels, None])
        for j in range(before + 1):
            factors, late = weights[channels, j : j + 1], before - j
            if late < tokens:
                term, sum_ = part[:, late:], total[:, late:]
                yield partial(np.multiply, inputs[:, : tokens - late], factors, term)
                yield partial(np.add, sum_, term, sum_)
            if state is not None and late:
                count = min(late, tokens)
                term, sum_ = part[:, :count], total[:, :count]
                yield partial(np.multiply, state[n, channels, j : j + count], factors, term)
                yield partial(np.add, sum_, term, sum_)
        if total is not result:
            yield partial(np.copyto, result, total, "unsafe")

    call = bind_workers(stream, _conv_jobs(out), products.shape[0], tile_calls)
    return call if wide is None else in_turn([partial(np.copyto, weights, w.view), call])


# --- selective scan -------------------------------------------------------------------------------------------------

STATES: Final = limit("scan_states", 1 << 13, 1, 1 << 18)
"""Elements of the state that one pass updates: such a pass takes several times as long as calling it."""

CHUNK: Final = limit("scan_chunk", 1 << 17, 1, 1 << 22)
"""Elements of the states of all tokens of a chunk, which several passes find in the second-level cache."""


class _ScanTiling:
    """How a scan is cut: some channels of one group at a time, and for these some tokens at a time."""

    def __init__(self, u: Arg, a: Arg, b: Arg) -> None:
        self.dtype = compute_dtype(u.dtype)
        batch, channels, tokens = u.shape
        n, groups = a.shape[1], b.shape[1]
        each = channels // groups
        some = min(each, max(1, STATES.value // n))
        self.tokens = min(tokens, max(1, CHUNK.value // (some * n)))
        self.jobs = [
            (i, g, slice(g * each + c, g * each + min(c + some, each)))
            for i in range(batch)
            for g in range(groups)
            for c in range(0, each, some)
        ]
        self.workers = worker_count(len(self.jobs), 8 * u.size * n)
        self.scratch = worker_scratch(
            self.workers,
            self.dtype,
            **dict.fromkeys(("decays", "states"), self.tokens * some * n),
            **dict.fromkeys(("steps", "inputs", "results"), self.tokens * some),
            **dict.fromkeys(("reads", "writes"), self.tokens * n),
            state=some * n,
            rates=some * n * (a.dtype is not self.dtype),
        )


def _scan_workspace(step: Step) -> Arrays:
    u, _, a, b, *_ = step.srcs
    return _ScanTiling(u, a, b).scratch


@KERNELS("selective_scan", workspace=_scan_workspace)
def selective_scan(
    stream: Stream, op: str, out: Arg, *srcs: Arg, softplus: bool, skip: bool, last: bool, **scratch: Arg
) -> Call:
    u, delta, a, b, c, *rest = srcs
    plan = _ScanTiling(u, a, b)
    inputs, deltas, rates, reads, writes = u.view, delta.view, a.view, b.view, c.view
    through, state = optional_operands([arg.view for arg in rest], skip)
    size, flat = u.size, out.view.reshape(-1)
    results = flat[:size].reshape(u.shape)
    states = flat[size:].reshape(u.shape[0], *a.shape) if last else None
    tokens, n = u.shape[2], a.shape[1]
    zero, dtype = constant(0, plan.dtype), plan.dtype.numpy

    def tile_calls(job: tuple[int, int, slice], worker: int) -> Iterator[Call]:
        i, g, channels = job
        some = channels.stop - channels.start

        def own(name: str, *shape: int) -> Array:
            return window(scratch[name].view[worker], shape)

        rate, h = rates[channels], own("state", some, n)
        if rate.dtype != dtype:
            rate = own("rates", some, n)
            yield partial(np.copyto, rate, rates[channels])
        before = h if state is None or state.dtype != dtype else state[i, channels]
        if before is h:
            yield partial(np.copyto, h, zero if state is None else state[i, channels])
        for first in range(0, tokens, plan.tokens):
            ts = slice(first, min(first + plan.tokens, tokens))
            count = ts.stop - first
            decay, hs = own("decays", count, some, n), own("states", count, some, n)
            steps, xs, grown = (own(name, count, some) for name in ("steps", "inputs", "results"))
            # Tokens become the first axis. One token of the right type is read, and its result written, where it lies.
            operands = [deltas[i, channels, ts].T, inputs[i, channels, ts].T]
            operands += [reads[i, g, :, ts].T, writes[i, g, :, ts].T]
            result = results[i, channels, ts].T
            y = result if count == 1 and result.dtype == dtype else grown
            yield from _packed(operands, (steps, xs, own("reads", count, n), own("writes", count, n)))
            step, x, read, write = operands
            if softplus:
                yield partial(np.logaddexp, step, zero, steps)
                step = steps
            yield partial(np.multiply, step[:, :, None], rate, decay)
            yield partial(np.exp, decay, decay)
            yield partial(np.multiply, x, step, grown)
            yield partial(np.multiply, grown[:, :, None], read[:, None], hs)
            # From token to token: what is left of the state before is added to what flows in, which `hs` holds.
            yield from _passed_on(before, decay, hs)
            yield partial(np.matmul, hs, write[:, :, None], y[:, :, None])
            if through is not None:
                yield partial(np.multiply, x, through[channels], xs)
                yield partial(np.add, y, xs, y)
            if y is not result:
                yield partial(np.copyto, result, y, "unsafe")
            if ts.stop < tokens:
                yield partial(np.copyto, h, hs[-1])
                before = h
            elif states is not None:
                yield partial(np.copyto, states[i, channels], hs[-1], "unsafe")

    return bind_workers(stream, plan.jobs, plan.workers, tile_calls)


def _packed(operands: list[Array], into: Sequence[Array]) -> Iterator[Call]:
    """Copies operands of several tokens or of another type, and puts the copies in their place."""
    for k, (values, packed) in enumerate(zip(operands, into, strict=True)):
        if len(values) > 1 or values.dtype != packed.dtype:
            yield partial(np.copyto, packed, values)
            operands[k] = packed


def _passed_on(before: Array, decay: Array, hs: Array) -> Iterator[Call]:
    if len(hs) == 1:
        yield partial(np.multiply, decay, before, decay)
        yield partial(np.add, hs, decay, hs)
    else:
        yield partial(_pass_on, before, decay, hs)


def _pass_on(before: Array, decay: Array, hs: Array) -> None:
    for now, factor in zip(hs, decay, strict=True):
        np.multiply(factor, before, factor)
        np.add(now, factor, now)
        before = now
