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

from opweave.contract import NEVER, Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import as_dtype
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.table import HALVES, KERNELS, PLAIN
from opweave_cpu.tiles import (
    Array,
    aligned,
    at_once,
    bind_tiled,
    in_turn,
    most_workers,
    shares,
    tile_cuts,
    tile_rows,
    tile_scratch,
    window,
    workers_of,
)
from opweave_cpu.tunables import SPREAD_PASS, limit

_F32: Final = as_dtype("f32")
_I32: Final = as_dtype("i32")
_I64: Final = as_dtype("i64")
_SIGN: Final = np.array(0x80000000, np.uint32)
_ALL: Final = np.array(0xFFFFFFFF, np.uint32)
_LOW: Final = np.array(0xFFFFFFFF, np.uint64)
_HALF: Final = np.array(32, np.uint64)


# --- argsort and top_k ----------------------------------------------------------------------------------------------

SHORT_ROW: Final = limit("short_sorted_row", 1024, 1, 1 << 14)
"""Elements in a row up to which NumPy's own unstable sort of indices is faster than making keys."""

SEVERAL: Final = limit("top_k_share", 256, 64, 1 << 12, bounds=(64, NEVER))
"""Elements of a row for each wanted one, from which on `top_k` is faster if `_pick_few` rules out most of them."""

FEW: Final = limit("top_k_elements", 1 << 10, 1, 1 << 14)
"""Elements up to which `top_k` takes NumPy's own sort of indices, one pass, although keys are sorted faster."""

PART: Final = 64
"""Elements in each of the parts whose largest ones `_pick_few` compares."""

LONG: Final = "f64 i64"


def _rows(x: Arg, axis: int) -> int:
    """Rows of a tile whose indices, of 8 bytes each, fit it."""
    return tile_rows(x.size, x.shape[axis], _I64.itemsize)


def _packed_workspace(step: Step) -> Arrays:
    """The packed elements of a tile, and the numbers that keys are made in; nothing for elements of eight bytes."""
    x, axis = step.srcs[0], step.attrs["axis"]
    if x.dtype.itemsize == 8:
        return {}
    tile = most_workers(x.size * _I64.itemsize), aligned(_rows(x, axis) * x.shape[axis], _F32)
    return {"packed": (_I64, tile), "numbers": (_F32 if x.dtype.is_float else _I32, tile)}


def _argsort_workspace(step: Step) -> Arrays:
    """Nothing where NumPy's own sort of indices is faster."""
    x, attrs = step.srcs[0], step.attrs
    few = not attrs["stable"] and x.shape[attrs["axis"]] <= SHORT_ROW.value and x.dtype.itemsize == 4
    return {} if few else _packed_workspace(step)


@KERNELS("argsort", dtypes=PLAIN, workspace=_argsort_workspace)
def argsort(
    stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, descending: bool, stable: bool, **scratch: Arg
) -> Call:
    if not scratch:
        return _bind_indirect(out, x, axis, descending, stable, x.shape[axis])
    return _bind_packed(stream, out, x, axis, descending, None, **scratch)


def _top_k_workspace(step: Step) -> Arrays:
    """Nothing where NumPy's own sort of indices is faster."""
    x = step.srcs[0]
    return {} if x.size <= FEW.value and x.dtype.itemsize == 4 else _packed_workspace(step)


@KERNELS("top_k", dtypes=PLAIN, workspace=_top_k_workspace)
def top_k(stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int, **scratch: Arg) -> Call:
    if not scratch:
        return _bind_indirect(out, x, axis, True, True, k)
    return _bind_packed(stream, out, x, axis, True, k, **scratch)


