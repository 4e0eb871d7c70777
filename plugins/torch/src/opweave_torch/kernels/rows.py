"""Rows replaced by index."""

from __future__ import annotations

from functools import partial

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.binding import in_order, same_elements
from opweave_torch.kernels.indexing import index_copy, long_ids_array
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import tensor


@KERNELS("set_rows", dtypes=PLAIN, inplace=True, workspace=lambda step: long_ids_array(step.srcs[1]))
def set_rows(stream: Stream, op: str, out: Arg, x: Arg, ids: Arg, rows: Arg, *, long_ids: Arg | None = None) -> Call:
    write: Call = index_copy(stream, op, out, ids, rows, long_ids=long_ids)
    target, source = tensor(out), tensor(x)
    return write if same_elements(target, source) else in_order([partial(target.copy_, source), write])
