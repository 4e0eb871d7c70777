"""Products that take 16 or 32 rows of weights at a time: what their kernels share.

Their walk has three axes, blocks of rows of weights, parts of a row, and rows of activations, and their operands are
weights, activations, a bias if there is one, and the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, load, store, transposed, vector_type
from opweave_cpu.jit.walk import Walk, bind_walk, moved
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn

__all__ = [
    "CHUNK", "bind_row_blocks", "chunks", "clear_sums", "place", "row_bytes", "store_results", "transpose_sums",
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
) -> Call:
    """The call of a kernel for all rows of weights, at least as many as a block has.

    Args:
        args: the operands.
        lengths: parts of a row, and rows of activations.
        of_weights: bytes of a row, and from one part of it to the next.
        of_activations: bytes from one part to the next, and from one row to the next.
        work: elementary operations for one part of a block and one row of activations.
        vectors: of 16 rows of weights, in a block.
    """
    w, x, *others = args
    outputs, height, (row, part) = w.shape[0], vectors * LANES, of_weights
    strides: list[tuple[int, ...]] = [(height * row, part, 0), (0, *of_activations)]
    strides += [(height * a.dtype.itemsize, 0, 0) for a in others[:-1]]
    size = others[-1].dtype.itemsize
    strides.append((height * size, 0, outputs * size))
    calls = []
    # Of rows of weights that are no multiple of a block the last ones are multiplied too, some of them a second time.
    for first, count in ((0, outputs // height), (outputs - height, int(outputs % height > 0))):
        if count:
            some = [moved(w, first * row), x, *[moved(a, first * a.dtype.itemsize) for a in others]]
            walk = Walk((count, *lengths), tuple(strides), 1)
            calls.append(bind_walk(stream, code, walk, some, work=work))
    return in_turn(calls)


def place(code: Any, array: Any, i: Any) -> Any:
    """The address of vector ``i`` of an array."""
    return code.add(array, code.mul(i, _I64(VECTOR_BYTES)))


@contextmanager
def chunks(writer: Writer) -> Iterator[tuple[Any, Any, Any]]:
    """Code for each block of rows of weights and each chunk of rows of activations: gives the numbers of the block
    and of the first row, and how many rows there are."""
    all_rows = writer.lengths[2]
    with writer.loop(_I64(0), writer.lengths[0], 1) as n, writer.loop(_I64(0), all_rows, CHUNK) as first:
        yield n, first, writer.at_most(CHUNK, writer.code.sub(all_rows, first))


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


def store_results(writer: Writer, sums: Any, n: Any, first: Any, rows: Any, *, biased: bool, vectors: int = 1) -> None:
    """Code that stores the results of a chunk, plus the bias if there is one.

    Args:
        sums: the address of the products of each row with a block of rows of weights, ``vectors`` of them.
        n, first, rows: as of `chunks`.
    """
    code, out = writer.code, 2 + biased
    with writer.loop(_I64(0), rows, 1) as r:
        of_row = place(code, sums, code.mul(r, _I64(vectors)))
        for v in range(vectors):
            at = code.add(of_row, _I64(v * VECTOR_BYTES))
            result = Vector(code, load(code, vector_type("f32"), at, VECTOR_BYTES), "f32")
            if biased:
                result = result + writer.read(2, writer.at(2, n), _I64(v * LANES))
            writer.write(out, writer.at(out, n, _I64(0), code.add(first, r)), _I64(v * LANES), result)