def _bind_packed(
    stream: Stream, out: Arg, x: Arg, axis: int, descending: bool, k: int | None, packed: Arg, numbers: Arg
) -> Call:
    values, order = x.view.swapaxes(axis, -1), out.view.swapaxes(axis, -1)
    cuts = tile_cuts(values.shape, _rows(x, axis), keep_last=True)
    words, jobs = packed.view.view(np.uint64), []
    for worker, mine in enumerate(shares(len(cuts), min(workers_of(stream), packed.shape[0], len(cuts)))):
        tiles = [(values[c], order[c]) for c in cuts[mine]]
        several = k is not None and values.dtype == np.float32 and k * SEVERAL.value <= values.shape[-1]
        jobs.append(partial(_sort_packed, tiles, words[worker], numbers.view[worker], descending, k, several))
    return at_once(jobs)


def _sort_packed(
    tiles: Sequence[tuple[Array, Array]],
    words: Array,
    numbers: Array,
    descending: bool,
    k: int | None,
    picks: bool,
) -> None:
    """Sort the rows of tiles; where it ``picks``, try first to find the k wanted elements of each row."""
    index = np.arange(tiles[0][0].shape[-1], dtype=np.uint32)
    if not picks:
        for values, order in tiles:
            _sort_rows(values, order, words, numbers, index, descending, k)
        return
    for values, order in tiles:
        for row in np.ndindex(values.shape[:-1]):
            if not _pick_few(values[row], order[row], words):
                _sort_rows(values[row], order[row], words, numbers, index, descending, k)


def _sort_rows(
    values: Array, order: Array, words: Array, numbers: Array, index: Array, descending: bool, k: int | None
) -> None:
    packed = window(words, values.shape)
    keys = _keys(values, window(numbers, values.shape), packed)
    if descending:
        np.invert(keys, keys)
    np.left_shift(keys, _HALF, packed, dtype=np.uint64)
    np.bitwise_or(packed, index, packed)
    if k is not None and k < values.shape[-1]:
        packed.partition(k - 1, -1)
        packed = packed[..., :k]
    packed.sort(-1)
    np.bitwise_and(packed, _LOW, packed)
    np.copyto(order, packed, "unsafe")


def _pick_few(values: Array, order: Array, words: Array) -> bool:
    """Find the few largest of a long row in three passes; ``False`` where there are too many candidates, or NaN.

    The row is cut into more parts than the k elements that are wanted. The k-th of the largest elements of the parts
    is a bound: no wanted element is smaller.
    """
    n, k = len(values), len(order)
    parts = n // PART
    whole = values[: parts * PART]
    largest = words.view(np.float32)[:parts]
    across = as_strided(whole, (PART, parts), (parts * whole.strides[0], whole.strides[0]))
    np.maximum.reduce(across, axis=0, out=largest)
    rest = values[parts * PART :]
    if np.isnan(np.maximum.reduce(largest)) or np.isnan(rest).any():
        return False
    largest.partition(parts - k)
    bound = largest[parts - k]
    is_candidate = words.view(np.bool_)[:n]
    np.greater_equal(values, bound, is_candidate)
    if np.count_nonzero(is_candidate) > n // PART + k:
        return False
    candidates = np.flatnonzero(is_candidate)
    order[...] = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return True


def _keys(values: Array, numbers: Array, words: Array) -> Array:
    """u32 keys that are ordered as the values, made in ``numbers``, with the bytes of ``words`` to work in."""
    keys = numbers.view(np.uint32)
    if numbers.dtype.kind == "i":
        np.copyto(numbers, values)
        np.bitwise_xor(keys, _SIGN, keys)
        return keys
    np.add(values, np.float32(0), numbers, dtype=np.float32)  # -0 becomes 0
    size = numbers.size
    undefined = words.reshape(-1).view(np.bool_)[:size].reshape(numbers.shape)
    np.not_equal(numbers, numbers, undefined)
    some_undefined = undefined.any()
    # The bits of floats are ordered as signed magnitudes: of negative ones all are flipped, of others the sign.
    flipped = words.reshape(-1).view(np.int32)[size : 2 * size].reshape(numbers.shape)
    np.right_shift(numbers.view(np.int32), np.int32(31), flipped)
    np.bitwise_or(flipped.view(np.uint32), _SIGN, flipped.view(np.uint32))
    np.bitwise_xor(keys, flipped.view(np.uint32), keys)
    if some_undefined:
        np.copyto(keys, _ALL, where=undefined)
    return keys


