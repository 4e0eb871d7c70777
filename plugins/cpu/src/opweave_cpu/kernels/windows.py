"""Windows: where each of their elements lies, and the calls that add windows up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.windows import overlap
from opweave_cpu.tiles import Array, compute_dtype, stretches, window, worker_scratch
from opweave_cpu.tunables import TILE
from opweave_cpu.workers import Cut, bind_workers, worker_count

Job = tuple[slice, slice]
"""Some examples, and some of their channels."""


def line_jobs(x: Arg, tile: int) -> list[Job]:
    """Jobs whose part of ``x`` has about ``tile`` bytes, in the type to compute in."""
    examples, channels = x.shape[:2]
    lines = max(1, tile // compute_dtype(x.dtype).itemsize // max(1, prod(x.shape[2:])))
    together = max(1, min(channels, lines))
    return list(product(stretches(examples, max(1, lines // together)), stretches(channels, together)))


def taps_of(x: Arg, cut: Sequence[slice], attrs: Mapping[str, Any]) -> list[tuple[Cut, Cut]]:
    """For each element of the window: the part of the tile for which it lies inside of the input, and where it lies."""
    axes = []
    for c, n, k, s, p, d in zip(
        cut, x.shape[2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], attrs["dilation"], strict=True
    ):
        axes.append([overlap(c.stop - c.start, n, s, c.start * s - p + i * d) for i in range(k)])
    every = slice(None)
    return [((every, *[to for to, _ in position]), (every, *[of for _, of in position])) for position in product(*axes)]


def _sum_workers(out: Arg, attrs: Mapping[str, Any]) -> int:
    return worker_count(len(line_jobs(out, TILE.value)), out.size * int(prod(attrs["kernel_size"])))


def sum_arrays(step: Step, **more: int) -> Arrays:
    """The sums of a tile, where the output's type is narrower, and ``more`` elements for each of its lines."""
    out, dtype = step.out, compute_dtype(step.out.dtype)
    examples, channels = line_jobs(out, TILE.value)[0]
    lines = examples.stop * channels.stop
    each = more | ({} if out.dtype is dtype else {"sums": prod(out.shape[2:])})
    return worker_scratch(_sum_workers(out, step.attrs), dtype, **{name: lines * n for name, n in each.items()})


def bind_sums(
    stream: Stream,
    out: Arg,
    places: Sequence[int],
    attrs: Mapping[str, Any],
    sums: Arg | None,
    parts: Callable[[Job, int], tuple[Sequence[Call], Sequence[Array]]],
    divisor: Array | None = None,
) -> Call:
    """The call that adds windows up.

    Args:
        places: how many windows there are along each axis.
        sums: where results of a narrow type are added up before they are rounded.
        parts: ``parts(job, worker)``: calls to make before, and what each element of a window adds in all places.
        divisor: what the sums are divided by.
    """
    target, every = out.view, slice(None)
    taps = [((every, *to), (every, *of)) for to, of in taps_of(out, [slice(0, m) for m in places], attrs)]

    def tile_calls(job: Job, worker: int) -> Iterator[Call]:
        result = target[job]
        total = result if sums is None else window(sums.view[worker], result.shape)
        before, terms = parts(job, worker)
        yield from before
        yield partial(total.fill, 0)
        for (to, of), term in zip(taps, terms, strict=True):
            yield partial(np.add, total[of], term[to], out=total[of])
        if divisor is not None:
            yield partial(np.divide, total, divisor, total)
        if total is not result:
            yield partial(np.copyto, result, total, "unsafe")

    return bind_workers(stream, line_jobs(out, TILE.value), _sum_workers(out, attrs), tile_calls)
