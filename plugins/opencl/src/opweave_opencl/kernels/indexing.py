"""Rows by number. Numbers are only known on the device: one outside of the table names no row and changes nothing."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.kernels.movement import WORDS
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS, MOVABLE, PLAIN
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("embedding", dtypes=MOVABLE)
def embedding(stream: OpenCLStream, op: str, out: Arg, table: Arg, ids: Arg) -> Call:
    """A row of the output whose number is outside of the table is zeros."""
    return _indexed(stream, "take", out, table, ids)


@KERNELS("index_copy", dtypes=MOVABLE)
def index_copy(stream: OpenCLStream, op: str, out: Arg, ids: Arg, rows: Arg) -> Call:
    """A row whose number is outside of the state is not written; of equal numbers the last one counts."""
    return _indexed(stream, "put", rows, out, ids)


def _indexed(stream: OpenCLStream, kernel: str, picked: Arg, table: Arg, ids: Arg) -> Call:
    split = len(ids.shape)
    picked_strides, table_strides = element_strides(picked), element_strides(table)
    shape, strides = coalesce(ids.shape, [picked_strides[:split], element_strides(ids)])
    row_shape, row_strides = coalesce(table.shape[1:], [picked_strides[split:], table_strides[1:]])
    width = prod(row_shape)
    words = [len(shape), *padded(shape, 1), ids.size, table.shape[0], width, len(row_shape), *padded(row_shape, 1)]
    words += [element_offset(picked), element_offset(table), element_offset(ids)]
    for own in (*strides, *row_strides):
        words += padded(own, 0)
    words.append(table_strides[0])
    macros = {"ELEMENT": WORDS[table.dtype.itemsize], "ID": PLAIN[ids.dtype.name]}
    numbers = ids.size if kernel == "take" else 1
    size, group = spread((width, numbers, 1), stream.target.tuning.group)
    program = stream.target.programs.get("indexing", macros)
    return stream.launch(program, kernel, size, group, (picked, table, ids), words)
