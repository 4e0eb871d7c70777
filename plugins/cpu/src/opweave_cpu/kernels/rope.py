"""Rotary position embedding and timestep embedding. Angles are computed in f64: they are large, and cosine and sine
depend on their remainder of 2π alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape, dense_strides
from opweave.ops.rope import distinct_positions, pair_slices, rope_frequencies, section_parts
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array, aligned, compute_dtype, copies, in_turn, stretches, window
from opweave_cpu.tunables import TILE
from opweave_cpu.workers import Cut, bind_workers, full_cuts, worker_count

_F64: Final = as_dtype("f64")


class _RotationTiling:
    """How x is cut, and the tables of cosines and sines: one row for each position that is not a repeated one."""

    def __init__(self, x: Arg, positions: Arg, half: int, sections: tuple[int, ...]) -> None:
        dtype = compute_dtype(x.dtype)
        self.lead = distinct_positions(positions.shape, positions.strides, sections)
        self.count = prod(self.lead[1:] if sections else self.lead)
        self.chunk = min(self.count, max(1, TILE.value // (_F64.itemsize * half)))
        rows = max(1, TILE.value // (dtype.itemsize * half))
        self.jobs = full_cuts(x.shape[:-1], rows)
        self.workers = worker_count(len(self.jobs), 6 * x.size)
        self.converts = x.dtype is not dtype
        tile = aligned(min(rows, x.size // x.shape[-1]) * half, dtype)
        self.scratch = {
            "cos": (dtype, (self.count, half)),
            "sin": (dtype, (self.count, half)),
            "angles": (_F64, (self.chunk, half)),
            "wide_positions": (_F64, self.lead),
            "tiles": (dtype, (self.workers, 4 if self.converts else 2, tile)),
        }


def _workspace(step: Step) -> Arrays:
    x, positions, *_ = step.srcs
    return _RotationTiling(x, positions, step.attrs["dims"] // 2, step.attrs["sections"]).scratch


@KERNELS("rope", inplace=True, workspace=_workspace)
def rope(stream: Stream, op: str, out: Arg, x: Arg, positions: Arg, factors: Arg | None = None, **given: Any) -> Call:
    pairing, dims, sections, turns = [given.pop(name) for name in ("pairing", "dims", "sections", "interleaved")]
    half = dims // 2
    plan = _RotationTiling(x, positions, half, sections)
    cos, sin, angles, wide_positions, tiles = [given.pop(name) for name in plan.scratch]
    frequencies = given
    stored = positions.view[tuple([slice(n) for n in plan.lead])]
    rows = wide_positions.view.reshape(len(sections) or 1, -1)
    parts = section_parts(sections, turns, half)
    lead = plan.lead[1:] if sections else plan.lead
    cosines, sines = [np.broadcast_to(t.view.reshape(*lead, half), (*x.shape[:-1], half)) for t in (cos, sin)]
    first, second = pair_slices(pairing, dims)
    source, target = x.view, out.view
    apart = not plan.converts and not np.may_share_memory(source, target)

    def table_calls(steps: Array, magnitude: float) -> Iterator[Call]:
        compiled = _compiled_tables(stream, positions, bool(sections), lead, parts, steps, magnitude, cos, sin)
        if compiled is not None:
            yield from compiled
            return
        yield partial(np.copyto, wide_positions.view, stored)
        yield from _table_calls(parts, rows, steps, magnitude, cos.view, sin.view, angles.view)

    def rotation_calls(cut: Cut, worker: int) -> Iterator[Call]:
        c, s = cosines[cut], sines[cut]
        t, *others = [window(tile, c.shape) for tile in tiles.view[worker]]
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
        yield from copies((to_a, sum_a), (to_b, sum_b))
        if x.shape[-1] > dims:
            yield partial(np.copyto, outputs[..., dims:], inputs[..., dims:])

    tables = [_repeated_rows(t, (*lead, half), x.shape) for t in (cos, sin)]
    pairs = [_part(arg, part) for arg in (x, out) for part in (first, second)]
    rotate = stream.rotate([*pairs[:2], *tables, *pairs[2:]]) if isinstance(stream, CpuStream) else None
    if rotate is None:
        rotate = bind_workers(stream, plan.jobs, plan.workers, rotation_calls)
    elif x.shape[-1] > dims:
        rotate = in_turn([rotate, partial(np.copyto, target[..., dims:], source[..., dims:])])
    if factors is None:
        return in_turn([*table_calls(*rope_frequencies(dims, **frequencies)), rotate])
    scales = factors.view

    def run() -> None:
        for call in table_calls(*rope_frequencies(dims, factors=scales, **frequencies)):
            call()
        rotate()

    return run


def _table_calls(
    parts: Sequence[tuple[int, slice]],
    rows: Array,
    steps: Array,
    magnitude: float,
    cos: Array,
    sin: Array,
    angles: Array,
) -> Iterator[Call]:
    """NumPy's calls that compute the tables, as many angles at a time as there is room for."""
    for some in stretches(len(cos), len(angles)):
        angle = angles[: some.stop - some.start]
        for row, part in parts:
            yield partial(np.multiply, rows[row, some, None], steps[part], angle[:, part])
        yield partial(np.cos, angle, cos[some])
        yield partial(np.sin, angle, sin[some])
    if magnitude != 1:
        yield partial(np.multiply, cos, magnitude, cos)
        yield partial(np.multiply, sin, magnitude, sin)


