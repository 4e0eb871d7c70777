"""Mixtures of experts: rows grouped by expert, so that the weights of each are read, and decoded, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.blocks import fields_of
from opweave_cpu.blocks import RowDecoder, decoder_bytes, longest, row_pieces
from opweave_cpu.kernels.indexing import check_ids
from opweave_cpu.kernels.matmul import is_turned, lies_ready, must_pack
from opweave_cpu.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_cpu.tiles import Array, Scratch, compute_dtype, padded, tile_cuts, tile_rows

_UNSIGNED: Final = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def _check(ids: Array, experts: int, op: str) -> None:
    check_ids(ids, ids.view(_UNSIGNED[ids.itemsize]), experts, op)


def _needs_packed_output(step: Step) -> str | None:
    return None if step.out.is_dense else "the output is not dense"


# --- expert_linear --------------------------------------------------------------------------------------------------


def _pieces(w: Arg, ids: Arg, dtype: DType) -> list[slice]:
    """Rows of an expert's weights that are multiplied at a time: all, if BLAS reads them as they lie."""
    return _converted_pieces(w, ids) if must_pack(w, dtype) else [slice(0, w.shape[1])]


def _converted_pieces(w: Arg, ids: Arg) -> list[slice]:
    return row_pieces(w, ids.size // w.shape[0])  # as many rows as an expert has if all are used alike


def _rows_workspace(step: Step) -> int:
    x, w, ids = step.srcs
    dtype = compute_dtype(step.out.dtype)
    sizes = [ids.size * w.shape[2], step.out.size]
    if not lies_ready(x, dtype):
        sizes.append(x.size)
    return sum(padded(size * dtype.itemsize) for size in sizes)


def _expert_workspace(step: Step) -> int:
    (_, w, ids), dtype = step.srcs, compute_dtype(step.out.dtype)
    pieces = _pieces(w, ids, dtype)
    weights = padded(longest(pieces) * w.shape[2] * dtype.itemsize) if must_pack(w, dtype) else 0
    return _rows_workspace(step) + weights


@KERNELS("expert_linear", dtypes=NUMBERS, when=_needs_packed_output, workspace=_expert_workspace)
def expert_linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, workspace: Arg | None) -> Call:
    dtype = compute_dtype(out.dtype)
    scratch, weights, pieces = Scratch(workspace), w.view, _pieces(w, ids, dtype)
    if not must_pack(w, dtype):
        return _bind(op, out, x, w, ids, scratch, pieces, lambda expert, piece: weights[expert, piece])
    room = scratch.take((longest(pieces), w.shape[2]), dtype)

    def convert(expert: int, piece: slice) -> Array:
        some = room[: piece.stop - piece.start]
        np.copyto(some, weights[expert, piece])
        return some

    return _bind(op, out, x, w, ids, scratch, pieces, convert)


def _blocks_workspace(step: Step) -> int:
    (_, w, ids), dtype = step.srcs, compute_dtype(step.out.dtype)
    pieces = _converted_pieces(w, ids)
    return _rows_workspace(step) + decoder_bytes(w, pieces, dtype)


@KERNELS(
    "expert_linear",
    dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED],
    when=_needs_packed_output,
    workspace=_blocks_workspace,
)
def expert_linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType, workspace: Arg | None
) -> Call:
    scratch, stored, pieces = Scratch(workspace), fields_of(w.view, blocks), _converted_pieces(w, ids)
    decoder = RowDecoder(w, pieces, compute_dtype(out.dtype), scratch)

    def decoded(expert: int, piece: slice) -> Array:
        decode, tile = decoder(piece.stop - piece.start)
        decode(stored[expert, piece])
        return tile

    return _bind(op, out, x, w, ids, scratch, pieces, decoded)


def _bind(
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    ids: Arg,
    scratch: Scratch,
    pieces: Sequence[slice],
    some_rows: Callable[[int, slice], Array],
) -> Call:
    """The call that multiplies by the rows of an expert's weights that ``some_rows`` gives, in the type to compute in.

    The rows of ``x`` are packed in order of their experts. Those of one expert are multiplied at once by each piece of
    its weights, and the results go where they belong.
    """
    dtype = compute_dtype(out.dtype)
    experts, outputs, inputs = w.shape
    used = ids.shape[1]
    packed, results = scratch.take((ids.size, inputs), dtype), scratch.take((ids.size, outputs), dtype)
    picks, target, source = ids.view, out.view.reshape(-1, outputs), x.view
    copies = not lies_ready(x, dtype)
    flat = scratch.take((x.size // inputs, inputs), dtype) if copies else source.reshape(-1, inputs)
    shared = used if x.shape[1] == 1 else 1

    def run() -> None:
        _check(picks, experts, op)
        if copies:
            np.copyto(flat.reshape(source.shape), source)
        flat_ids = picks.reshape(-1)
        order = np.argsort(flat_ids, kind="stable")
        flat.take(order if shared == 1 else order // shared, 0, packed, "clip")
        for expert, first, last in _groups(flat_ids[order]):
            rows, result = packed[first:last], results[first:last]
            if is_turned(last - first, inputs, outputs, dtype):
                turned = result.reshape(outputs, last - first)
                for piece in pieces:
                    np.matmul(some_rows(expert, piece), rows.T, turned[piece])
                result = turned.T
            else:
                for piece in pieces:
                    np.matmul(rows, some_rows(expert, piece).T, result[:, piece])
            target[order[first:last]] = result

    return run


def _groups(ids: Array) -> Iterator[tuple[int, int, int]]:
    """Each id of a sorted array, with where it begins and ends."""
    edges = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    for first, last in pairwise(edges):
        yield int(ids[first]), first, last


# --- add_expert -----------------------------------------------------------------------------------------------------


def _add_workspace(step: Step) -> int:
    n = step.out.shape[-1]
    return tile_rows(step.out.size, n, step.out.dtype) * n * step.out.dtype.itemsize


@KERNELS("add_expert", dtypes=NUMBERS, inplace=True, workspace=_add_workspace)
def add_expert(stream: Stream, op: str, out: Arg, x: Arg, table: Arg, ids: Arg, *, workspace: Arg | None) -> Call:
    n = out.shape[-1]
    rows = tile_rows(out.size, n, out.dtype)
    target, source, picks, biases = out.view, x.view, ids.view, table.view
    if out.is_dense and x.is_dense and picks.flags.c_contiguous:
        target, source, picks = target.reshape(-1, n), source.reshape(-1, n), picks.reshape(-1)
    picked = Scratch(workspace).take((rows * n,), out.dtype)
    pieces = []
    for cut in tile_cuts(target.shape, rows, keep_last=True):
        some = picks[cut] if picks.ndim else picks
        room = picked[: some.size * n].reshape(*some.shape, n)
        pieces.append((target[cut], source[cut], some, room))
    return partial(_add_rows, partial(_check, ids.view, table.shape[0], op), biases, pieces)


def _add_rows(check: Call, table: Array, pieces: list[tuple[Array, Array, Array, Array]]) -> None:
    check()
    for out, x, ids, room in pieces:
        if table.flags.c_contiguous:
            table.take(ids, 0, room, "clip")
        else:
            room[...] = table[ids]
        np.add(x, room, out)
