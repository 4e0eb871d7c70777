"""Resampling, axis by axis, tap by tap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave.graph.layout import is_dense
from opweave.ops.interpolation import axis_taps, tap_kind
from opweave_cpu.jit.compiler import has_fma, why_not
from opweave_cpu.kernels.table import HALVES, KERNELS, PLAIN, needs_dense_output
from opweave_cpu.tiles import Array, aligned, compute_dtype, in_turn, window
from opweave_cpu.tunables import TILE, limit
from opweave_cpu.workers import Cut, bind_workers, cuts_of, worker_count

if TYPE_CHECKING:
    from opweave_cpu.jit.resampling import Taps


# --- compiled -------------------------------------------------------------------------------------------------------


def _taps(out: Arg, x: Arg, attrs: Mapping[str, Any]) -> tuple[list[Taps], DType]:
    """The taps of each axis but the first two, and the type of their weights."""
    from opweave_cpu.jit.resampling import tables

    dtype, factors = compute_dtype(out.dtype), attrs["scale_factor"] or (0.0,) * (len(x.shape) - 2)
    found = []
    for length, size, factor in zip(x.shape[2:], out.shape[2:], factors, strict=True):
        as_it_is = length == size and factor in (0.0, 1.0)
        kind = "nearest" if as_it_is else tap_kind(attrs["mode"])
        found.append(axis_taps(length, size, factor, kind, attrs["align_corners"]))
    return tables(found, dtype.numpy), dtype


def _why_not_compiled(step: Step) -> str | None:
    if step.attrs["mode"] == "nearest":
        return "it is of elements as they are"
    reason = why_not() or needs_dense_output(step)
    if reason is not None:
        return reason
    from opweave_cpu.jit.resampling import fits

    return None if fits(step) and has_fma() else "it takes rows that lie side by side and fit the first-level cache"


def _taps_workspace(step: Step) -> Arrays:
    """The taps of all axes: each run writes them there."""
    taps, dtype = _taps(step.out, step.srcs[0], step.attrs)
    size = sum(own.places.size for own in taps)
    return {"places": ("i32", (size,)), "weights": (dtype, (size,))}


@KERNELS("interpolate", dtypes=f"f32 f64 {HALVES}", when=_why_not_compiled, workspace=_taps_workspace)
def resample(stream: Stream, op: str, out: Arg, x: Arg, *, places: Arg, weights: Arg, **attrs: Any) -> Call:
    from opweave_cpu.jit.resampling import bind_resampling

    taps, _ = _taps(out, x, attrs)
    values = [np.concatenate([own[i].reshape(-1) for own in taps]) for i in (0, 1)]
    store = [partial(np.copyto, arg.view, value) for arg, value in zip((places, weights), values, strict=True)]
    return in_turn([*store, bind_resampling(stream, out, x, taps, places, weights)])


# --- by NumPy -------------------------------------------------------------------------------------------------------


class _ResamplingTiling:
    """What is resampled in which order, and how it is cut: some channels at a time."""

    def __init__(self, out: Arg, x: Arg, attrs: Mapping[str, Any]) -> None:
        mode, factors = attrs["mode"], attrs["scale_factor"]
        self.dtype: DType = out.dtype if mode == "nearest" else compute_dtype(out.dtype)
        self.axes = []
        sizes = [prod(x.shape[2:])]
        lengths = list(x.shape[2:])
        for axis in reversed(range(len(lengths))):
            length, size = lengths[axis], out.shape[2 + axis]
            factor = factors[axis] if factors else 0.0
            if length == size and factor in (0.0, 1.0):
                continue
            self.axes.append((axis + 1, axis_taps(length, size, factor, tap_kind(mode), attrs["align_corners"])))
            lengths[axis] = size
            sizes.append(prod(lengths))
        self.packs = x.dtype is not self.dtype or not is_dense(x.shape[1:], x.strides[1:], x.dtype)
        channels = max(1, TILE.value // (self.dtype.itemsize * max(sizes)))
        self.jobs = cuts_of(x.shape[0], (x.shape[1],), channels)
        self.workers = worker_count(len(self.jobs), 4 * out.size)
        tile = aligned(min(channels, x.shape[1]) * max(sizes), self.dtype)
        self.scratch = {"tiles": (self.dtype, (self.workers, 3, tile))}


def _workspace(step: Step) -> Arrays:
    return _ResamplingTiling(step.out, step.srcs[0], step.attrs).scratch


def _is_nearest_or_float(step: Step) -> str | None:
    if step.attrs["mode"] == "nearest" or step.out.dtype.is_float:
        return needs_dense_output(step)
    return f"{step.out.dtype} is no float type"


@KERNELS("interpolate", dtypes=PLAIN, when=_is_nearest_or_float, workspace=_workspace)
def interpolate(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg, **attrs: Any) -> Call:
    plan = _ResamplingTiling(out, x, attrs)
    nearest, dtype = attrs["mode"] == "nearest", plan.dtype.numpy
    source, stored = x.view, out.view
    axes = [
        (
            axis,
            indices,
            weights.astype(dtype),
            None if nearest else _runs(indices, weights.astype(dtype), x.shape[axis + 1]),
        )
        for axis, (indices, weights) in plan.axes
    ]

    def tile_calls(job: tuple[int, Cut], worker: int) -> Iterator[Call]:
        own = tiles.view[worker]
        n, (channels,) = job
        target, now = stored[n, channels], source[n, channels]
        if plan.packs:
            packed = window(own[0], now.shape)
            yield partial(np.copyto, packed, now)
            now = packed
        for i, (axis, indices, weights, runs) in enumerate(axes):
            shape = (*now.shape[:axis], indices.shape[1], *now.shape[axis + 1 :])
            direct = i == len(axes) - 1 and target.dtype == dtype
            total = target if direct else window(own[1 - i % 2], shape)
            if nearest:
                yield partial(now.take, indices[0], axis, total, "clip")
            elif runs is None:
                yield from _add_taps(now, axis, indices, weights, total, window(own[2], shape))
            else:
                yield from _add_runs(now, axis, runs, total, own[2])
            now = total
        if now is not target:
            yield partial(np.copyto, target, now, "unsafe")

    return bind_workers(stream, plan.jobs, plan.workers, tile_calls)


def _along(weights: Array, x: Array, axis: int) -> Array:
    return weights.reshape(-1, *[1] * (x.ndim - 1 - axis))


def _add_taps(x: Array, axis: int, indices: Array, weights: Array, total: Array, tap: Array) -> Iterator[Call]:
    """The calls that gather, weight and add the elements of each tap."""
    yield partial(x.take, indices[0], axis, total, "clip")
    yield partial(np.multiply, total, _along(weights[0], total, axis), total)
    for index, weight in zip(indices[1:], weights[1:], strict=True):
        yield partial(x.take, index, axis, tap, "clip")
        yield partial(np.multiply, tap, _along(weight, tap, axis), tap)
        yield partial(np.add, total, tap, total)


class _Run(NamedTuple):
    """Elements of the output, equally far apart, that are made of neighbours in the input.

    Attributes:
        to: where they lie along the axis.
        taps: for each tap where its elements lie in the input, and their weights: one for all, or one for each.
    """

    to: slice
    taps: list[tuple[slice, Array]]


FEWEST_IN_A_RUN: Final = limit("interpolation_run", 8, 1, 1 << 10)
"""Elements of a run on average; where they are fewer, elements are gathered: each run costs several calls."""


def _runs(indices: Array, weights: Array, length: int) -> list[_Run] | None:
    """The runs of an axis of ``length`` that is made a whole number of times as long: elements so far apart in
    the output are made of neighbours in the input, except at the ends. ``None`` where runs are short."""
    size = indices.shape[1]
    step = size // length
    if step < 2 or size % length:
        return None
    found = []
    for phase in range(step):
        some = indices[:, phase::step]
        ends = np.flatnonzero((np.diff(some) != 1).any(0)) + 1
        for a, b in pairwise([0, *ends.tolist(), some.shape[1]]):
            to = slice(phase + a * step, phase + (b - 1) * step + 1, step)
            taps = []
            for first, weight in zip(some[:, a].tolist(), weights[:, to], strict=True):
                taps.append((slice(first, first + b - a), weight[:1] if (weight == weight[0]).all() else weight))
            found.append(_Run(to, taps))
    return found if len(found) * FEWEST_IN_A_RUN.value <= size else None


def _add_runs(x: Array, axis: int, runs: Sequence[_Run], total: Array, scratch: Array) -> Iterator[Call]:
    """As `_add_taps`, without gathering; only the last sum is written to elements that lie apart."""
    before = (slice(None),) * axis
    for to, taps in runs:
        part = total[(*before, to)]
        sums, products = (window(half, part.shape) for half in (scratch, scratch[part.size :]))
        for i, (of, weight) in enumerate(taps):
            yield partial(np.multiply, x[(*before, of)], _along(weight, part, axis), products if i else sums)
            if i:
                yield partial(np.add, sums, products, part if i == len(taps) - 1 else sums)
