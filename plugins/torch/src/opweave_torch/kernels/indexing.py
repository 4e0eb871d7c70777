"""Elements picked and added up by index, regions replaced, and states written.

torch checks the indices: on the CPU as an error, which here gets to name the index; on CUDA in the kernel, which ends
the use of the device by the process.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import reshape_strides
from opweave_torch.kernels.binding import F32, I64, Scratch, in_turn, lies_over, naming_ids, padded
from opweave_torch.kernels.blocks import Decoding, decoding_bytes
from opweave_torch.kernels.table import HALVES, INTEGERS, KERNELS, PLAIN, QUANTIZED, WIDE
from opweave_torch.memory import tensor

U8: Final = as_dtype("u8")


# --- reading --------------------------------------------------------------------------------------------------------


def _needs_packed_output(step: Step) -> str | None:
    return None if step.out.is_dense else "the output is not dense"


def _ids_workspace(step: Step, which: int) -> int:
    """Room for a packed copy of ids that are no single line."""
    ids = step.srcs[which]
    return 0 if ids.is_dense or len(ids.shape) == 1 else padded(ids.size * ids.dtype.itemsize)


def _line_of(ids: Arg, scratch: Scratch) -> tuple[list[Call], torch.Tensor]:
    """The ids with one axis, and the calls that pack them where they do not lie that way."""
    view = tensor(ids)
    if ids.is_dense or view.ndim == 1:
        return [], view.view(-1)
    line = scratch.take(ids.shape, ids.dtype)
    return [partial(line.copy_, view)], line.view(-1)


@KERNELS("embedding", dtypes=PLAIN, when=_needs_packed_output, workspace=lambda step: _ids_workspace(step, 1))
def embedding(stream: Stream, op: str, out: Arg, table: Arg, ids: Arg, *, workspace: Arg | None) -> Call:
    calls, line = _line_of(ids, Scratch(workspace))
    target = tensor(out).view(ids.size, *table.shape[1:])
    calls.append(partial(torch.index_select, tensor(table), 0, line, out=target))
    return naming_ids(in_turn(calls), op, tensor(ids), table.shape[0])


BLOCKS_PER_TILE: Final = 1 << 13
"""Blocks that are decoded at a time."""


def _rows_per_tile(table: Arg, ids: Arg) -> int:
    blocks = table.size // table.shape[0] // table.dtype.block
    return min(ids.size, max(1, BLOCKS_PER_TILE // blocks))


def _picked_workspace(step: Step) -> int:
    table, ids = step.srcs
    row = table.size // table.shape[0] // table.dtype.block
    count = _rows_per_tile(table, ids) * row
    return _ids_workspace(step, 1) + padded(count * table.dtype.itemsize) + decoding_bytes(table.dtype, count)


@KERNELS("embedding", dtypes=[F32, *QUANTIZED], when=_needs_packed_output, workspace=_picked_workspace)
def embedding_of_blocks(
    stream: Stream, op: str, out: Arg, table: Arg, ids: Arg, *, blocks: DType, workspace: Arg
) -> Call:
    """So many rows at a time that what is picked stays small."""
    scratch, rows = Scratch(workspace), tensor(table)
    calls, line = _line_of(ids, scratch)
    each = rows.shape[1:]  # (..., blocks, bytes of a block)
    step = _rows_per_tile(table, ids)
    picked = scratch.take((step, *each), U8)
    decoding = Decoding(blocks, picked.numel() // blocks.itemsize, scratch, rows.device)
    values = decoding.values.view(step, *each[:-1], blocks.block)
    target = tensor(out).view(ids.size, *each[:-1], blocks.block)
    for first in range(0, ids.size, step):
        some = line[first : first + step]
        part = picked[: len(some)]
        calls += [
            partial(torch.index_select, rows, 0, some, out=part),
            *decoding.load(part),
            *decoding.calls,
            partial(target[first : first + step].copy_, values[: len(some)]),
        ]
    return naming_ids(in_turn(calls), op, tensor(ids), table.shape[0])


def _long_ids_workspace(step: Step, which: int) -> int:
    ids = step.srcs[which]
    return 0 if ids.dtype is I64 else ids.size * I64.itemsize


def _long_ids(ids: Arg, workspace: Arg | None) -> tuple[list[Call], torch.Tensor]:
    """The ids as i64, and the calls that make them such: not every function takes others."""
    view = tensor(ids)
    if workspace is None:
        return [], view
    longs = Scratch(workspace).take(ids.shape, I64)
    return [partial(longs.copy_, view)], longs


@KERNELS("take_along_axis", dtypes=PLAIN, workspace=lambda step: _long_ids_workspace(step, 1))
def take_along_axis(stream: Stream, op: str, out: Arg, x: Arg, ids: Arg, *, axis: int, workspace: Arg | None) -> Call:
    calls, places = _long_ids(ids, workspace)
    calls.append(partial(torch.gather, tensor(x), axis, places, out=tensor(out)))
    return naming_ids(in_turn(calls), op, tensor(ids), x.shape[axis])


# --- adding up ------------------------------------------------------------------------------------------------------


def _must_pack(ids: Arg, rows: Arg) -> bool:
    """Whether the axes of ids are not one in the memory of the rows."""
    line = (ids.size, *rows.shape[len(ids.shape) :])
    return reshape_strides(rows.shape, rows.strides, line, rows.dtype) is None


def _sum_workspace(step: Step) -> int:
    ids, rows = step.srcs
    room = _ids_workspace(step, 0)
    if rows.dtype.is_half:
        room += padded(rows.size * F32.itemsize) + padded(step.out.size * F32.itemsize)
    elif _must_pack(ids, rows):
        room += padded(rows.nbytes)
    return room


@KERNELS("index_add", dtypes=f"{WIDE} {HALVES} {INTEGERS}", workspace=_sum_workspace)
def index_add(stream: Stream, op: str, out: Arg, ids: Arg, rows: Arg, *, n: int, workspace: Arg | None) -> Call:
    scratch, source, target = Scratch(workspace), tensor(rows), tensor(out)
    calls, line = _line_of(ids, scratch)
    half = out.dtype.is_half
    if half or _must_pack(ids, rows):
        packed = scratch.take(rows.shape, F32 if half else rows.dtype)
        calls.append(partial(packed.copy_, source))
        source = packed
    sums = scratch.take(out.shape, F32) if half else target
    source = source.view(ids.size, *out.shape[1:])
    calls += [sums.zero_, partial(sums.index_add_, 0, line, source)]
    if half:
        calls.append(partial(target.copy_, sums))
    return naming_ids(in_turn(calls), op, tensor(ids), n)


# --- regions of a tensor --------------------------------------------------------------------------------------------


def _window(out: torch.Tensor, value: Arg, offsets: tuple[int, ...]) -> torch.Tensor:
    return out[tuple([slice(at, at + n) for at, n in zip(offsets, value.shape, strict=True)])]


@KERNELS("set_region", dtypes=PLAIN, inplace=True)
@KERNELS("add_region", dtypes=f"{WIDE} {HALVES} {INTEGERS}", inplace=True)
def region(stream: Stream, op: str, out: Arg, x: Arg, value: Arg, *, offsets: tuple[int, ...]) -> Call:
    target, source = tensor(out), tensor(x)
    window = _window(target, value, offsets)
    write: Call = partial(window.copy_ if op == "set_region" else window.add_, tensor(value))
    return write if lies_over(target, source) else in_turn([partial(target.copy_, source), write])


# --- writing --------------------------------------------------------------------------------------------------------


@KERNELS("index_copy", dtypes=PLAIN, workspace=lambda step: _long_ids_workspace(step, 0))
def index_copy(stream: Stream, op: str, out: Arg, ids: Arg, rows: Arg, *, workspace: Arg | None) -> Call:
    calls, places = _long_ids(ids, workspace)
    calls.append(partial(tensor(out).index_copy_, 0, places, tensor(rows)))
    return naming_ids(in_turn(calls), op, tensor(ids), out.shape[0])


@KERNELS("assign", dtypes=PLAIN)
def assign(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(tensor(out).copy_, tensor(x))


@KERNELS("accumulate", dtypes=f"{WIDE} {HALVES} {INTEGERS}")
def accumulate(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(tensor(out).add_, tensor(x))
