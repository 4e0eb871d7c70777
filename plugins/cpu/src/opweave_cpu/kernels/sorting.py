"""Orders and running sums along an axis.

Elements of up to four bytes are sorted as one u64 each: in the upper half a key whose order as an unsigned number is
that of the elements, in the lower half the index. So equals are in order of their indices, the sort runs in place, and
it is NumPy's fastest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import as_dtype
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import (
    SPREAD_PASS,
    Array,
    Scratch,
    at_once,
    bind_tiled,
    compute_dtype,
    in_turn,
    lanes,
    most_lanes,
    padded,
    shares,
    tile_cuts,
    tile_rows,
    tiled_workspace,
)

_F32: Final = as_dtype("f32")
_F64: Final = as_dtype("f64")
_I32: Final = as_dtype("i32")
_U8: Final = as_dtype("u8")
_SIGN: Final = np.array(0x80000000, np.uint32)
_ALL: Final = np.array(0xFFFFFFFF, np.uint32)
_LOW: Final = np.array(0xFFFFFFFF, np.uint64)
_HALF: Final = np.array(32, np.uint64)


# --- argsort and top_k ----------------------------------------------------------------------------------------------

FEW: Final = 1024
"""Elements in a row up to which NumPy's own unstable sort of indices is faster than making keys."""

SEVERAL: Final = 256
"""Elements of a row for each wanted one, from which on most are ruled out before any are sorted."""

PART: Final = 64
"""Elements in each part of a row of which the largest is found for that."""

SHORT: Final = "f32 f16 bf16 i32 i16 i8 u8 bool"
LONG: Final = "f64 i64"


def _rows(x: Arg, axis: int) -> int:
    return tile_rows(x.size, x.shape[axis], _F64)


def _packed_workspace(step: Step) -> int:
    x, n = step.srcs[0], step.srcs[0].shape[step.attrs["axis"]]
    elements = _rows(x, step.attrs["axis"]) * n
    return (padded(elements * 8) + padded(elements * 4)) * most_lanes(x.size, _F64)


@KERNELS("argsort", dtypes=SHORT, workspace=_packed_workspace)
def argsort(
    stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, descending: bool, stable: bool, workspace: Arg | None
) -> Call:
    if not stable and x.shape[axis] <= FEW and x.dtype.itemsize == 4:
        return _bind_long(out, x, axis, descending, stable, x.shape[axis])
    return _bind_packed(stream, out, x, axis, descending, None, workspace)


@KERNELS("top_k", dtypes=SHORT, workspace=_packed_workspace)
def top_k(stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int, workspace: Arg | None) -> Call:
    return _bind_packed(stream, out, x, axis, True, k, workspace)


def _bind_packed(
    stream: Stream, out: Arg, x: Arg, axis: int, descending: bool, k: int | None, workspace: Arg | None
) -> Call:
    values, places = x.view.swapaxes(axis, -1), out.view.swapaxes(axis, -1)
    n, rows = x.shape[axis], _rows(x, axis)
    cuts = tile_cuts(values.shape, rows, keep_last=True)
    count = min(lanes(stream), most_lanes(x.size, _F64), len(cuts))
    scratch, jobs = Scratch(workspace), []
    for mine in shares(len(cuts), count):
        packed = scratch.take((rows * n,), _F64).view(np.uint64)
        keys = scratch.take((rows * n,), _F32 if x.dtype.is_float else _I32)
        jobs.append(partial(_sort_packed, [(values[c], places[c]) for c in cuts[mine]], packed, keys, descending, k))
    return at_once(jobs)