def _compiled_tables(
    stream: Stream,
    positions: Arg,
    has_sections: bool,
    lead: Shape,
    parts: Sequence[tuple[int, slice]],
    steps: Array,
    magnitude: float,
    cos: Arg,
    sin: Arg,
) -> Sequence[Call] | None:
    """The calls that compute the tables of cosines and sines, one for each part of the pairs, where they are
    compiled."""
    if not isinstance(stream, CpuStream):
        return None
    apart, *strides = positions.strides if has_sections else (0, *positions.strides)
    shape = (*lead, steps.size)
    tables = [Arg(t.buffer, t.offset, t.dtype, shape, dense_strides(shape, t.dtype)) for t in (cos, sin)]
    found: list[Call] = []
    for row, part in parts:
        some, start = steps[part], positions.offset + row * apart
        at = Arg(positions.buffer, start, positions.dtype, (*lead, some.size), (*strides, 0))
        call = stream.cos_and_sin(at, some.tolist(), magnitude, *[_part(table, part) for table in tables])
        if call is None:
            return None
        found.append(call)
    return found


def _part(arg: Arg, part: slice) -> Arg:
    """A slice of the last axis."""
    step = part.step or 1
    length, stride = len(range(part.start, part.stop, step)), arg.strides[-1]
    shape, strides = (*arg.shape[:-1], length), (*arg.strides[:-1], step * stride)
    return Arg(arg.buffer, arg.offset + part.start * stride, arg.dtype, shape, strides)


def _repeated_rows(table: Arg, shape: tuple[int, ...], of: tuple[int, ...]) -> Arg:
    """A dense table in another shape, repeated along the axes of ``of`` that it lacks."""
    lead = (1,) * (len(of) - len(shape)) + shape
    strides = [0 if n == 1 else s for n, s in zip(lead, dense_strides(lead, table.dtype), strict=True)]
    return Arg(table.buffer, table.offset, table.dtype, (*of[:-1], shape[-1]), tuple(strides))


# --- timestep embedding -----------------------------------------------------------------------------------------------


def _timestep_workspace(step: Step) -> Arrays:
    half = _F64, (step.out.shape[0], step.attrs["dim"] // 2)
    return {"angles": half, "values": half}


@KERNELS("timestep_embedding", workspace=_timestep_workspace)
def timestep_embedding(
    stream: Stream, op: str, out: Arg, t: Arg, *, dim: int, max_period: float, angles: Arg, values: Arg
) -> Call:
    half = dim // 2
    frequencies = max_period ** -(np.arange(half) / half)
    times, target, phases, wide = t.view[:, None], out.view, angles.view, values.view

    def run() -> None:
        np.copyto(phases, times)
        np.multiply(phases, frequencies, phases)
        np.cos(phases, wide)
        np.copyto(target[:, :half], wide, "unsafe")
        np.sin(phases, wide)
        np.copyto(target[:, half : 2 * half], wide, "unsafe")
        target[:, 2 * half :] = 0

    return run