def _bind_indirect(out: Arg, x: Arg, axis: int, descending: bool, stable: bool, k: int) -> Call:
    """The call of NumPy's own sort of indices, which compares the elements at these."""
    values, order = x.view.swapaxes(axis, -1), out.view.swapaxes(axis, -1)
    tiles = [(values[cut], order[cut]) for cut in tile_cuts(values.shape, _rows(x, axis), keep_last=True)]
    return partial(_sort_indirect, tiles, descending, "stable" if stable else None, k)


def _sort_indirect(tiles: Sequence[tuple[Array, Array]], descending: bool, kind: Any, k: int) -> None:
    for values, order in tiles:
        if descending:
            # Equal elements come out in order of their indices: the reversed row is sorted, and the result reversed.
            backwards = values[..., ::-1].argsort(-1, kind)[..., ::-1][..., :k]
            np.subtract(values.shape[-1] - 1, backwards, order)
        else:
            order[...] = values.argsort(-1, kind)


# --- cumsum ---------------------------------------------------------------------------------------------------------

BLOCK: Final = limit("running_block", 512, 1, 512, bounds=(1, 512))
"""The longest running sum in f32; to each block the sum before it is added afterwards."""

SHORT_BLOCK: Final = limit("short_running_block", 32, 2, 256, bounds=(2, 512))
"""The same where a product makes the running sums of a block."""


def _why_not_compiled(step: Step) -> str | None:
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.rows import fits_running

    return None if fits_running(step) else "it adds up along a last axis whose elements lie side by side"


