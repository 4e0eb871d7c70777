"""Mixtures of experts: rows grouped by expert, so that the weights of each are read, and decoded, once.

Which experts there are work for is read by the host, which has to wait for the ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.errors import BoundsError
from opweave.graph.dtypes import DType, as_dtype
from opweave_torch.kernels.binding import Scratch, in_turn, naming_ids, padded, widened
from opweave_torch.kernels.matmul import Tile, as_source, as_target, blocks_why_not, matrix_bytes, product, tile_bytes
from opweave_torch.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_torch.memory import tensor

# --- expert_linear --------------------------------------------------------------------------------------------------


def _sorted_bytes(step: Step, dtype: DType) -> int:
    """Rows in order of their experts, before and after the product, and what does not lie as a matrix."""
    x, w, ids = step.srcs
    sizes = [ids.size * w.shape[2], ids.size * w.shape[1]]
    return sum([padded(size * dtype.itemsize) for size in sizes]) + matrix_bytes(dtype, x, step.out)


def _workspace(step: Step) -> int:
    return _sorted_bytes(step, step.out.dtype)


@KERNELS("expert_linear", dtypes=NUMBERS, when=lambda step: of_other_type(step, 1), workspace=_workspace)
def expert_linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, workspace: Arg | None) -> Call:
    weights = [expert.t() for expert in tensor(w)]

    def multiply(rows: torch.Tensor, expert: int, result: torch.Tensor) -> None:
        product(result, rows, weights[expert])()

    return _bind(op, out, x, w, ids, Scratch(workspace), out.dtype, multiply)


def _blocks_workspace(step: Step) -> int:
    dtype = widened(step.out.dtype)
    return tile_bytes(step.srcs[1], dtype) + _sorted_bytes(step, dtype)


@KERNELS(
    "expert_linear",
    dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED],
    when=blocks_why_not,
    workspace=_blocks_workspace,
)
def expert_linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType, workspace: Arg | None
) -> Call:
    scratch, stored, dtype = Scratch(workspace), tensor(w), widened(out.dtype)
    tile, outputs = Tile(w, dtype, scratch, stored.device), w.shape[1]

    def multiply(rows: torch.Tensor, expert: int, result: torch.Tensor) -> None:
        for first in range(0, outputs, tile.rows):
            piece = slice(first, min(first + tile.rows, outputs))
            for call in (*tile.load(stored[expert, piece]), *tile.calls):
                call()
            torch.mm(rows, tile.values[: piece.stop - piece.start].t(), out=result[:, piece])

    return _bind(op, out, x, w, ids, scratch, dtype, multiply)


def _bind(
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    ids: Arg,
    scratch: Scratch,
    dtype: DType,
    multiply: Callable[[torch.Tensor, int, torch.Tensor], None],
) -> Call:
    """The call that brings the rows in the order of their experts, multiplies those of each one at once, and stores the
    results where they belong."""
    experts, outputs, inputs = w.shape
    rows, before = as_source(x, dtype, scratch)
    target, after = as_target(out, dtype, scratch)
    packed, results = scratch.take((ids.size, inputs), dtype), scratch.take((ids.size, outputs), dtype)
    picks = tensor(ids)
    shared = ids.shape[1] if x.shape[1] == 1 else 1

    def run() -> None:
        wanted = picks.reshape(-1).cpu()
        wanted, order = torch.sort(wanted, stable=True)
        which, counts = [part.tolist() for part in torch.unique_consecutive(wanted, return_counts=True)]
        if which[0] < 0 or which[-1] >= experts:
            raise BoundsError(f"{op}: ids from {which[0]} to {which[-1]} are not all among 0 .. {experts - 1}")
        places = order.to(packed.device)
        torch.index_select(rows, 0, places if shared == 1 else places // shared, out=packed)
        first = 0
        for expert, count in zip(which, counts, strict=True):
            some = slice(first, first + count)
            multiply(packed[some], expert, results[some])
            first += count
        target.index_copy_(0, places, results)

    return in_turn([*before, run, *after])


# --- add_expert -----------------------------------------------------------------------------------------------------


def _add_workspace(step: Step) -> int:
    ids = step.srcs[2]
    return padded(step.out.nbytes) + (0 if ids.is_dense else padded(ids.size * ids.dtype.itemsize))


@KERNELS("add_expert", dtypes=NUMBERS, inplace=True, workspace=_add_workspace)
def add_expert(stream: Stream, op: str, out: Arg, x: Arg, table: Arg, ids: Arg, *, workspace: Arg | None) -> Call:
    scratch, calls, picks = Scratch(workspace), [], tensor(ids)
    if not ids.is_dense:
        line = scratch.take(ids.shape, ids.dtype)
        calls.append(partial(line.copy_, picks))
        picks = line
    picked = scratch.take(out.shape, out.dtype)
    calls.append(
        partial(torch.index_select, tensor(table), 0, picks.view(-1), out=picked.view(-1, out.shape[-1])),
    )
    calls.append(partial(torch.add, tensor(x), picked, out=tensor(out)))
    return naming_ids(in_turn(calls), op, tensor(ids), table.shape[0])
