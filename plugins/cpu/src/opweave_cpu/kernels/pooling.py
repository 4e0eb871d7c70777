"""Pooling: for each element of the window one pass over a tile of the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import bool_
from opweave.ops.pooling import axis_counts, shared_count
from opweave_cpu.kernels.table import KERNELS, NUMBERS
from opweave_cpu.kernels.windows import Job, bind_sums, line_jobs, sum_arrays, taps_of
from opweave_cpu.tiles import Array, compute_dtype, constant, window, worker_scratch
from opweave_cpu.tunables import TILE, limit
from opweave_cpu.workers import Cut, at, bind_workers, cuts_of, worker_count


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
        for to, of in taps_of(x, cut, attrs):
            part = most[to]
            yield partial(np.maximum, part, inputs[of], out=part)

    return bind_workers(stream, _jobs(out), _workers(out, attrs), tile_calls)


SMALL_TILE: Final = limit("pooling_tile_bytes", 1 << 14, 1, 1 << 20)
"""Bytes of the windows of a tile below which calling takes longer than a pass."""


def _backward_jobs(grad: Arg) -> list[Job]:
    # Small gradients are cut in two tiles, since the scratch memory of a tile is 2.5 times as large as the tile.
    size = grad.size * compute_dtype(grad.dtype).itemsize
    return line_jobs(grad, min(TILE.value, max(SMALL_TILE.value, size // 2)))


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
        ((slice(None), *to), (slice(None), *of)) for to, of in taps_of(x, [slice(0, m) for m in grad.shape[2:]], attrs)
    ]

    def tile_calls(job: Job, worker: int) -> Iterator[Call]:
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
    counts = [each.astype(dtype.numpy) for each in axis_counts(x.shape[2:], out.shape[2:], **attrs)]
    divisor = constant(shared_count(**attrs), dtype)

    def tile_calls(job: tuple[int, Cut], worker: int) -> Iterator[Call]:
        n, (channels, *cut) = job
        mean, inputs = target[at(n, channels, *cut)], source[n, channels]
        total = mean if sums is None else window(sums.view[worker], mean.shape)
        yield partial(total.fill, 0)
        for to, of in taps_of(x, cut, attrs):
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


def _mean_arrays(step: Step) -> Arrays:
    share = 0 if shared_count(**step.attrs) else prod(step.srcs[0].shape[2:])
    return sum_arrays(step, share=share)


@KERNELS("avg_pool_backward", workspace=_mean_arrays)
def avg_pool_backward(
    stream: Stream, op: str, out: Arg, grad: Arg, *, share: Arg | None = None, sums: Arg | None = None, **attrs: Any
) -> Call:
    places, dtype, given, taps = grad.shape[2:], compute_dtype(out.dtype), grad.view, prod(attrs["kernel_size"])
    if share is None:
        divisor = constant(shared_count(**attrs), dtype)
        return bind_sums(stream, out, places, attrs, sums, lambda job, worker: ((), [given[job]] * taps), divisor)
    scratch = share.view
    number = prod(axis_counts(out.shape[2:], places, **attrs), start=np.ones((), dtype.numpy))

    def parts(job: Job, worker: int) -> tuple[Sequence[Call], Sequence[Array]]:
        upstream = given[job]
        each = window(scratch[worker], upstream.shape)
        return [partial(np.divide, upstream, number, each)], [each] * taps

    return bind_sums(stream, out, places, attrs, sums, parts)
