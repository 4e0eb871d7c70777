"""Gathering and adding up elements by index, replacing regions, and writing states.

torch checks the indices: on the CPU it raises an error, which becomes a `BoundsError` that names the index; on CUDA an
assertion in the kernel fails, after which the process can no longer use the device.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import needs_dense_output
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DTYPES, DType, f32, i64, u8
from opweave.graph.layout import reshape_strides
from opweave_torch.kernels.binding import in_order, raising_bounds_error, same_elements
from opweave_torch.kernels.blocks import Decoding, decoding_arrays
from opweave_torch.kernels.table import KERNELS, NUMBERS, PLAIN, QUANTIZED
from opweave_torch.memory import tensor
from opweave_torch.tunables import limit

__all__ = ["dense_ids_array", "flat_ids", "index_copy", "long_ids_array"]

# --- reading --------------------------------------------------------------------------------------------------------


def dense_ids_array(ids: Arg) -> Arrays:
    """Workspace of `flat_ids`: a dense copy of ids that are neither dense nor of one axis."""
    return {} if ids.is_dense or len(ids.shape) == 1 else {"dense_ids": (ids.dtype, ids.shape)}


def flat_ids(ids: Arg, dense_ids: Arg | None) -> tuple[list[Call], Tensor]:
    """The ids with one axis, and the calls that copy them into their array, if they have one."""
    view = tensor(ids)
    if dense_ids is None:
        return [], view.view(-1)
    dense = tensor(dense_ids)
    return [partial(dense.copy_, view)], dense.view(-1)


@KERNELS("embedding", dtypes=PLAIN, when=needs_dense_output, workspace=lambda step: dense_ids_array(step.srcs[1]))
def embedding(stream: Stream, op: str, out: Arg, table: Arg, ids: Arg, *, dense_ids: Arg | None = None) -> Call:
    calls, indices = flat_ids(ids, dense_ids)
    target = tensor(out).view(ids.size, *table.shape[1:])
    calls.append(partial(torch.index_select, tensor(table), 0, indices, out=target))
    return raising_bounds_error(in_order(calls), op, tensor(ids), table.shape[0])


BLOCKS_PER_TILE: Final = limit("embedding_blocks", 1 << 13, 1, 1 << 18)
"""Blocks that are decoded at a time."""


def _rows_per_tile(table: Arg, ids: Arg) -> int:
    blocks = table.size // table.shape[0] // table.dtype.block
    return min(ids.size, max(1, BLOCKS_PER_TILE.value // blocks))


def _decoded_rows_arrays(step: Step) -> Arrays:
    table, ids = step.srcs
    rows, dtype = _rows_per_tile(table, ids), table.dtype
    blocks = table.size // table.shape[0] // dtype.block
    stored = {"stored": (u8, (rows, blocks * dtype.itemsize))}
    return {**dense_ids_array(ids), **stored, **decoding_arrays(dtype, rows * blocks)}


@KERNELS("embedding", dtypes=[f32, *QUANTIZED], when=needs_dense_output, workspace=_decoded_rows_arrays)
def embedding_of_blocks(
    stream: Stream, op: str, out: Arg, table: Arg, ids: Arg, *, blocks: DType, stored: Arg, **arrays: Arg
) -> Call:
    """Copies and decodes at most `BLOCKS_PER_TILE` blocks at a time, or one row, which bounds the workspace."""
    rows = tensor(table)
    calls, indices = flat_ids(ids, arrays.get("dense_ids"))
    each = rows.shape[1:]  # (..., blocks, bytes of a block)
    count = stored.shape[0]
    copied = tensor(stored).view(count, *each)
    decoding = Decoding(blocks, copied.numel() // blocks.itemsize, arrays, rows.device)
    values = decoding.values.view(count, *each[:-1], blocks.block)
    target = tensor(out).view(ids.size, *each[:-1], blocks.block)
    for first in range(0, ids.size, count):
        some = indices[first : first + count]
        part = copied[: len(some)]
        calls += [
            partial(torch.index_select, rows, 0, some, out=part),
            *decoding.load(part),
            *decoding.calls,
            partial(target[first : first + count].copy_, values[: len(some)]),
        ]
    return raising_bounds_error(in_order(calls), op, tensor(ids), table.shape[0])


def long_ids_array(ids: Arg) -> Arrays:
    """Workspace of `_long_ids`."""
    return {} if ids.dtype is i64 else {"long_ids": (i64, ids.shape)}


def _long_ids(ids: Arg, long_ids: Arg | None) -> tuple[list[Call], Tensor]:
    """The ids as i64, and the calls that convert those of another type: not every function of torch takes these."""
    view = tensor(ids)
    if long_ids is None:
        return [], view
    longs = tensor(long_ids)
    return [partial(longs.copy_, view)], longs


@KERNELS("take_along_axis", dtypes=PLAIN, workspace=lambda step: long_ids_array(step.srcs[1]))
def take_along_axis(
    stream: Stream, op: str, out: Arg, x: Arg, ids: Arg, *, axis: int, long_ids: Arg | None = None
) -> Call:
    calls, indices = _long_ids(ids, long_ids)
    calls.append(partial(torch.gather, tensor(x), axis, indices, out=tensor(out)))
    return raising_bounds_error(in_order(calls), op, tensor(ids), x.shape[axis])


# --- adding up ------------------------------------------------------------------------------------------------------


def _sum_arrays(step: Step) -> Arrays:
    """Half types are added up in f32. Rows are copied where the axes of the ids cannot be merged in a view of them."""
    ids, rows = step.srcs
    dense = dense_ids_array(ids)
    if rows.dtype.is_half:
        return {**dense, "dense_rows": (f32, rows.shape), "sums": (f32, step.out.shape)}
    merged = (ids.size, *rows.shape[len(ids.shape) :])
    if reshape_strides(rows.shape, rows.strides, merged, rows.dtype) is None:
        return {**dense, "dense_rows": (rows.dtype, rows.shape)}
    return dense


@KERNELS("index_add", dtypes=NUMBERS, workspace=_sum_arrays)
def index_add(
    stream: Stream, op: str, out: Arg, ids: Arg, rows: Arg, *, n: int, dense_ids: Arg | None = None, **arrays: Arg
) -> Call:
    source, target = tensor(arrays.get("dense_rows", rows)), tensor(out)
    calls, indices = flat_ids(ids, dense_ids)
    if "dense_rows" in arrays:
        calls.append(partial(source.copy_, tensor(rows)))
    total = tensor(arrays.get("sums", out))
    calls += [total.zero_, partial(total.index_add_, 0, indices, source.view(ids.size, *out.shape[1:]))]
    if "sums" in arrays:
        calls.append(partial(target.copy_, total))
    return raising_bounds_error(in_order(calls), op, tensor(ids), n)


# --- regions of a tensor --------------------------------------------------------------------------------------------


@KERNELS("set_region", dtypes=PLAIN, inplace=True)
@KERNELS("add_region", dtypes=NUMBERS, inplace=True)
def region(stream: Stream, op: str, out: Arg, x: Arg, value: Arg, *, offsets: tuple[int, ...]) -> Call:
    target, source = tensor(out), tensor(x)
    window = target[tuple([slice(at, at + n) for at, n in zip(offsets, value.shape, strict=True)])]
    write: Call = partial(window.copy_ if op == "set_region" else window.add_, tensor(value))
    return write if same_elements(target, source) else in_order([partial(target.copy_, source), write])


# --- writing --------------------------------------------------------------------------------------------------------


@KERNELS("index_copy", dtypes=DTYPES.values(), workspace=lambda step: long_ids_array(step.srcs[0]))
def index_copy(stream: Stream, op: str, out: Arg, ids: Arg, rows: Arg, *, long_ids: Arg | None = None) -> Call:
    calls, indices = _long_ids(ids, long_ids)
    calls.append(partial(tensor(out).index_copy_, 0, indices, tensor(rows)))
    return raising_bounds_error(in_order(calls), op, tensor(ids), out.shape[0])


@KERNELS("assign", dtypes=DTYPES.values())
def assign(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(tensor(out).copy_, tensor(x))


@KERNELS("accumulate", dtypes=NUMBERS)
def accumulate(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(tensor(out).add_, tensor(x))