def _sort_packed(
    pieces: Sequence[tuple[Array, Array]], room: Array, numbers: Array, descending: bool, k: int | None
) -> None:
    n = pieces[0][0].shape[-1]
    index = np.arange(n, dtype=np.uint32)
    if k is None or k * SEVERAL > n or pieces[0][0].dtype != np.float32:
        for values, places in pieces:
            _sort_rows(values, places, room, numbers, index, descending, k)
        return
    for values, places in pieces:
        for row in np.ndindex(values.shape[:-1]):
            if not _pick_few(values[row], places[row], room):
                _sort_rows(values[row], places[row], room, numbers, index, descending, k)


def _sort_rows(
    values: Array, places: Array, room: Array, numbers: Array, index: Array, descending: bool, k: int | None
) -> None:
    packed = room[: values.size].reshape(values.shape)
    keys = _keys(values, numbers[: values.size].reshape(values.shape), packed)
    if descending:
        np.invert(keys, keys)
    np.left_shift(keys, _HALF, packed, dtype=np.uint64)
    np.bitwise_or(packed, index, packed)
    if k is not None and k < values.shape[-1]:
        packed.partition(k - 1, -1)
        packed = packed[..., :k]
    packed.sort(-1)
    np.bitwise_and(packed, _LOW, packed)
    np.copyto(places, packed, "unsafe")


def _pick_few(values: Array, places: Array, room: Array) -> bool:
    """Find the few largest of a long row in three passes; ``False`` where there are too many candidates, or NaN.

    The row is cut into parts, more than elements are wanted. Of the largest of each part, the last one that is wanted
    is a bound: no wanted element is smaller.
    """
    n, k = len(values), len(places)
    parts = n // PART
    whole = values[: parts * PART]
    largest = room.view(np.float32)[:parts]
    across = as_strided(whole, (PART, parts), (parts * whole.strides[0], whole.strides[0]))
    np.maximum.reduce(across, axis=0, out=largest)
    rest = values[parts * PART :]
    if np.isnan(np.maximum.reduce(largest)) or np.isnan(rest).any():
        return False
    largest.partition(parts - k)
    bound = largest[parts - k]
    is_candidate = room.view(np.bool_)[:n]
    np.greater_equal(values, bound, is_candidate)
    if np.count_nonzero(is_candidate) > n // PART + k:
        return False
    candidates = np.flatnonzero(is_candidate)
    order = np.argsort(-values[candidates], kind="stable")[:k]
    places[...] = candidates[order]
    return True


def _keys(values: Array, numbers: Array, room: Array) -> Array:
    """u32 keys that are ordered as the values, made in ``numbers``, with the bytes of ``room`` to work in."""
    keys = numbers.view(np.uint32)
    if numbers.dtype.kind == "i":
        np.copyto(numbers, values)
        np.bitwise_xor(keys, _SIGN, keys)
        return keys
    np.add(values, np.float32(0), numbers, dtype=np.float32)  # -0 becomes 0
    size = numbers.size
    undefined = room.reshape(-1).view(np.bool_)[:size].reshape(numbers.shape)
    np.not_equal(numbers, numbers, undefined)
    some_undefined = undefined.any()
    # The bits of floats are ordered as signed magnitudes: of negative ones all are turned, of others the sign.
    turned = room.reshape(-1).view(np.int32)[size : 2 * size].reshape(numbers.shape)
    np.right_shift(numbers.view(np.int32), np.int32(31), turned)
    np.bitwise_or(turned.view(np.uint32), _SIGN, turned.view(np.uint32))
    np.bitwise_xor(keys, turned.view(np.uint32), keys)
    if some_undefined:
        np.copyto(keys, _ALL, where=undefined)
    return keys


@KERNELS("argsort", dtypes=LONG)
def argsort_long(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, descending: bool, stable: bool) -> Call:
    return _bind_long(out, x, axis, descending, stable, x.shape[axis])


@KERNELS("top_k", dtypes=LONG)
def top_k_long(stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int) -> Call:
    return _bind_long(out, x, axis, True, True, k)


