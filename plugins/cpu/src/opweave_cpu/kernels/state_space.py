"""State-space models: short causal convolutions, and the selective scan in chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.ops.operands import optional_operands
from opweave_cpu.kernels.table import FLOATS, KERNELS
from opweave_cpu.lanes import Cut, Rooms, bind_lanes, cuts_of, lane_count
from opweave_cpu.tiles import TILE, Array, compute_dtype, constant, in_turn

# --- causal convolution ---------------------------------------------------------------------------------------------


def _conv_jobs(out: Arg) -> list[tuple[int, Cut]]:
    elements = TILE // compute_dtype(out.dtype).itemsize
    return cuts_of(out.shape[0], out.shape[1:2], max(1, elements // out.shape[2]))


def _conv_rooms(out: Arg, w: Arg) -> Rooms:
    dtype, jobs = compute_dtype(out.dtype), _conv_jobs(out)
    tile = max(cut.stop - cut.start for _, (cut,) in jobs) * out.shape[2]
    half = out.dtype.is_half
    shared = [(w.size, dtype)] if half else []
    return Rooms(lane_count(len(jobs), out.size * w.shape[1]), [(tile, dtype)] * (1 + half), shared)


def _conv_workspace(step: Step) -> int:
    return _conv_rooms(step.out, step.srcs[1]).nbytes


@KERNELS("causal_conv1d", dtypes=FLOATS, workspace=_conv_workspace)
def causal_conv1d(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, *rest: Arg, biased: bool, workspace: Arg | None
) -> Call:
    source, weights, target = x.view, w.view, out.view
    rooms = _conv_rooms(out, w)
    wide = rooms.shared(workspace)
    if wide:
        # The product of two half types is rounded to one.
        weights = wide[0].reshape(w.shape)
    bias, state = optional_operands([arg.view for arg in rest], biased)
    tokens, before = x.shape[2], w.shape[1] - 1

    def tile_calls(job: tuple[int, Cut], rooms: list[Array]) -> Iterator[Call]:
        n, (channels,) = job
        result, inputs = target[n, channels], source[n, channels]
        part = rooms[0][: result.size].reshape(result.shape)
        total = rooms[1][: result.size].reshape(result.shape) if len(rooms) > 1 else result
        yield partial(np.copyto, total, 0 if bias is None else bias[channels, None])
        for j in range(before + 1):
            factors, late = weights[channels, j : j + 1], before - j
            if late < tokens:
                piece, sum_ = part[:, late:], total[:, late:]
                yield partial(np.multiply, inputs[:, : tokens - late], factors, piece)
                yield partial(np.add, sum_, piece, sum_)
            if state is not None and late:
                count = min(late, tokens)
                piece, sum_ = part[:, :count], total[:, :count]
                yield partial(np.multiply, state[n, channels, j : j + count], factors, piece)
                yield partial(np.add, sum_, piece, sum_)
        if total is not result:
            yield partial(np.copyto, result, total, "unsafe")

    call = bind_lanes(stream, _conv_jobs(out), rooms, workspace, tile_calls)
    return in_turn([partial(np.copyto, weights, w.view), call]) if wide else call


# --- selective scan -------------------------------------------------------------------------------------------------

STATES: Final = 1 << 13
"""Numbers of the state that one pass steps on: as long as several calls of a pass."""

CHUNK: Final = 1 << 17
"""Elements of a chunk: the numbers of the state of so many tokens."""


class _Scan:
    """How a scan is cut: some channels of one group at a time, and for these some tokens at a time."""

    def __init__(self, u: Arg, a: Arg, b: Arg) -> None:
        self.dtype = compute_dtype(u.dtype)
        batch, channels, tokens = u.shape
        n, groups = a.shape[1], b.shape[1]
        each = channels // groups
        some = min(each, max(1, STATES // n))
        self.tokens = min(tokens, max(1, CHUNK // (some * n)))
        self.jobs = [
            (i, g, slice(g * each + c, g * each + min(c + some, each)))
            for i in range(batch)
            for g in range(groups)
            for c in range(0, each, some)
        ]
        chunk, rows, columns = self.tokens * some * n, self.tokens * some, self.tokens * n
        sizes = [chunk, chunk, rows, rows, rows, columns, columns, some * n, some * n * (a.dtype is not self.dtype)]
        lanes = lane_count(len(self.jobs), 8 * u.size * n)
        self.rooms = Rooms(lanes, [(size, self.dtype) for size in sizes])


def _scan_workspace(step: Step) -> int:
    u, _, a, b, *_ = step.srcs
    return _Scan(u, a, b).rooms.nbytes


@KERNELS("selective_scan", dtypes=FLOATS, workspace=_scan_workspace)
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
    workspace: Arg | None,
) -> Call:
    plan = _Scan(u, a, b)
    inputs, deltas, rates, reads, writes = u.view, delta.view, a.view, b.view, c.view
    through, state = optional_operands([arg.view for arg in rest], skip)
    size, flat = u.size, out.view.reshape(-1)
    results = flat[:size].reshape(u.shape)
    states = flat[size:].reshape(u.shape[0], *a.shape) if last else None
    tokens, n = u.shape[2], a.shape[1]
    zero, dtype = constant(0, plan.dtype), plan.dtype.numpy

    def tile_calls(job: tuple[int, int, slice], rooms: list[Array]) -> Iterator[Call]:
        i, g, channels = job
        some = channels.stop - channels.start
        rate, h = rates[channels], rooms[7][: some * n].reshape(some, n)
        if rate.dtype != dtype:
            rate = rooms[8][: some * n].reshape(some, n)
            yield partial(np.copyto, rate, rates[channels])
        before = h if state is None or state.dtype != dtype else state[i, channels]
        if before is h:
            yield partial(np.copyto, h, zero if state is None else state[i, channels])
        for first in range(0, tokens, plan.tokens):
            ts = slice(first, min(first + plan.tokens, tokens))
            count = ts.stop - first
            decay, hs = [room[: count * some * n].reshape(count, some, n) for room in rooms[:2]]
            room_of = [room[: count * some].reshape(count, some) for room in rooms[2:5]]
            room_of += [room[: count * n].reshape(count, n) for room in rooms[5:7]]
            # Token by token. One token of the right type is read, and its result written, where it lies.
            operands = [deltas[i, channels, ts].T, inputs[i, channels, ts].T]
            operands += [reads[i, g, :, ts].T, writes[i, g, :, ts].T]
            result = results[i, channels, ts].T
            y = result if count == 1 and result.dtype == dtype else room_of[2]
            for k, (values, room) in enumerate(zip(operands, [*room_of[:2], *room_of[3:]], strict=True)):
                if count > 1 or values.dtype != dtype:
                    yield partial(np.copyto, room, values)
                    operands[k] = room
            step, x, read, write = operands
            if softplus:
                yield partial(np.logaddexp, step, zero, room_of[0])
                step = room_of[0]
            yield partial(np.multiply, step[:, :, None], rate, decay)
            yield partial(np.exp, decay, decay)
            grown = room_of[2]
            yield partial(np.multiply, x, step, grown)
            yield partial(np.multiply, grown[:, :, None], read[:, None], hs)
            # From token to token: what is left of the state before is added to what flows in, which `hs` holds.
            if count == 1:
                yield partial(np.multiply, decay, before, decay)
                yield partial(np.add, hs, decay, hs)
            else:
                yield partial(_pass_on, before, decay, hs)
            yield partial(np.matmul, hs, write[:, :, None], y[:, :, None])
            if through is not None:
                yield partial(np.multiply, x, through[channels], room_of[1])
                yield partial(np.add, y, room_of[1], y)
            if y is not result:
                yield partial(np.copyto, result, y, "unsafe")
            if ts.stop < tokens:
                yield partial(np.copyto, h, hs[-1])
                before = h
            elif states is not None:
                yield partial(np.copyto, states[i, channels], hs[-1], "unsafe")

    return bind_lanes(stream, plan.jobs, plan.rooms, workspace, tile_calls)


def _pass_on(before: Array, decay: Array, hs: Array) -> None:
    for now, factor in zip(hs, decay, strict=True):
        np.multiply(factor, before, factor)
        np.add(now, factor, now)
        before = now
