"""Rows replaced by index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.indexing import index_copy
from opweave_opencl.kernels.movement import copy_call
from opweave_opencl.kernels.table import KERNELS, PLAIN

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream


@KERNELS("set_rows", dtypes=PLAIN, inplace=True, moves=True)
def set_rows(stream: OpenCLStream, op: str, out: Arg, x: Arg, ids: Arg, rows: Arg) -> Call:
    """A row whose index is outside of the tensor is left out; of equal indices the last one counts."""
    write: Call = index_copy(stream, op, out, ids, rows)
    if (x.buffer, x.offset) == (out.buffer, out.offset):
        return write
    return in_order([copy_call(stream, out, x), write])
