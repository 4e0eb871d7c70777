"""Pooling: for each element of the window one pass over a tile of the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import bool_
from opweave.ops.pooling import window_counts
from opweave.ops.windows import overlap
from opweave_cpu.kernels.table import KERNELS, NUMBERS
from opweave_cpu.tiles import compute_dtype, constant, stretches, window, worker_scratch
from opweave_cpu.tunables import TILE
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
    return cuts_of(out.shape[0], out.shape[1:], TILE.value // compute_dtype(out.dtype).itemsize)


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


SMALL_TILE: Final = 1 << 14
"""Bytes of the windows of a tile below which calling takes longer than a pass."""


def _backward_jobs(grad: Arg) -> list[tuple[slice, slice]]:
    """Some examples, and some of their channels: the windows of a tile."""
    examples, channels = grad.shape[:2]
    dtype = compute_dtype(grad.dtype)
    # Small gradients are halved, since the scratch memory of a tile is 2.5 times as large as the tile.
    tile = min(TILE.value, max(SMALL_TILE, grad.size * dtype.itemsize // 2))
    lines = max(1, tile // dtype.itemsize // prod(grad.shape[2:]))
    together = min(channels, lines)
    return list(product(stretches(examples, max(1, lines // together)), stretches(channels, together)))


def _backward_workers(grad: Arg, attrs: Mapping[str, Any]) -> int:
    return worker_count(len(_backward_jobs(grad)), 4 * grad.size * prod(attrs["kernel_size"]))


def _backward_workspace(step: Step) -> Arrays:
    """The largest elements of the windows of a tile, where they have been found, and the sums of a narrow type."""
    grad, x = step.srcs
    workers = _backward_workers(grad, step.attrs)
    examples, channels = _backward_jobs(grad)[0]
    lines = examples.stop * channels.stop
    windows, elements = lines * prod(grad.shape[2:]), lines * prod(x.shape[2:])
    dtype = compute_dtype(x.dtype)
    found = worker_scratch(workers, x.dtype, most=windows, part=windows)
    found |= worker_scratch(workers, bool_, hit=windows, open=windows)
    return found | (worker_scratch(workers, dtype, sums=elements) if dtype is not x.dtype else {})


@KERNELS("max_pool_backward", workspace=_backward_workspace)
def max_pool_backward(
    stream: Stream,
    op: str,
    out: Arg,
    grad: Arg,
    x: Arg,
    *,
    most: Arg,
    part: Arg,
    hit: Arg,
    open: Arg,
    sums: Arg | None = None,
    **attrs: Any,
) -> Call:
    target, given, source = out.view, grad.view, x.view
    lowest = constant(-np.inf, x.dtype)
    places = [
        ((slice(None), *to), (slice(None), *of)) for to, of in _windows(x, [slice(0, m) for m in grad.shape[2:]], attrs)
    ]

    def tile_calls(job: tuple[slice, slice], worker: int) -> Iterator[Call]:
        inputs, upstream, result = source[job], given[job], target[job]
        total = result if sums is None else window(sums.view[worker], result.shape)
        largest, one, here, still = (window(a.view[worker], upstream.shape) for a in (most, part, hit, open))
        yield partial(largest.fill, lowest)
        for to, of in places:
            yield partial(np.maximum, largest[to], inputs[of], out=largest[to])
        yield partial(still.fill, True)
        yield partial(total.fill, 0)
        for to, of in places:
            # Whole arrays are faster than windows of them, which have short rows.
            yield partial(one.fill, np.nan)
            yield partial(np.copyto, one[to], inputs[of])
            yield partial(np.equal, one, largest, out=here)
            yield partial(np.logical_and, here, still, out=here)
            yield partial(np.logical_xor, here, still, out=still)
            yield partial(one.fill, 0)
            yield partial(np.copyto, one, upstream, where=here)
            yield partial(np.add, total[of], one[to], out=total[of])
        if total is not result:
            yield partial(np.copyto, result, total, "unsafe")

    return bind_workers(stream, _backward_jobs(grad), _backward_workers(grad, attrs), tile_calls)


def _workspace(step: Step) -> Arrays:
    """The sums of a tile, where the output's type is narrower."""
    out, dtype = step.out, compute_dtype(step.out.dtype)
    tile = min(TILE.value // dtype.itemsize, prod(out.shape[1:]))
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
