"""Pooling: for each element of the window one pass over a tile of the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.ops.pooling import window_counts
from opweave_cpu.kernels.table import FLOATS, KERNELS, NUMBERS
from opweave_cpu.lanes import Cut, Rooms, at, bind_lanes, cuts_of, lane_count, overlap
from opweave_cpu.tiles import TILE, Array, compute_dtype, constant


def _windows(x: Arg, cut: Sequence[slice], attrs: dict[str, Any]) -> list[tuple[Cut, Cut]]:
    """For each element of the window: the part of the tile that has one inside of the input, and where these are."""
    axes = []
    for c, n, k, s, p, d in zip(
        cut, x.shape[2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], attrs["dilation"], strict=True
    ):
        axes.append([overlap(c.stop - c.start, n, s, c.start * s - p + i * d) for i in range(k)])
    every = slice(None)
    return [((every, *[to for to, _ in place]), (every, *[of for _, of in place])) for place in product(*axes)]


def _jobs(out: Arg) -> list[tuple[int, Cut]]:
    return cuts_of(out.shape[0], out.shape[1:], TILE // compute_dtype(out.dtype).itemsize)


def _work(out: Arg, attrs: dict[str, Any]) -> int:
    return out.size * int(prod(attrs["kernel_size"]))


@KERNELS("max_pool1d", "max_pool2d", dtypes=NUMBERS)
def max_pool(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    target, source, jobs = out.view, x.view, _jobs(out)
    lowest = constant(-np.inf if out.dtype.is_float else np.iinfo(out.dtype.numpy).min, out.dtype)

    def tile_calls(job: tuple[int, Cut], rooms: list[Array]) -> Iterator[Call]:
        n, (channels, *cut) = job
        most, inputs = target[at(n, channels, *cut)], source[n, channels]
        yield partial(np.copyto, most, lowest)
        for to, of in _windows(x, cut, attrs):
            part = most[to]
            yield partial(np.maximum, part, inputs[of], out=part)

    return bind_lanes(stream, jobs, Rooms(lane_count(len(jobs), _work(out, attrs)), []), None, tile_calls)


def _rooms(out: Arg, attrs: dict[str, Any]) -> Rooms:
    dtype = compute_dtype(out.dtype)
    tile = min(TILE // dtype.itemsize, prod(out.shape[1:]))
    lanes = lane_count(len(_jobs(out)), _work(out, attrs))
    return Rooms(lanes, [] if out.dtype is dtype else [(tile, dtype)])


def _workspace(step: Step) -> int:
    return _rooms(step.out, dict(step.attrs)).nbytes


@KERNELS("avg_pool1d", "avg_pool2d", dtypes=FLOATS, workspace=_workspace)
def avg_pool(stream: Stream, op: str, out: Arg, x: Arg, *, workspace: Arg | None, **attrs: Any) -> Call:
    target, source, dtype = out.view, x.view, compute_dtype(out.dtype)
    rank = len(out.shape) - 2
    counts = []
    sizes = zip(x.shape[2:], out.shape[2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], strict=True)
    for axis, (n, places, k, s, p) in enumerate(sizes):
        each = window_counts(n, places, k, s, p, attrs["count_include_pad"]).astype(dtype.numpy)
        counts.append(each.reshape(-1, *[1] * (rank - 1 - axis)))
    divisor = constant(attrs["divisor"], dtype)

    def tile_calls(job: tuple[int, Cut], rooms: list[Array]) -> Iterator[Call]:
        n, (channels, *cut) = job
        mean, inputs = target[at(n, channels, *cut)], source[n, channels]
        total = rooms[0][: mean.size].reshape(mean.shape) if rooms else mean
        yield partial(total.fill, 0)
        for to, of in _windows(x, cut, attrs):
            part = total[to]
            yield partial(np.add, part, inputs[of], part)
        if divisor:
            yield partial(np.divide, total, divisor, total)
        else:
            for each, c in zip(counts, cut, strict=True):
                yield partial(np.divide, total, each[c], total)
        if total is not mean:
            yield partial(np.copyto, mean, total, "unsafe")

    return bind_lanes(stream, _jobs(out), _rooms(out, attrs), workspace, tile_calls)
