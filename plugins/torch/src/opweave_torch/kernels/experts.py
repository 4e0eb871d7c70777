"""Mixtures of experts: rows grouped by expert, so that the weights of each are read, and decoded, once.

The host reads which experts have rows, for which it has to wait for the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.contract.workspace import Arrays
from opweave.errors import BoundsError
from opweave.graph.dtypes import DType, as_dtype
from opweave_torch.kernels.binding import in_order, raising_bounds_error, widened
from opweave_torch.kernels.indexing import dense_ids_array, flat_ids
from opweave_torch.kernels.matmul import (
    DecodedRows,
    as_source,
    as_target,
    blocks_why_not,
    decoded_rows_arrays,
    matrix_arrays,
    product,
)
from opweave_torch.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_torch.memory import tensor

# --- expert_linear --------------------------------------------------------------------------------------------------


def _sorted_arrays(step: Step, dtype: DType) -> Arrays:
    """Rows in order of their experts, before and after the product, and the workspace of `matrix_arrays`."""
    x, w, ids = step.srcs
    _, outputs, inputs = w.shape
    arrays = {"sorted_rows": (dtype, (ids.size, inputs)), "sorted_results": (dtype, (ids.size, outputs))}
    return {**arrays, **matrix_arrays(dtype, x, step.out)}


def _plain_arrays(step: Step) -> Arrays:
    return _sorted_arrays(step, step.out.dtype)


@KERNELS("expert_linear", dtypes=NUMBERS, when=lambda step: of_other_type(step, 1), workspace=_plain_arrays)
def expert_linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, **arrays: Arg) -> Call:
    weights = [expert.t() for expert in tensor(w)]

    def multiply(rows: Tensor, expert: int, result: Tensor) -> None:
        product(result, rows, weights[expert])()

    return _bind(op, out, x, w, ids, arrays, multiply)


def _blocks_arrays(step: Step) -> Arrays:
    dtype = widened(step.out.dtype)
    return {**decoded_rows_arrays(step.srcs[1], dtype), **_sorted_arrays(step, dtype)}


@KERNELS(
    "expert_linear",
    dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED],
    when=blocks_why_not,
    workspace=_blocks_arrays,
)
def expert_linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType, **arrays: Arg
) -> Call:
    stored, outputs = tensor(w), w.shape[1]
    decoded = DecodedRows(w, widened(out.dtype), arrays, stored.device)

    def multiply(rows: Tensor, expert: int, result: Tensor) -> None:
        for first in range(0, outputs, decoded.rows):
            some = slice(first, min(first + decoded.rows, outputs))
            for call in (*decoded.load(stored[expert, some]), *decoded.calls):
                call()
            torch.mm(rows, decoded.values[: some.stop - some.start].t(), out=result[:, some])

    return _bind(op, out, x, w, ids, arrays, multiply)


def _bind(
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    ids: Arg,
    arrays: Mapping[str, Arg],
    multiply: Callable[[Tensor, int, Tensor], None],
) -> Call:
    """The call that sorts the rows by their experts, multiplies those of each expert at once, and puts the results in
    the order of the ids."""
    experts = w.shape[0]
    source, before = as_source(x, arrays)
    target, after = as_target(out, arrays)
    by_expert, products, chosen = [tensor(arg) for arg in (arrays["sorted_rows"], arrays["sorted_results"], ids)]
    shared = ids.shape[1] if x.shape[1] == 1 else 1

    def run() -> None:
        wanted, order = torch.sort(chosen.reshape(-1).cpu(), stable=True)
        which, counts = [part.tolist() for part in torch.unique_consecutive(wanted, return_counts=True)]
        if which[0] < 0 or which[-1] >= experts:
            raise BoundsError(f"{op}: ids from {which[0]} to {which[-1]} are not all among 0 .. {experts - 1}")
        order = order.to(source.device)
        torch.index_select(source, 0, order if shared == 1 else order // shared, out=by_expert)
        first = 0
        for expert, count in zip(which, counts, strict=True):
            some = slice(first, first + count)
            multiply(by_expert[some], expert, products[some])
            first += count
        target.index_copy_(0, order, products)

    return in_order([*before, run, *after])


# --- add_expert -----------------------------------------------------------------------------------------------------


def _add_arrays(step: Step) -> Arrays:
    return {**dense_ids_array(step.srcs[2]), "addends": (step.out.dtype, step.out.shape)}


@KERNELS("add_expert", dtypes=NUMBERS, inplace=True, workspace=_add_arrays)
def add_expert(
    stream: Stream, op: str, out: Arg, x: Arg, table: Arg, ids: Arg, *, addends: Arg, dense_ids: Arg | None = None
) -> Call:
    calls, indices = flat_ids(ids, dense_ids)
    rows = tensor(addends)
    calls += [
        partial(torch.index_select, tensor(table), 0, indices, out=rows.view(-1, out.shape[-1])),
        partial(torch.add, tensor(x), rows, out=tensor(out)),
    ]
    return raising_bounds_error(in_order(calls), op, tensor(ids), table.shape[0])
