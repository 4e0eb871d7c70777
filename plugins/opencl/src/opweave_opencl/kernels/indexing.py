"""Elements and rows by index, and regions.

Indices are known on the device only: one out of bounds is recorded there (`IndexChecks`) and raised where the host
waits; the kernel goes on without the element or row that it would name.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DTYPES, DType
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.movement import WORDS, as_words, copy_call, window_of
from opweave_opencl.kernels.pointwise import bind_pointwise, walk_words
from opweave_opencl.kernels.reduction import accumulator
from opweave_opencl.kernels.table import KERNELS, NUMBERS, PLAIN
from opweave_opencl.kernels.words import access
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded, padded_strides
from opweave_opencl.tuning import CHUNK, GROUPS

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

# --- reading --------------------------------------------------------------------------------------------------------


@KERNELS("embedding", dtypes=PLAIN, moves=True)
def embedding(stream: OpenCLStream, op: str, out: Arg, table: Arg, ids: Arg) -> Call:
    """A row of the output whose index is outside of the table is zeros."""
    word = WORDS[table.dtype.itemsize]
    return _rows(stream, op, "take", out, table, ids, word)


@KERNELS("take_along_axis", dtypes=PLAIN, moves=True)
def take_along_axis(stream: OpenCLStream, op: str, out: Arg, x: Arg, ids: Arg, *, axis: int) -> Call:
    """An element of the output whose index is outside of the axis is zero."""
    strides = list(x.strides)
    strides[axis] = 0
    aligned = Arg(x.buffer, x.offset, x.dtype, out.shape, tuple(strides))
    words, size, group = walk_words(stream.target.tuning, (aligned, ids, out))
    check = stream.indices.bind(op, x.shape[axis])
    macros = {"T": WORDS[x.dtype.itemsize].name, "ID": ids.dtype.name, "VEC": str(stream.target.tuning.vector)}
    program = stream.target.programs.get("gather", macros | check.macros)
    words += [x.shape[axis], element_strides(x)[axis], *check.words]
    return stream.launch(program, "gather", size, group, (x, ids, out, *check.operands), words)


# --- writing --------------------------------------------------------------------------------------------------------


@KERNELS("index_copy", dtypes=DTYPES.values(), moves=True)
def index_copy(stream: OpenCLStream, op: str, out: Arg, ids: Arg, rows: Arg) -> Call:
    """A row whose index is outside of the state is not written; of equal indices the last one counts."""
    out, rows = as_words(out, rows)
    return _rows(stream, op, "put", rows, out, ids, WORDS[out.dtype.itemsize])


def _sums(step: Step) -> Arrays:
    """Workspace for the sums of types that are added up in another type."""
    acc = accumulator(step.out.dtype)
    return {} if acc is step.out.dtype else {"sums": (acc, step.out.shape)}


@KERNELS("index_add", dtypes=NUMBERS, workspace=_sums)
def index_add(stream: OpenCLStream, op: str, out: Arg, ids: Arg, rows: Arg, *, n: int, sums: Arg | None = None) -> Call:
    """A row whose index is outside of the output is not added."""
    if sums is None:
        return _rows(stream, op, "add", rows, out, ids, rows.dtype)
    return in_order(
        [
            _rows(stream, op, "add", rows, sums, ids, rows.dtype),
            bind_pointwise(stream, [Step("cast", out, (sums,), {"dtype": out.dtype})]),
        ]
    )


@KERNELS("accumulate", dtypes=NUMBERS)
def accumulate(stream: OpenCLStream, op: str, out: Arg, x: Arg) -> Call:
    return bind_pointwise(stream, [Step("add", out, (out, x), {})])


@KERNELS("set_region", dtypes=PLAIN, inplace=True, moves=True)
@KERNELS("add_region", dtypes=NUMBERS, inplace=True)
def region(stream: OpenCLStream, op: str, out: Arg, x: Arg, value: Arg, *, offsets: tuple[int, ...]) -> Call:
    target, source = (window_of(arg, offsets, value.shape) for arg in (out, x))
    calls = []
    if (out.buffer, out.offset) != (x.buffer, x.offset):
        calls.append(copy_call(stream, out, x))
    if value.size:
        if op == "set_region":
            calls.append(copy_call(stream, target, value))
        else:
            calls.append(bind_pointwise(stream, [Step("add", target, (source, value), {})]))
    return in_order(calls)


# --- rows -----------------------------------------------------------------------------------------------------------


def _rows(stream: OpenCLStream, op: str, kernel: str, picked: Arg, table: Arg, ids: Arg, dtype: DType) -> Call:
    """The call of a kernel over rows of ``table`` and the rows that ``ids`` name, of elements of ``dtype``."""
    split = len(ids.shape)
    picked_strides, table_strides = element_strides(picked), element_strides(table)
    shape, strides = coalesce(ids.shape, [picked_strides[:split], element_strides(ids)])
    row_shape, row_strides = coalesce(table.shape[1:], [picked_strides[split:], table_strides[1:]])
    tuning = stream.target.tuning
    lines, rows, count = prod(row_shape[1:]), table.shape[0], ids.size
    wide = tuning.row_group > 1
    columns = tuning.vector if wide else min(row_shape[0], CHUNK.value)
    blocks = -(-row_shape[0] // columns)
    # Each owner of rows reads all indices, so there are only as many owners as keep the device busy.
    wanted = 64 * tuning.units if wide else tuning.wanted // 4
    owners = 1 if kernel == "take" else max(min(rows, wanted // (blocks * lines)), 1)
    numbers = max(1 if wide else CHUNK.value // columns, -(-count // GROUPS.value))
    ranges = -(-rows // owners)
    words = [len(shape), *padded(shape, 1), count, rows, len(row_shape), *padded(row_shape, 1)]
    words += [lines, columns, numbers, ranges]
    words += [element_offset(picked), element_offset(table), element_offset(ids)]
    words += padded_strides((*strides, *row_strides))
    check = stream.indices.bind(op, rows)
    words += [table_strides[0], *check.words]
    macros = {f"{kernel.upper()}_ROWS": "1", "T": dtype.name, "ID": ids.dtype.name, "VEC": str(tuning.vector)}
    macros |= check.macros
    if kernel == "add":
        macros["SUM"] = table.dtype.name
    macros["ACCESSES"] = access(dtype, table.dtype if kernel == "add" else dtype)
    second = -(-count // numbers) if kernel == "take" else -(-rows // ranges)
    size = (blocks, second, min(lines, GROUPS.value))
    group = (1, 1, 1) if not wide else (min(tuning.row_group, _power(blocks)), 1, 1)
    program = stream.target.programs.get("indexing", macros)
    return stream.launch(program, kernel, size, group, (picked, table, ids, *check.operands), words)


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
