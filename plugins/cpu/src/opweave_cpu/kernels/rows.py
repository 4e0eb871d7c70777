"""Rows replaced by index."""

from __future__ import annotations

from opweave.contract import Arg, Call, Stream
from opweave_cpu.kernels.indexing import index_copy
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.tiles import copy_call, in_turn


@KERNELS("set_rows", dtypes=PLAIN, inplace=True)
def set_rows(stream: Stream, op: str, out: Arg, x: Arg, ids: Arg, rows: Arg) -> Call:
    write: Call = index_copy(stream, op, out, ids, rows)
    if x.buffer is out.buffer and x.offset == out.offset:
        return write
    return in_turn([copy_call(stream, out.view, x.view), write])
