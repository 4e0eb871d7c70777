"""Elements picked and added up by index, regions replaced, and states written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.errors import BoundsError
from opweave.graph.dtypes import DTYPES, DType, as_dtype
from opweave.ops.blocks import Decoder, fields_of, scratch_bytes
from opweave_cpu.kernels.table import KERNELS, NUMBERS, PLAIN, QUANTIZED, needs_dense_output
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import (
    Array,
    compute_dtype,
    copy_call,
    in_turn,
    spread_pass,
    tile_cuts,
    window,
)
from opweave_cpu.tunables import BLOCK_TILE, TILE

_INDEX: Final = as_dtype("i64")
_largest: Final = np.maximum.reduce
_UNSIGNED: Final = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def _as_unsigned(ids: Array) -> Array:
    """The same bytes, in which a negative index is a huge one: one comparison finds both ways of being outside."""
    return ids.view(_UNSIGNED[ids.itemsize])


def id_check(ids: Array, length: int, op: str) -> Call:
    """The call that raises `BoundsError` naming the first index outside of ``0 .. length - 1``."""
    return partial(check_ids, ids, _as_unsigned(ids), length, op)


def check_ids(ids: Array, unsigned: Array, length: int, op: str) -> None:
    """Raise `BoundsError` naming the first index outside of ``0 .. length - 1``; see `id_check`."""
    if _largest(unsigned, None) >= length:
        at = tuple(int(i) for i in np.argwhere(unsigned >= length)[0])
        raise BoundsError(f"{op}: index {ids[at]} at {list(at)} is outside of 0 .. {length - 1}")


def _rows_per_tile(out: Arg, ids: Arg) -> int:
    return max(1, TILE.value * ids.size // out.nbytes)


@KERNELS("embedding", dtypes=PLAIN, when=needs_dense_output)
def embedding(stream: Stream, op: str, out: Arg, table: Arg, ids: Arg) -> Call:
    rows, picks = table.view, ids.view
    check = id_check(picks, table.shape[0], op)
    if rows.flags.c_contiguous:
        pick = stream.pick(out, table, ids) if isinstance(stream, CpuStream) else None
        if pick is not None:
            return in_turn([check, pick])
        return partial(_take, check, rows.take, picks, _as_unsigned(picks), table.shape[0], out.view)
    # `take` would first make a dense copy of a table with gaps.
    target = out.view.reshape(ids.size, *table.shape[1:])
    return partial(_pick, check, rows, picks, target, _rows_per_tile(out, ids))


def _take(check: Call, take: Callable[..., Any], ids: Array, unsigned: Array, length: int, out: Array) -> None:
    # `check` repeats this comparison. Calling it always would take a tenth of the time of picking a few rows.
    if _largest(unsigned, None) >= length:
        check()
    # In any mode but "raise" NumPy writes straight into `out`; the ids are checked.
    take(ids, 0, out, "clip")


def _pick(check: Call, rows: Array, ids: Array, out: Array, tile: int) -> None:
    """``tile`` rows at a time: NumPy first makes an array of the rows that are picked, and that stays small then."""
    check()
    flat = ids.reshape(-1)
    for first in range(0, len(flat), tile):
        some = slice(first, first + tile)
        out[some] = rows[flat[some]]


# --- rows of quantized tables ---------------------------------------------------------------------------------------


def _ids_at_once(table: Arg, ids: Arg) -> int:
    row = prod(table.shape[1:])
    return max(1, min(ids.size, BLOCK_TILE.value // row))


def _blocks_workspace(step: Step) -> Arrays:
    """The bytes of the rows that are decoded at a time, and memory to decode them in."""
    table, ids = step.srcs
    elements = _ids_at_once(table, ids) * prod(table.shape[1:])
    decoding = scratch_bytes(table.dtype, elements // table.dtype.block)
    return {"packed": ("u8", (table.dtype.row_bytes(elements),)), "decoding": ("u8", (decoding,))}


@KERNELS("embedding", dtypes=[as_dtype("f32"), *QUANTIZED], when=needs_dense_output, workspace=_blocks_workspace)
def embedding_of_blocks(
    stream: Stream, op: str, out: Arg, table: Arg, ids: Arg, *, blocks: DType, packed: Arg, decoding: Arg | None = None
) -> Call:
    rows, picks, count = table.view, ids.view, _ids_at_once(table, ids)
    picked = packed.view.reshape(count, *rows.shape[1:])
    stored, scratch = fields_of(picked, blocks), np.empty(0, np.uint8) if decoding is None else decoding.view
    target = out.view.reshape(ids.size, *table.shape[1:])
    decoders = {n: Decoder(blocks, stored[:n].shape, scratch) for n in {count, ids.size % count} if n}
    tiles = []
    for first in range(0, ids.size, count):
        values = target[first : first + count]
        n = len(values)
        tiles.append((slice(first, first + n), picked[:n], partial(decoders[n].into(values), stored[:n])))
    check = id_check(picks, table.shape[0], op)
    return partial(_pick_and_decode, check, rows, picks, tiles)


def _pick_and_decode(check: Call, rows: Array, ids: Array, tiles: Sequence[tuple[slice, Array, Call]]) -> None:
    check()
    flat = ids.reshape(-1)
    for some, packed, decode in tiles:
        if rows.flags.c_contiguous:
            rows.take(flat[some], 0, packed, "clip")
        else:
            packed[...] = rows[flat[some]]
        decode()


# --- elements by index ----------------------------------------------------------------------------------------------


def _tile_ids() -> int:
    """Indices of a tile."""
    return TILE.value // _INDEX.itemsize


def _flat_workspace(step: Step) -> Arrays:
    """Where everything is dense and the axis is the last one, elements are picked by their index in flat arrays."""
    if step.attrs["axis"] == len(step.out.shape) - 1 and all(a.is_dense for a in (step.out, *step.srcs)):
        return {"flat_ids": (_INDEX, (min(step.out.size, _tile_ids()),))}
    return {}


@KERNELS("take_along_axis", dtypes=PLAIN, workspace=_flat_workspace)
def take_along_axis(
    stream: Stream, op: str, out: Arg, x: Arg, ids: Arg, *, axis: int, flat_ids: Arg | None = None
) -> Call:
    picks = ids.view
    check = id_check(picks, x.shape[axis], op)
    if flat_ids is not None:
        source, rows, target = (a.view.reshape(-1, a.shape[-1]) for a in (x, ids, out))
        if rows.size <= flat_ids.size and rows.size:
            starts = np.arange(0, source.size, x.shape[-1]).reshape(-1, 1)
            at = window(flat_ids.view, rows.shape)
            return partial(_take_at_once, check, source.reshape(-1).take, rows, starts, target, at)
        return partial(_take_rows, check, source, rows, target, flat_ids.view)
    tiles, target, source = [], out.view, x.view
    for cut in tile_cuts(out.shape, _tile_ids(), keep_last=False):
        # What is picked may come from anywhere along the axis.
        whole = (*cut[:axis], slice(None), *cut[axis + 1 :]) if len(cut) > axis and cut[0] is not ... else cut
        tiles.append((source[whole], picks[cut], target[cut]))
    return partial(_take_tiles, check, axis, tiles)


def _take_at_once(check: Call, take: Callable[..., Any], ids: Array, starts: Array, out: Array, at: Array) -> None:
    check()
    np.add(ids, starts, at)
    take(at, None, out, "clip")


def _take_rows(check: Call, x: Array, ids: Array, out: Array, flat_ids: Array) -> None:
    """Several rows at a time, or a part of a row."""
    check()
    rows, n = x.shape
    m = ids.shape[1]
    if m > len(flat_ids):
        for row in range(rows):
            for first in range(0, m, len(flat_ids)):
                some = slice(first, first + len(flat_ids))
                x[row].take(ids[row, some], 0, out[row, some], "clip")
        return
    step = len(flat_ids) // m
    starts = np.arange(0, step * n, n).reshape(-1, 1)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        picked = ids[some]
        at = window(flat_ids, picked.shape)
        np.add(picked, starts[: len(picked)], at)
        x[some].reshape(-1).take(at, 0, out[some], "clip")


def _take_tiles(check: Call, axis: int, tiles: Sequence[tuple[Array, Array, Array]]) -> None:
    check()
    for source, ids, out in tiles:
        out[...] = np.take_along_axis(source, ids, axis)


def _sum_workspace(step: Step) -> Arrays:
    """For each element of some rows its index in the flat output; and the sums, where the output's type is narrower."""
    ids, rows = step.srcs
    row = rows.size // ids.size
    dtype = compute_dtype(rows.dtype)
    flat_ids = _INDEX, (min(ids.size, max(1, _tile_ids() // row)), row)
    return {"flat_ids": flat_ids, "sums": (dtype, (step.out.size if dtype is not rows.dtype else 0,))}


@KERNELS("index_add", dtypes=NUMBERS, when=needs_dense_output, workspace=_sum_workspace)
def index_add(
    stream: Stream, op: str, out: Arg, ids: Arg, rows: Arg, *, n: int, flat_ids: Arg, sums: Arg | None = None
) -> Call:
    picks, target = ids.view, out.view.reshape(-1)
    check = id_check(picks, n, op)
    total = target if sums is None else sums.view
    return partial(_add_rows, check, _lists_of_rows(picks, rows.view), target, total, flat_ids.view)


def _lists_of_rows(ids: Array, rows: Array) -> list[tuple[Array, Array]]:
    """Ids, of one axis, and the row of each: one pair, or several where strides do not let the axes of ids merge."""
    axes = ids.ndim
    if axes < 2 or (ids.flags.c_contiguous and rows.flags.c_contiguous):
        rest = rows.shape[axes:]
        return [(ids.reshape(-1), rows.reshape(ids.size, *rest))]
    return [pair for i, r in zip(ids, rows, strict=True) for pair in _lists_of_rows(i, r)]


def _add_rows(check: Call, lists: Sequence[tuple[Array, Array]], out: Array, total: Array, flat_ids: Array) -> None:
    check()
    total[...] = 0
    count, row = flat_ids.shape
    along = np.arange(row)
    for ids, rows in lists:
        for first in range(0, len(ids), count):
            some = ids[first : first + count]
            at = flat_ids[: len(some)]
            np.multiply(some.reshape(-1, 1), row, at)
            np.add(at, along, at)
            # `np.add.at` is fast where values, indices and target have one axis each.
            values = rows[first : first + count].reshape(-1)
            np.add.at(total, at.reshape(-1), values.astype(total.dtype, copy=False))
    if total is not out:
        np.copyto(out, total, "unsafe")


@KERNELS("set_region", dtypes=PLAIN, inplace=True)
@KERNELS("add_region", dtypes=NUMBERS, inplace=True)
def region(stream: Stream, op: str, out: Arg, x: Arg, value: Arg, *, offsets: tuple[int, ...]) -> Call:
    target = out.view
    places: tuple[Any, ...] = tuple([slice(at, at + n) for at, n in zip(offsets, value.shape, strict=True)])
    window = target[*places, ...]  # ``...``: a view, also without axes
    if op == "set_region":
        write = copy_call(stream, window, value.view)
    else:
        write = spread_pass(stream, np.add, window, window, value.view)
    if x.buffer is out.buffer and x.offset == out.offset:
        return write
    return in_turn([copy_call(stream, target, x.view), write])


@KERNELS("index_copy", dtypes=DTYPES.values())
def index_copy(stream: Stream, op: str, out: Arg, ids: Arg, rows: Arg) -> Call:
    picks = ids.view
    check = id_check(picks, out.shape[0], op)
    put = stream.put(out, ids, rows) if isinstance(stream, CpuStream) else None
    return partial(_put_rows, check, out.view, picks, rows.view) if put is None else in_turn([check, put])


def _put_rows(check: Call, out: Array, ids: Array, rows: Array) -> None:
    check()
    out[ids] = rows


@KERNELS("assign", dtypes=DTYPES.values())
def assign(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return copy_call(stream, out.view, x.view)


@KERNELS("accumulate", dtypes=NUMBERS)
def accumulate(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return spread_pass(stream, np.add, out.view, out.view, x.view)