@KERNELS("cumsum", dtypes=f"f32 f64 {HALVES}", when=_why_not_compiled)
def running_sums(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    from opweave_cpu.jit.rows import bind_running

    return bind_running(stream, out, x)


@KERNELS("cumsum", dtypes=LONG)
def cumsum_long(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    return partial(np.add.accumulate, x.view, axis, None, out.view)


def _by_products(x: Arg, out: Arg, axis: int) -> bool:
    """Whether BLAS can make the running sums: many short blocks that lie side by side."""
    item, n = x.dtype.itemsize, x.shape[axis]
    return (
        n >= 2 * SHORT_BLOCK.value
        and x.strides[axis] == out.strides[axis] == item
        and all(stride >= n * item for arg in (x, out) for i, stride in enumerate(arg.strides) if i != axis)
    )


def _carry_workspace(step: Step) -> Arrays:
    """The sum at the end of each block, in f64 while they are added up, then in f32."""
    x, axis = step.srcs[0], step.attrs["axis"]
    n = x.shape[axis]
    blocks = x.size // n * (n // BLOCK.value)
    if _by_products(x, step.out, axis):
        blocks = max(blocks, tile_rows(x.size, n, x.dtype.itemsize) * (n // SHORT_BLOCK.value))
    return {"ends": ("f64", (blocks,)), "carry": (_F32, (blocks,))}


@KERNELS("cumsum", dtypes="f32", workspace=_carry_workspace)
def cumsum(
    stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, ends: Arg | None = None, carry: Arg | None = None
) -> Call:
    source, target = np.moveaxis(x.view, axis, -1), np.moveaxis(out.view, axis, -1)
    if ends is None or carry is None:  # a row is no longer than a block
        return _spread_rows(stream, partial(np.add.accumulate, axis=-1), source, target)
    one_by_one = _sums_in_blocks(stream, source, target, ends.view, carry.view)
    if not _by_products(x, out, axis):
        return one_by_one
    n = source.shape[-1]
    # Row k of the matrix adds element k to itself and all behind it.
    matrix = np.triu(np.ones((SHORT_BLOCK.value, SHORT_BLOCK.value), np.float32))
    tiles = []
    for cut in tile_cuts(target.shape, tile_rows(x.size, n, x.dtype.itemsize), keep_last=True):
        some, result = source[cut], target[cut]
        blocks_in, blocks_out = (_blocks(a, n // SHORT_BLOCK.value, SHORT_BLOCK.value) for a in (some, result))
        last, before = (window(a.view, blocks_out.shape[:-1]) for a in (ends, carry))
        rest = n % SHORT_BLOCK.value
        tail = (some[..., n - rest :], result[..., n - rest :]) if rest else None
        tiles.append((blocks_in, blocks_out, last, before, tail))
    return partial(_sum_by_products, tiles, matrix, one_by_one)


def _sum_by_products(
    tiles: Sequence[tuple[Array, Array, Array, Array, tuple[Array, Array] | None]], matrix: Array, one_by_one: Call
) -> None:
    """Computes running sums within blocks by a product, then adds the sum of the blocks before each.

    A product with an infinity or NaN makes NaN of what stands before it in the block: then all is added up
    ``one_by_one``.
    """
    for x, out, ends, carry, tail in tiles:
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


def _sums_in_blocks(stream: Stream, source: Array, target: Array, flat_ends: Array, flat_carry: Array) -> Call:
    """The call that adds up one by one, in blocks."""
    n = source.shape[-1]
    count = n // BLOCK.value
    if count == 0:
        return _spread_rows(stream, partial(np.add.accumulate, axis=-1), source, target)
    blocks_in, blocks_out = _blocks(source, count, BLOCK.value), _blocks(target, count, BLOCK.value)
    ends, carry = (window(flat, blocks_out.shape[:-1]) for flat in (flat_ends, flat_carry))
    calls: list[Call] = [
        _spread_rows(stream, partial(np.add.accumulate, axis=-1), blocks_in, blocks_out),
        partial(np.copyto, ends, blocks_out[..., -1]),
        partial(np.add.accumulate, ends, -1, None, ends),
        partial(np.copyto, carry, ends, "unsafe"),
    ]
    if count > 1:
        later = blocks_out[..., 1:, :]
        calls.append(_spread_rows(stream, np.add, later, later, np.broadcast_to(carry[..., :-1, None], later.shape)))
    if n % BLOCK.value:
        tail = target[..., count * BLOCK.value :]
        calls.append(partial(np.add.accumulate, source[..., count * BLOCK.value :], -1, None, tail))
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
    count = min(workers_of(stream), out.shape[axis]) if out.nbytes >= SPREAD_PASS.value and out.ndim > 1 else 1
    n = out.shape[axis] if out.ndim > 1 else 1
    if count == 1:
        return partial(ufunc, x, *others, out=out)
    cuts = [(*[slice(None)] * axis, mine) for mine in shares(n, count)]
    return at_once([partial(ufunc, x[c], *[o[c] for o in others], out=out[c]) for c in cuts])


def _half_workspace(step: Step) -> Arrays:
    axis, out = step.attrs["axis"], step.out
    turned = Arg(None, 0, out.dtype, _moved(out.shape, axis), _moved(out.strides, axis))
    return tile_scratch(step._replace(out=turned), tiles=1, by_rows=True)


def _moved(values: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :], values[axis])


@KERNELS("cumsum", dtypes=HALVES, workspace=_half_workspace)
def cumsum_half(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, tiles: Arg) -> Call:
    def body(out: Array, x: Array, sums: Array) -> None:
        np.add.accumulate(x, -1, None, sums)
        out[...] = sums

    source, target = np.moveaxis(x.view, axis, -1), np.moveaxis(out.view, axis, -1)
    return bind_tiled(stream, body, target, [source], tiles, by_rows=True)