def _bind_long(out: Arg, x: Arg, axis: int, descending: bool, stable: bool, k: int) -> Call:
    values, places = x.view.swapaxes(axis, -1), out.view.swapaxes(axis, -1)
    cuts = tile_cuts(values.shape, _rows(x, axis), keep_last=True)
    pieces = [(values[cut], places[cut]) for cut in cuts]
    return partial(_sort_long, pieces, descending, "stable" if stable else None, k)


def _sort_long(pieces: Sequence[tuple[Array, Array]], descending: bool, kind: Any, k: int) -> None:
    for values, places in pieces:
        if descending:
            # Sorted backwards as a whole, equals would change places: so they are turned around beforehand.
            order = values[..., ::-1].argsort(-1, kind)[..., ::-1][..., :k]
            np.subtract(values.shape[-1] - 1, order, places)
        else:
            places[...] = values.argsort(-1, kind)


# --- cumsum ---------------------------------------------------------------------------------------------------------

BLOCK: Final = 512
"""The longest running sum in f32; to each block the sum before it is added afterwards."""

SHORT_BLOCK: Final = 32
"""The same where a product makes the running sums of a block."""


@KERNELS("cumsum", dtypes=LONG)
def cumsum_long(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    return partial(np.add.accumulate, x.view, axis, None, out.view)


def _by_products(x: Arg, out: Arg, axis: int) -> bool:
    """Whether BLAS can make the running sums: many short blocks that lie side by side."""
    item, n = x.dtype.itemsize, x.shape[axis]
    return (
        n >= 2 * SHORT_BLOCK
        and x.strides[axis] == out.strides[axis] == item
        and all(stride >= n * item for arg in (x, out) for i, stride in enumerate(arg.strides) if i != axis)
    )


def _carry_bytes(blocks: int) -> int:
    return padded(blocks * _F64.itemsize) + padded(blocks * _F32.itemsize)


def _carry_workspace(step: Step) -> int:
    x, axis = step.srcs[0], step.attrs["axis"]
    n = x.shape[axis]
    blocks = _carry_bytes(x.size // n * (n // BLOCK))
    if not _by_products(x, step.out, axis):
        return blocks
    return max(blocks, _carry_bytes(tile_rows(x.size, n, x.dtype) * (n // SHORT_BLOCK)))


@KERNELS("cumsum", dtypes="f32", workspace=_carry_workspace)
def cumsum(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, workspace: Arg | None) -> Call:
    source, target = np.moveaxis(x.view, axis, -1), np.moveaxis(out.view, axis, -1)
    one_by_one = _sums_in_blocks(stream, source, target, workspace)
    if not _by_products(x, out, axis):
        return one_by_one
    n = source.shape[-1]
    rows = tile_rows(x.size, n, x.dtype)
    # Row k of the matrix adds element k to itself and all behind it.
    matrix = np.triu(np.ones((SHORT_BLOCK, SHORT_BLOCK), np.float32))
    pieces = []
    for cut in tile_cuts(target.shape, rows, keep_last=True):
        some, result, scratch = source[cut], target[cut], Scratch(workspace)
        blocks_in, blocks_out = (_blocks(a, n // SHORT_BLOCK, SHORT_BLOCK) for a in (some, result))
        ends = scratch.take(blocks_out.shape[:-1], _F64)
        carry = scratch.take(ends.shape, _F32)
        rest = n % SHORT_BLOCK
        tail = (some[..., n - rest :], result[..., n - rest :]) if rest else None
        pieces.append((blocks_in, blocks_out, ends, carry, tail))
    return partial(_sum_by_products, pieces, matrix, one_by_one)


def _sum_by_products(
    pieces: Sequence[tuple[Array, Array, Array, Array, tuple[Array, Array] | None]], matrix: Array, one_by_one: Call
) -> None:
    """Running sums within blocks by a product, then the sum of the blocks before each.

    A product with an infinity or NaN makes NaN of what stands before it in the block: then all is added up
    ``one_by_one``.
    """
    for x, out, ends, carry, tail in pieces:
        np.matmul(x, matrix, out)
        np.copyto(ends, out[..., -1])
        np.add.accumulate(ends, -1, None, ends)
        if not np.isfinite(ends[..., -1]).all():
            one_by_one()
            return
        np.copyto(carry, ends, "unsafe")
        later = out[..., 1:, :]
        np.add(later, carry[..., :-1, None], later)
        if tail is not None:
            np.add.accumulate(tail[0], -1, None, tail[1])
            np.add(tail[1], carry[..., -1:], tail[1])


def _sums_in_blocks(stream: Stream, source: Array, target: Array, workspace: Arg | None) -> Call:
    """The call that adds up one by one, in blocks."""
    n = source.shape[-1]
    count = n // BLOCK
    if count == 0:
        return _spread_rows(stream, partial(np.add.accumulate, axis=-1), source, target)
    scratch = Scratch(workspace)
    blocks_in, blocks_out = _blocks(source, count, BLOCK), _blocks(target, count, BLOCK)
    ends = scratch.take((*target.shape[:-1], count), _F64)
    carry = scratch.take(ends.shape, _F32)
    calls: list[Call] = [
        _spread_rows(stream, partial(np.add.accumulate, axis=-1), blocks_in, blocks_out),
        partial(np.copyto, ends, blocks_out[..., -1]),
        partial(np.add.accumulate, ends, -1, None, ends),
        partial(np.copyto, carry, ends, "unsafe"),
    ]
    if count > 1:
        later = blocks_out[..., 1:, :]
        calls.append(_spread_rows(stream, np.add, later, later, np.broadcast_to(carry[..., :-1, None], later.shape)))
    if n % BLOCK:
        tail = target[..., count * BLOCK :]
        calls.append(partial(np.add.accumulate, source[..., count * BLOCK :], -1, None, tail))
        calls.append(partial(np.add, tail, carry[..., -1:], tail))
    return in_turn(calls)


def _blocks(x: Array, count: int, length: int) -> Array:
    """The blocks of the last axis as a further axis."""
    *strides, stride = x.strides
    return as_strided(
        x, (*x.shape[:-1], count, length), (*strides, length * stride, stride), writeable=x.flags.writeable
    )


def _spread_rows(stream: Stream, ufunc: Any, x: Array, out: Array, *others: Array) -> Call:
    """The call ``ufunc(x, *others, out=out)``, in threads where it is big, each with some of the rows."""
    axis = max(range(out.ndim - 1), key=lambda i: out.shape[i], default=0)
    count = min(lanes(stream), out.shape[axis]) if out.nbytes >= SPREAD_PASS and out.ndim > 1 else 1
    n = out.shape[axis] if out.ndim > 1 else 1
    if count == 1:
        return partial(ufunc, x, *others, out=out)
    cuts = [(*[slice(None)] * axis, mine) for mine in shares(n, count)]
    return at_once([partial(ufunc, x[c], *[o[c] for o in others], out=out[c]) for c in cuts])


def _half_workspace(step: Step) -> int:
    axis, out = step.attrs["axis"], step.out
    turned = Arg(None, 0, out.dtype, _moved(out.shape, axis), _moved(out.strides, axis))
    return tiled_workspace(Step(step.op, turned, step.srcs, step.attrs), scratch=1, by_rows=True)


def _moved(values: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :], values[axis])


@KERNELS("cumsum", dtypes="f16 bf16", workspace=_half_workspace)
def cumsum_half(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, workspace: Arg | None) -> Call:
    def body(out: Array, x: Array, sums: Array) -> None:
        np.add.accumulate(x, -1, None, sums)
        out[...] = sums

    source, target = np.moveaxis(x.view, axis, -1), np.moveaxis(out.view, axis, -1)
    return bind_tiled(stream, body, target, [source], compute_dtype(out.dtype), workspace, scratch=1, by_rows=True)
