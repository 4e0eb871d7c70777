"""Softmax and norms, in tiles of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave.ops.normalization import alibi_slopes
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import (
    Array,
    Body,
    at_once,
    bind_tiled,
    compute_dtype,
    constant,
    most_workers,
    repeated,
    row_dots,
    row_sums,
    shares,
    show,
    tile_cuts,
    tile_rows,
    tile_scratch,
    window,
    worker_scratch,
    workers_of,
)

_ONE_STAT: Final = partial(tile_scratch, stats=1, by_rows=True)


@lru_cache(maxsize=64)
def _softmax_body(dtype: DType, add: Body, scale: float, masked: bool) -> Body:
    factor = None if scale == 1 else constant(scale, dtype)

    def body(out: Array, x: Array, *rest: Array) -> None:
        if factor is not None:
            x = np.multiply(x, factor, out)
        if masked:
            x = np.add(x, rest[0], out)
        stat = rest[-1]
        np.maximum.reduce(x, axis=-1, out=stat, keepdims=True)
        np.subtract(x, stat, out)
        np.exp(out, out)
        add(out, stat)
        np.reciprocal(stat, stat)
        np.multiply(out, stat, out)  # in half the time of a division

    return body


@KERNELS("softmax", inplace=True, workspace=_ONE_STAT)
def softmax(
    stream: Stream, op: str, out: Arg, x: Arg, *mask: Arg, scale: float, stats: Arg, tiles: Arg | None = None
) -> Call:
    body = _softmax_body(stats.dtype, row_sums(out.shape[-1], stats.dtype.numpy), scale, bool(mask))
    return bind_tiled(stream, body, out.view, [x.view, *[m.view for m in mask]], tiles, stats, by_rows=True)


def _heads_workspace(step: Step) -> Arrays:
    return tile_scratch(step, int(step.attrs["max_bias"] != 0), stats=2, by_rows=True)


@KERNELS("head_softmax", inplace=True, workspace=_heads_workspace)
def head_softmax(
    stream: Stream, op: str, out: Arg, x: Arg, sinks: Arg, *mask: Arg, scale: float, max_bias: float, **scratch: Arg
) -> Call:
    tiles, stats = scratch.get("tiles"), scratch["stats"]
    dtype = stats.dtype
    factor, heads = constant(scale, dtype), out.shape[-3]
    add = row_sums(out.shape[-1], dtype.numpy)
    sloped = max_bias != 0
    slopes = alibi_slopes(heads, max_bias).astype(dtype.numpy).reshape(heads, 1, 1)

    def body(out: Array, x: Array, sinks: Array, *rest: Array) -> None:
        top, total = rest[-2:]
        extra = sinks[..., :1]
        np.multiply(x, factor, out)
        if sloped:
            np.multiply(rest[0], rest[1][..., :1], rest[2])
            np.add(out, rest[2], out)
        elif mask:
            np.add(out, rest[0], out)
        np.maximum.reduce(out, axis=-1, out=top, keepdims=True)
        np.maximum(top, extra, out=top)
        np.subtract(out, top, out)
        np.exp(out, out)
        add(out, total)
        np.subtract(extra, top, top)
        np.exp(top, top)
        np.add(total, top, total)
        np.reciprocal(total, total)
        np.multiply(out, total, out)

    lead = (0,) * (len(out.shape) - 3)
    srcs = [x.view, show(sinks, out.shape, (*lead, sinks.strides[0], 0, 0)), *[m.view for m in mask]]
    if sloped:
        srcs.append(np.broadcast_to(slopes, out.shape))
    return bind_tiled(stream, body, out.view, srcs, tiles, stats, by_rows=True)


@KERNELS("log_softmax", inplace=True, workspace=partial(tile_scratch, tiles=1, stats=1, by_rows=True))
def log_softmax(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg, stats: Arg) -> Call:
    add = row_sums(out.shape[-1], tiles.dtype.numpy)

    def body(out: Array, x: Array, powers: Array, stat: Array) -> None:
        np.maximum.reduce(x, axis=-1, out=stat, keepdims=True)
        np.subtract(x, stat, out)
        np.exp(out, powers)
        add(powers, stat)
        np.log(stat, stat)
        np.subtract(out, stat, out)

    return bind_tiled(stream, body, out.view, [x.view], tiles, stats, by_rows=True)


@KERNELS("l2_norm", inplace=True, workspace=_ONE_STAT)
def l2_norm(stream: Stream, op: str, out: Arg, x: Arg, *, eps: float, stats: Arg, tiles: Arg | None = None) -> Call:
    smallest, dot = constant(eps, stats.dtype), row_dots(out.shape[-1])

    def body(out: Array, x: Array, stat: Array) -> None:
        dot(x, x, stat)
        np.sqrt(stat, stat)
        np.maximum(stat, smallest, out=stat)
        np.divide(x, stat, out)

    return bind_tiled(stream, body, out.view, [x.view], tiles, stats, by_rows=True)


@lru_cache(maxsize=64)
def _norm_body(dtype: DType, n: int, add: Body | None, dot: Body, eps: float, parameters: int) -> Body:
    count, epsilon = constant(n, dtype), constant(eps, dtype)

    def body(out: Array, x: Array, *rest: Array) -> None:
        stat = rest[-1]
        if add is not None:
            add(x, stat)
            np.divide(stat, count, stat)
            x = np.subtract(x, stat, out)
        dot(x, x, stat)
        np.divide(stat, count, stat)
        np.add(stat, epsilon, stat)
        np.sqrt(stat, stat)
        np.reciprocal(stat, stat)
        np.multiply(x, stat, out)
        if parameters:
            np.multiply(out, rest[0], out)
        if parameters > 1:
            np.add(out, rest[1], out)

    return body


@KERNELS("layer_norm", "rms_norm", inplace=True, workspace=_ONE_STAT)
def norm(
    stream: Stream, op: str, out: Arg, x: Arg, *parameters: Arg, eps: float, stats: Arg, tiles: Arg | None = None
) -> Call:
    """``parameters`` are a weight, or a weight and a bias, or nothing."""
    n, dtype = x.shape[-1], stats.dtype
    add = row_sums(n, dtype.numpy) if op == "layer_norm" else None
    body = _norm_body(dtype, n, add, row_dots(n), eps, len(parameters))
    srcs = [x.view, *[repeated(p, out.shape) for p in parameters]]
    return bind_tiled(stream, body, out.view, srcs, tiles, stats, by_rows=True)


# --- groups of channels ---------------------------------------------------------------------------------------------


def _groups_of_tile(out: Arg, groups: int, dtype: DType) -> tuple[int, int]:
    """How many groups make a tile, and the elements of each."""
    row = out.size // (out.shape[0] * groups)
    return tile_rows(out.size, row, dtype.itemsize), row


def _group_workspace(step: Step) -> Arrays:
    """One number a group; and the groups of a tile, where ``out`` cannot serve as memory to work in."""
    out, dtype = step.out, compute_dtype(step.out.dtype)
    rows, row = _groups_of_tile(out, step.attrs["groups"], dtype)
    workers = most_workers(out.size * dtype.itemsize)
    in_place = out.is_dense and out.dtype is dtype
    return worker_scratch(workers, dtype, stats=rows, work=0 if in_place else rows * row)


@KERNELS("group_norm", inplace=True, workspace=_group_workspace)
def group_norm(
    stream: Stream, op: str, out: Arg, x: Arg, *parameters: Arg, groups: int, eps: float, **scratch: Arg
) -> Call:
    """``parameters`` are a weight, or a weight and a bias, or nothing."""
    stats, work = scratch["stats"], scratch.get("work")
    dtype = stats.dtype
    n, channels, *rest = out.shape
    shape = (n, groups, channels // groups, *rest)
    rows, row = _groups_of_tile(out, groups, dtype)
    target, source = (_in_groups(arg, shape) for arg in (out, x))
    few, flat = channels // groups, [0] * len(rest)
    each = [show(p, (*shape[:3], *[1] * len(rest)), (0, few * p.strides[0], p.strides[0], *flat)) for p in parameters]
    cuts = tile_cuts((n, groups), rows, keep_last=False)
    count = min(workers_of(stream), stats.shape[0], len(cuts))
    jobs = []
    numbers = constant(1 / row, dtype), constant(eps, dtype)
    for worker, mine in enumerate(shares(len(cuts), count)):
        tiles = []
        for cut in cuts[mine]:
            some = target[cut]
            into = some if work is None else window(work.view[worker], some.shape)
            stat = window(stats.view[worker], (*some.shape[:2], *[1] * (some.ndim - 2)))
            tiles.append((some, source[cut], into, stat, [e[cut] for e in each]))
        jobs.append(partial(_norm_groups, tiles, row_dots(row), *numbers))
    return at_once(jobs)


def _in_groups(arg: Arg, shape: tuple[int, ...]) -> Array:
    """``arg`` with its channels, axis 1, as groups of them."""
    first, second, *rest = arg.strides
    return show(arg, shape, (first, shape[2] * second, second, *rest))


def _norm_groups(
    tiles: Sequence[tuple[Array, Array, Array, Array, list[Array]]],
    dot: Body,
    per_count: Array,
    epsilon: Array,
) -> None:
    for out, x, work, stat, parameters in tiles:
        flat = work.reshape(*work.shape[:2], -1)
        if work is not out:
            np.copyto(work, x)
            np.add.reduce(flat, -1, None, stat.reshape(*stat.shape[:2], 1), keepdims=True)
        else:
            np.add.reduce(x, tuple(range(2, x.ndim)), None, stat, keepdims=True)
        np.multiply(stat, per_count, stat)
        np.subtract(x if work is out else work, stat, work)
        dot(flat, flat, stat.reshape(*stat.shape[:2], 1))
        np.multiply(stat, per_count, stat)
        np.add(stat, epsilon, stat)
        np.sqrt(stat, stat)
        np.reciprocal(stat, stat)
        np.multiply(work, stat, work)
        if parameters:
            np.multiply(work, parameters[0], work)
        if len(parameters) > 1:
            np.add(work, parameters[1], work)
        if work is not out:
            np.copyto(out, work, "unsafe")
