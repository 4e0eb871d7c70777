"""Pooling: for each element of the window one pass over a tile of the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.pooling import window_counts
from opweave.ops.windows import overlap
from opweave_cpu.kernels.table import KERNELS, NUMBERS
from opweave_cpu.tiles import TILE, compute_dtype, constant, window, worker_scratch
from opweave_cpu.workers import Cut, at, bind_workers, cuts_of, worker_count


def _windows(x: Arg, cut: Sequence[slice], attrs: Mapping[str, Any]) -> list[tuple[Cut, Cut]]:
    """For each element of the window: the part of the tile that has one inside of the input, and where these are."""
    axes = []
    for c, n, k, s, p, d in zip(
        cut, x.shape[2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], attrs["dilation"], strict=True
    ):
        axes.append([overlap(c.stop - c.start, n, s, c.start * s - p + i * d) for i in range(k)])
    every = slice(None)
    return [((every, *[to for to, _ in position]), (every, *[of for _, of in position])) for position in product(*axes)]


def _jobs(out: Arg) -> list[tuple[int, Cut]]:
    return cuts_of(out.shape[0], out.shape[1:], TILE // compute_dtype(out.dtype).itemsize)


def _workers(out: Arg, attrs: Mapping[str, Any]) -> int:
    return worker_count(len(_jobs(out)), out.size * int(prod(attrs["kernel_size"])))


@KERNELS("max_pool1d", "max_pool2d", dtypes=NUMBERS)
def max_pool(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    target, source = out.view, x.view
    lowest = constant(-np.inf if out.dtype.is_float else np.iinfo(out.dtype.numpy).min, out.dtype)

    def tile_calls(job: tuple[int, Cut], worker: int) -> Iterator[Call]:
        n, (channels, *cut) = job
        most, inputs = target[at(n, channels, *cut)], source[n, channels]
        yield partial(np.copyto, most, lowest)
        for to, of in _windows(x, cut, attrs):
            part = most[to]
            yield partial(np.maximum, part, inputs[of], out=part)

    return bind_workers(stream, _jobs(out), _workers(out, attrs), tile_calls)


def _workspace(step: Step) -> Arrays:
    """The sums of a tile, where the output's type is narrower."""
    out, dtype = step.out, compute_dtype(step.out.dtype)
    tile = min(TILE // dtype.itemsize, prod(out.shape[1:]))
    return {} if out.dtype is dtype else worker_scratch(_workers(out, step.attrs), dtype, sums=tile)


@KERNELS("avg_pool1d", "avg_pool2d", workspace=_workspace)
def avg_pool(stream: Stream, op: str, out: Arg, x: Arg, *, sums: Arg | None = None, **attrs: Any) -> Call:
    target, source, dtype = out.view, x.view, compute_dtype(out.dtype)
    rank = len(out.shape) - 2
    counts = []
    sizes = zip(x.shape[2:], out.shape[2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], strict=True)
    for axis, (n, positions, k, s, p) in enumerate(sizes):
        each = window_counts(n, positions, k, s, p, attrs["count_include_pad"]).astype(dtype.numpy)
        counts.append(each.reshape(-1, *[1] * (rank - 1 - axis)))
    divisor = constant(attrs["divisor"], dtype)

    def tile_calls(job: tuple[int, Cut], worker: int) -> Iterator[Call]:
        n, (channels, *cut) = job
        mean, inputs = target[at(n, channels, *cut)], source[n, channels]
        total = mean if sums is None else window(sums.view[worker], mean.shape)
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

    return bind_workers(stream, _jobs(out), _workers(out, attrs), tile_calls)
