"""Mixtures of experts: rows grouped by expert, so that the weights of each are read, and decoded, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Limit, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.precision import Precision
from opweave.ops.blocks import fields_of
from opweave_cpu.blocks import RowDecoder, decoder_scratch, longest, row_tiles
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.indexing import id_check
from opweave_cpu.kernels.integer_products import MOST_ROWS, TYPES, why_no_integers
from opweave_cpu.kernels.matmul import is_turned, lies_ready, must_pack
from opweave_cpu.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED, needs_dense_output
from opweave_cpu.tiles import Array, compute_dtype, in_turn, tile_cuts, tile_rows, window
from opweave_cpu.tunables import limit

EXPERT_ROWS: Final = limit("expert_rows", 4, 1, 1 << 12)
"""Rows for each expert, if all are used alike, up to which each row by itself is multiplied by the integers of its
expert. Of more rows those of an expert are multiplied at once."""

# --- expert_linear --------------------------------------------------------------------------------------------------


def _tiles(w: Arg, ids: Arg) -> list[slice]:
    """Rows of an expert's weights that are converted, or decoded, and multiplied at a time."""
    return row_tiles(w, ids.size // w.shape[0])  # as many rows as an expert has if all are used alike


def _rows_scratch(step: Step, dtype: DType) -> Arrays:
    """The rows of ``x`` in order of their experts, the results in that order, and ``x`` converted if it has to be."""
    x, w, ids = step.srcs
    _, outputs, inputs = w.shape
    return {
        "packed": (dtype, (ids.size, inputs)),
        "results": (dtype, (ids.size, outputs)),
        "wide": (dtype, (0 if lies_ready(x, dtype) else x.size // inputs, inputs)),
    }


def _expert_workspace(step: Step) -> Arrays:
    (_, w, ids), dtype = step.srcs, compute_dtype(step.out.dtype)
    rows = longest(_tiles(w, ids)) if must_pack(w, dtype) else 0
    return {**_rows_scratch(step, dtype), "weights": (dtype, (rows, w.shape[2]))}


def _why_no_integers(step: Step, most: Limit) -> str | None:
    w, ids = step.srcs[1], step.srcs[2]
    if not 0 < ids.size <= most.value * w.shape[0]:
        return f"it takes up to {most.value} rows for each expert"
    return why_no_integers(w)


def _integers_workspace(step: Step, precision: Precision) -> Arrays:
    from opweave_cpu.jit.integer_products import record_bytes

    x, w, ids = step.srcs
    experts, _, inputs = w.shape
    groups = _group_arrays(step) if ids.size > EXPERT_ROWS.value * experts else {}
    rows = groups["places"][1][0] if groups else x.size // inputs
    records = {"records": (as_dtype("u8"), (-(-inputs // 256) * rows * record_bytes(w.dtype, precision),))}
    if precision == "int8":
        return {**records, **groups}
    return {**_blocks_workspace(step), **records, "marks": (as_dtype("u8"), (rows,))}


def _group_arrays(step: Step) -> dict[str, tuple[DType, Sequence[int]]]:
    """What puts the rows into groups by their experts."""
    from opweave_cpu.jit.row_blocks import grouped_rows

    experts, index = step.srcs[1].shape[0], as_dtype("i64")
    return {"places": (index, (grouped_rows(step.srcs[2].size, experts),)), "bounds": (index, (experts, 2))}


@KERNELS("expert_linear", dtypes=TYPES, layout="dense", precision="int8",
         when=partial(_why_no_integers, most=MOST_ROWS),
         workspace=partial(_integers_workspace, precision="int8"))  # fmt: skip
def expert_linear_in_int8(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType, records: Arg, **groups: Arg
) -> Call:
    from opweave_cpu.jit.integer_products import bind_experts, bind_grouped_experts

    bind = bind_grouped_experts if groups else bind_experts
    return in_turn([id_check(ids.view, w.shape[0], op), bind(stream, out, x, w, ids, records, **groups)])


@KERNELS("expert_linear", dtypes=TYPES, layout="dense", when=partial(_why_no_integers, most=EXPERT_ROWS),
         workspace=partial(_integers_workspace, precision="exact"))  # fmt: skip
def expert_linear_of_integers(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType, records: Arg, marks: Arg,
    **scratch: Arg,
) -> Call:  # fmt: skip
    from opweave_cpu.jit.integer_products import bind_experts

    in_floats = expert_linear_of_blocks(stream, op, out, x, w, ids, blocks=blocks, **scratch)
    marked: Array = marks.view

    def multiply_again() -> None:
        if b"\x01" in marked.tobytes():  # rows of activations that integers cannot represent
            in_floats()

    product = bind_experts(stream, out, x, w, ids, records, marks)
    return in_turn([id_check(ids.view, w.shape[0], op), product, multiply_again])


def _why_not_compiled(step: Step) -> str | None:
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.compiler import has_fma
    from opweave_cpu.jit.grouped_products import fits_groups
    from opweave_cpu.jit.products import fits_experts

    fits = has_fma() and (fits_experts(step) or fits_groups(step))
    return None if fits else "it takes weights in whole vectors; of more than a few rows dense operands"


def _compiled_workspace(step: Step) -> Arrays:
    from opweave_cpu.jit.products import fits_experts

    return {} if fits_experts(step) else _group_arrays(step)


@KERNELS("expert_linear", dtypes=TYPES, when=_why_not_compiled, workspace=_compiled_workspace)
def compiled_expert_linear(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType | None = None, **groups: Arg
) -> Call:
    from opweave_cpu.jit.grouped_products import bind_grouped_product
    from opweave_cpu.jit.products import bind_expert_product

    bind = bind_grouped_product if groups else bind_expert_product
    return in_turn([id_check(ids.view, w.shape[0], op), bind(stream, out, x, w, ids, **groups)])


@KERNELS("expert_linear", dtypes=NUMBERS, when=needs_dense_output, workspace=_expert_workspace)
def expert_linear(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, weights: Arg | None = None, **scratch: Arg
) -> Call:
    stored = w.view
    if weights is None:  # BLAS reads all of them as they lie
        return _bind(op, out, x, w, ids, [slice(0, w.shape[1])], lambda expert, tile: stored[expert, tile], scratch)
    converted = weights.view

    def convert(expert: int, tile: slice) -> Array:
        some = converted[: tile.stop - tile.start]
        np.copyto(some, stored[expert, tile])
        return some

    return _bind(op, out, x, w, ids, _tiles(w, ids), convert, scratch)


def _blocks_workspace(step: Step) -> Arrays:
    (_, w, ids), dtype = step.srcs, compute_dtype(step.out.dtype)
    return {**_rows_scratch(step, dtype), **decoder_scratch(w, _tiles(w, ids), dtype)}


@KERNELS(
    "expert_linear",
    dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED],
    when=needs_dense_output,
    workspace=_blocks_workspace,
)
def expert_linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, ids: Arg, *, blocks: DType, **scratch: Arg
) -> Call:
    stored, tiles = fields_of(w.view, blocks), _tiles(w, ids)
    decoder = RowDecoder(w, tiles, scratch)

    def decoded(expert: int, tile: slice) -> Array:
        decode, values = decoder(tile.stop - tile.start)
        decode(stored[expert, tile])
        return values

    return _bind(op, out, x, w, ids, tiles, decoded, scratch)


def _bind(
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    ids: Arg,
    tiles: Sequence[slice],
    some_rows: Callable[[int, slice], Array],
    scratch: Mapping[str, Arg],
) -> Call:
    """The call that multiplies by the rows of an expert's weights that ``some_rows`` gives, in the type to compute in.

    The rows of ``x`` are packed in order of their experts. Those of one expert are multiplied at once by each of the
    ``tiles`` of its weights, and the results are stored where their rows belong.
    """
    experts, outputs, inputs = w.shape
    check = id_check(ids.view, experts, op)
    picks, target, source = ids.view, out.view.reshape(-1, outputs), x.view
    ordered, products, wide = scratch["packed"].view, scratch["results"].view, scratch.get("wide")
    dtype = scratch["packed"].dtype
    flat = (wide or x).view.reshape(-1, inputs)
    shared = ids.shape[1] if x.shape[1] == 1 else 1

    def run() -> None:
        check()
        if wide is not None:
            np.copyto(flat.reshape(source.shape), source)
        flat_ids = picks.reshape(-1)
        order = np.argsort(flat_ids, kind="stable")
        flat.take(order if shared == 1 else order // shared, 0, ordered, "clip")
        for expert, first, last in _groups(flat_ids[order]):
            rows, result = ordered[first:last], products[first:last]
            if is_turned(last - first, inputs, outputs, dtype):
                turned = result.reshape(outputs, last - first)
                for tile in tiles:
                    np.matmul(some_rows(expert, tile), rows.T, turned[tile])
                result = turned.T
            else:
                for tile in tiles:
                    np.matmul(rows, some_rows(expert, tile).T, result[:, tile])
            target[order[first:last]] = result

    return run


def _groups(ids: Array) -> Iterator[tuple[int, int, int]]:
    """Each id of a sorted array, with where it begins and ends."""
    edges = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    for first, last in pairwise(edges):
        yield int(ids[first]), first, last


# --- add_expert -----------------------------------------------------------------------------------------------------


def _add_workspace(step: Step) -> Arrays:
    out = step.out
    n = out.shape[-1]
    return {"picked": (out.dtype, (tile_rows(out.size, n, out.dtype.itemsize), n))}


@KERNELS("add_expert", dtypes=NUMBERS, inplace=True, workspace=_add_workspace)
def add_expert(stream: Stream, op: str, out: Arg, x: Arg, table: Arg, ids: Arg, *, picked: Arg) -> Call:
    rows, n = picked.shape
    target, source, picks, biases = out.view, x.view, ids.view, table.view
    if out.is_dense and x.is_dense and picks.flags.c_contiguous:
        target, source, picks = target.reshape(-1, n), source.reshape(-1, n), picks.reshape(-1)
    flat, tiles = picked.view.reshape(-1), []
    for cut in tile_cuts(target.shape, rows, keep_last=True):
        some = picks[cut] if picks.ndim else picks
        tiles.append((target[cut], source[cut], some, window(flat, (*some.shape, n))))
    return partial(_add_rows, id_check(ids.view, table.shape[0], op), biases, tiles)


def _add_rows(check: Call, table: Array, tiles: list[tuple[Array, Array, Array, Array]]) -> None:
    check()
    for out, x, ids, picked in tiles:
        if table.flags.c_contiguous:
            table.take(ids, 0, picked, "clip")
        else:
            picked[...] = table[ids]
        np.add(x, picked, out)
