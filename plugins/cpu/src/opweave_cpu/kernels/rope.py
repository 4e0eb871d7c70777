"""Rotary position embedding and waves. Angles are computed in f64: positions are large, and only their rest counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import as_dtype
from opweave.ops.rope import distinct_positions, pair_slices, rope_frequencies
from opweave_cpu.kernels.table import FLOATS, KERNELS
from opweave_cpu.lanes import Cut, Rooms, bind_lanes, full_cuts, lane_count
from opweave_cpu.tiles import TILE, Array, compute_dtype, in_turn, scratch_array

_F64: Final = as_dtype("f64")


class _Turning:
    """How x is cut, and the tables of cosines and sines: one row for each position that is not a repeated one."""

    def __init__(self, x: Arg, positions: Arg, half: int, sections: tuple[int, ...]) -> None:
        dtype = compute_dtype(x.dtype)
        self.lead = distinct_positions(positions.shape, positions.strides, sections)
        self.count = prod(self.lead[1:] if sections else self.lead)
        self.chunk = min(self.count, max(1, TILE // (_F64.itemsize * half)))
        rows = max(1, TILE // (dtype.itemsize * half))
        self.jobs = full_cuts(x.shape[:-1], rows)
        tile = (min(rows, x.size // x.shape[-1]) * half, dtype)
        shared = [(self.count * half, dtype)] * 2 + [(self.chunk * half, _F64), (prod(self.lead), _F64)]
        lanes = lane_count(len(self.jobs), 6 * x.size)
        self.converts = x.dtype is not dtype
        self.rooms = Rooms(lanes, [tile] * (2 + 2 * self.converts), shared)


def _workspace(step: Step) -> int:
    x, positions, *_ = step.srcs
    return _Turning(x, positions, step.attrs["dims"] // 2, step.attrs["sections"]).rooms.nbytes


@KERNELS("rope", dtypes=FLOATS, inplace=True, workspace=_workspace)
def rope(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    positions: Arg,
    factors: Arg | None = None,
    *,
    pairing: str,
    dims: int,
    sections: tuple[int, ...],
    workspace: Arg | None,
    **frequencies: Any,
) -> Call:
    half = dims // 2
    plan = _Turning(x, positions, half, sections)
    cos, sin, angles, places = plan.rooms.shared(workspace)
    cos, sin = cos.reshape(-1, half), sin.reshape(-1, half)
    stored = positions.view[tuple([slice(n) for n in plan.lead])]
    places = places.reshape(plan.lead)
    rows = places.reshape(len(sections) or 1, -1)
    parts = _columns(sections or (half,))
    lead = plan.lead[1:] if sections else plan.lead
    cosines, sines = [np.broadcast_to(t.reshape(*lead, half), (*x.shape[:-1], half)) for t in (cos, sin)]
    first, second = pair_slices(pairing, dims)
    source, target = x.view, out.view
    apart = not plan.converts and not np.may_share_memory(source, target)

    def table_calls(turns: Array, magnitude: float) -> Iterator[Call]:
        yield partial(np.copyto, places, stored)
        for start in range(0, plan.count, plan.chunk):
            some = slice(start, min(start + plan.chunk, plan.count))
            angle = angles[: (some.stop - start) * half].reshape(-1, half)
            for row, part in zip(rows, parts, strict=True):
                yield partial(np.multiply, row[some, None], turns[part], angle[:, part])
            yield partial(np.cos, angle, cos[some])
            yield partial(np.sin, angle, sin[some])
        if magnitude != 1:
            yield partial(np.multiply, cos, magnitude, cos)
            yield partial(np.multiply, sin, magnitude, sin)

    def turn_calls(cut: Cut, rooms: list[Array]) -> Iterator[Call]:
        c, s = cosines[cut], sines[cut]
        t, *others = [room[: c.size].reshape(c.shape) for room in rooms if len(room)]
        inputs, outputs = source[cut], target[cut]
        a, b = inputs[..., first], inputs[..., second]
        to_a, to_b = outputs[..., first], outputs[..., second]
        if plan.converts:
            u, wide_a, wide_b = others
            yield partial(np.copyto, wide_a, a)
            yield partial(np.copyto, wide_b, b)
            a, b, sum_a, sum_b = wide_a, wide_b, u, wide_b
        else:
            sum_a, sum_b = to_a if apart else others[0], to_b
        yield partial(np.multiply, a, c, sum_a)
        yield partial(np.multiply, b, s, t)
        yield partial(np.subtract, sum_a, t, sum_a)
        yield partial(np.multiply, b, c, sum_b)
        yield partial(np.multiply, a, s, t)
        yield partial(np.add, sum_b, t, sum_b)
        for to, sum_ in ((to_a, sum_a), (to_b, sum_b)):
            if sum_ is not to:
                yield partial(np.copyto, to, sum_, "unsafe")
        if x.shape[-1] > dims:
            yield partial(np.copyto, outputs[..., dims:], inputs[..., dims:])

    turn = bind_lanes(stream, plan.jobs, plan.rooms, workspace, turn_calls)
    if factors is None:
        return in_turn([*table_calls(*rope_frequencies(dims, **frequencies)), turn])
    scales = factors.view

    def run() -> None:
        for call in table_calls(*rope_frequencies(dims, factors=scales, **frequencies)):
            call()
        turn()

    return run


def _columns(sections: Sequence[int]) -> list[slice]:
    """Where the pairs of each section lie."""
    ends = np.cumsum(sections).tolist()
    return [slice(end - n, end) for n, end in zip(sections, ends, strict=True)]


# --- waves ----------------------------------------------------------------------------------------------------------


def _wave_workspace(step: Step) -> int:
    half: int = step.attrs["dim"] // 2
    return 2 * step.out.shape[0] * half * _F64.itemsize


@KERNELS("timestep_embedding", dtypes=FLOATS, workspace=_wave_workspace)
def timestep_embedding(
    stream: Stream, op: str, out: Arg, t: Arg, *, dim: int, max_period: float, workspace: Arg | None
) -> Call:
    count, half = t.shape[0], dim // 2
    angles = scratch_array(workspace, count * half, _F64).reshape(count, half)
    waves = scratch_array(workspace, count * half, _F64, angles.nbytes).reshape(count, half)
    frequencies = max_period ** -(np.arange(half) / half)
    times, target = t.view[:, None], out.view

    def run() -> None:
        np.copyto(angles, times)
        np.multiply(angles, frequencies, angles)
        np.cos(angles, waves)
        np.copyto(target[:, :half], waves, "unsafe")
        np.sin(angles, waves)
        np.copyto(target[:, half : 2 * half], waves, "unsafe")
        target[:, 2 * half :] = 0

    return run
