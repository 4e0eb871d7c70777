"""Products that take 16 or 32 rows of weights at a time: what their kernels share.

Their walk has three axes, blocks of rows of weights, parts of a row, and rows of activations, and their operands are
weights, activations, a bias if there is one, and the result.

For experts there are two more operands (`bind_groups`), by which rows of activations lie in groups, each of which one
of several matrices multiplies. The third axis of the walk is then that of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, load, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import Array, in_turn

__all__ = [
    "CHUNK", "bind_groups", "bind_row_blocks", "block_writer", "chunks", "clear_sums", "grouped_rows", "place",
    "row_bytes", "store_results", "transpose_sums",
]  # fmt: skip

CHUNK: Final = 128
"""Rows of activations whose sums are in the cache at once. Weights are prepared anew for each chunk of rows."""

_I64: Final = ir.IntType(64)


def bind_row_blocks(
    stream: Stream,
    code: MachineCode,
    args: Sequence[Arg],
    lengths: tuple[int, int],
    of_weights: tuple[int, int],
    of_activations: tuple[int, int],
    work: int,
    vectors: int = 1,
    groups: Sequence[Arg] = (),
) -> Call:
    """The call of a kernel for all rows of weights, at least as many as a block has.

    Args:
        args: the operands.
        lengths: parts of a row, and rows of activations, or groups of them.
        of_weights: bytes of a row, and from one part of it to the next.
        of_activations: bytes from one part to the next, and from one row to the next.
        work: elementary operations for one part of a block and one row of activations, or group of them.
        vectors: of 16 rows of weights, in a block.
        groups: the places and bounds of `bind_groups`, if rows are in groups.
    """
    w, x, *others = args
    outputs, height, (row, part) = w.shape[-2], vectors * LANES, of_weights
    strides: list[tuple[int, ...]] = [(height * row, part, outputs * row), (0, *of_activations)]
    strides += [(height * a.dtype.itemsize, 0, 0) for a in others[:-1]]
    size = others[-1].dtype.itemsize
    strides.append((height * size, 0, outputs * size))
    strides += [(0, 0, a.strides[0]) for a in groups]
    calls = []
    # Of rows of weights that are no multiple of a block the last ones are multiplied too, some of them a second time.
    for first, count in ((0, outputs // height), (outputs - height, int(outputs % height > 0))):
        if count:
            some = [moved(w, first * row), x, *[moved(a, first * a.dtype.itemsize) for a in others], *groups]
            walk = Walk((count, *lengths), tuple(strides), 1)
            calls.append(bind_walk(stream, code, walk, some, work=work))
    return in_turn(calls)


def place(code: Any, array: Any, i: Any) -> Any:
    """The address of vector ``i`` of an array."""
    return code.add(array, code.mul(i, _I64(VECTOR_BYTES)))


def grouped_rows(rows: int, groups: int) -> int:
    """The most rows that there are in groups of ``rows`` rows, each of which begins at a multiple of 16."""
    return (rows + min(rows, groups) * (LANES - 1)) // LANES * LANES


def bind_groups(numbers: Array, places: Array, bounds: Array) -> Call:
    """The call that puts rows into groups by the number of each one's group.

    Args:
        numbers: of groups that exist.
        places: i64, `grouped_rows` many: gets the row at each place, -1 where there is none.
        bounds: i64, shape (groups, 2): gets the places where each group begins, and ends.
    """

    def group() -> None:
        flat = numbers.reshape(-1)
        counts = np.bincount(flat, minlength=len(bounds))
        padded = (counts + LANES - 1) // LANES * LANES
        starts = padded.cumsum() - padded
        bounds[:, 0], bounds[:, 1] = starts, starts + counts
        places.fill(-1)
        ahead = starts - counts.cumsum() + counts  # places without a row before each group
        places[np.arange(flat.size) + ahead.repeat(counts)] = flat.argsort(kind="stable")

    return group


def block_writer(biases: Sequence[Arg], into: DType, *, grouped: bool) -> Writer:
    """The writer of a kernel whose weights and activations are bytes."""
    operands = [Operand("i8", 1)] * 2 + [Operand(b.dtype.name, b.dtype.itemsize) for b in biases]
    return Writer(3, [*operands, Operand(into.name, into.itemsize), *[Operand("i64", 8)] * (2 * grouped)])


@contextmanager
def chunks(writer: Writer, *, grouped: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Code for each block of rows of weights and each chunk of rows of activations: gives the numbers of the block
    and of the first row, and how many rows there are."""
    with (
        _groups(writer, grouped) as (start, stop),
        writer.loop(_I64(0), writer.lengths[0], 1) as n,
        writer.loop(start, stop, CHUNK) as first,
    ):
        yield n, first, writer.at_most(CHUNK, writer.code.sub(stop, first))


@contextmanager
def _groups(writer: Writer, grouped: bool) -> Iterator[tuple[Any, Any]]:
    """Code for each group of rows: gives the first one, and that behind the last one. The weights, operand 0, are then
    those of the group."""
    if not grouped:
        yield _I64(0), writer.lengths[2]
        return
    code, weights = writer.code, writer.bases[0]
    with writer.loop(_I64(0), writer.lengths[2], 1) as group:
        writer.bases[0] = code.add(weights, code.mul(group, writer.strides[0][2]))
        bounds = writer.at(-1, _I64(0), _I64(0), group)
        yield tuple([load(code, _I64, code.add(bounds, _I64(at)), 8) for at in (0, 8)])
    writer.bases[0] = weights


def row_bytes(writer: Writer, vectors: int = 1) -> Any:
    """Bytes from one row of weights to the next, of blocks of that many vectors."""
    return writer.code.udiv(writer.strides[0][0], _I64(vectors * LANES))


def clear_sums(writer: Writer, sums: Any, rows: Any, together: int) -> None:
    """Code that sets the vectors of sums of some rows to zero, and those of the rows behind them up to a multiple of
    ``together``."""
    code, zero = writer.code, ir.Constant(vector_type("f32"), None)
    with writer.loop(_I64(0), rows, together) as r:
        for k in range(together):
            store(code, zero, place(code, sums, code.add(r, _I64(k))), VECTOR_BYTES)


def transpose_sums(writer: Writer, sums: Any, rows: Any) -> None:
    """Code that transposes the sums of each 16 rows: from vectors of one row of weights each to those of one row of
    activations, as `store_results` takes them."""
    code = writer.code
    with writer.loop(_I64(0), rows, LANES) as r:
        at = [place(code, sums, code.add(r, _I64(k))) for k in range(LANES)]
        by_weights = [load(code, vector_type("f32"), address, VECTOR_BYTES) for address in at]
        for address, row in zip(at, transposed(code, by_weights), strict=True):
            store(code, row, address, VECTOR_BYTES)


def store_results(
    writer: Writer, sums: Any, n: Any, first: Any, rows: Any, *, biased: bool, vectors: int = 1, grouped: bool = False
) -> None:
    """Code that stores the results of a chunk, plus the bias if there is one.

    Args:
        sums: the address of the products of each row with a block of rows of weights, ``vectors`` of them.
        n, first, rows: as of `chunks`.
    """
    code, out, zero = writer.code, 2 + biased, _I64(0)
    with writer.loop(zero, rows, 1) as r:
        of_row, row = place(code, sums, code.mul(r, _I64(vectors))), code.add(first, r)
        if grouped:
            row = load(code, _I64, writer.at(-2, zero, zero, row), 8)
        for v in range(vectors):
            at = code.add(of_row, _I64(v * VECTOR_BYTES))
            result = Vector(code, load(code, vector_type("f32"), at, VECTOR_BYTES), "f32")
            if biased:
                result = result + writer.read(2, writer.at(2, n), _I64(v * LANES))
            writer.write(out, writer.at(out, n, zero, row), _I64(v * LANES), result)
