"""Products in bf16 with AMX, which takes subnormal numbers as zeros.

Tiles hold 32 inputs of 16 rows of weights, as they lie in memory, and the same inputs of 16 rows of activations, which
are interleaved once for all weights: pairs of each row in turn. Results stay in tiles until all inputs are multiplied;
each lane of them is a row of activations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.amx import ROW_BYTES, ROWS, Tiles, has_tiles, tiles
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.row_blocks import CHUNK, bind_row_blocks, chunks, place, row_bytes, store_results, transpose_sums
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, load, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn

__all__ = ["bind_tile_product", "interleaved_bytes", "multiplies_tiles"]

INPUTS: Final = 32
"""Inputs of a row of a tile."""

TOGETHER: Final = 4
"""Tiles of results at once, so that one of weights is loaded once for all of them."""

_ITEM: Final = 2
_I64: Final = ir.IntType(64)
_TILE_BYTES: Final = ROWS * ROW_BYTES


def multiplies_tiles(inputs: int) -> bool:
    """Whether the processor multiplies tiles of bf16, and rows of weights are whole rows of tiles."""
    return inputs % INPUTS == 0 and has_tiles("bf16")


def interleaved_bytes(rows: int, inputs: int) -> int:
    """Bytes of interleaved activations."""
    return -(-rows // ROWS) * ROWS * inputs * _ITEM


def bind_tile_product(stream: Stream, out: Arg, x: Arg, w: Arg, b: Arg | None, interleaved: Arg) -> Call:
    """The call ``out = x @ w.T + b`` of dense operands in bf16, with at least 16 rows of weights.

    Args:
        interleaved: memory of `interleaved_bytes`.
    """
    inputs = w.shape[1]
    rows, line, steps = x.size // inputs, inputs * _ITEM, inputs // INPUTS
    calls = []
    code = stream.artefact("interleaved halves", _interleave)
    for first, count, height in ((0, rows // ROWS, ROWS), (rows // ROWS, 1, rows % ROWS)):
        if count and height:
            strides = (ROWS * line, line, ROW_BYTES), (ROWS * line, 0, _TILE_BYTES)
            args = [moved(x, first * ROWS * line), moved(interleaved, first * ROWS * line)]
            walk = Walk((count, height, steps), strides, 1)
            calls.append(bind_walk(stream, code, walk, args, work=INPUTS // LANES))
    code = stream.artefact(("half tiles", b is not None), partial(_product, b is not None))
    args = [w, interleaved, *([] if b is None else [b]), out]
    calls.append(
        bind_row_blocks(stream, code, args, (steps, rows), (line, ROW_BYTES), (_TILE_BYTES, line), work=INPUTS // 2)
    )
    return in_turn(calls)


def _interleave() -> MachineCode:
    """The kernel that interleaves blocks of up to 16 rows. Rows that do not exist are the last one again."""
    writer = Writer(3, [Operand("bf16", _ITEM)] * 2)
    code, (blocks, rows, steps), kind = writer.code, writer.lengths, vector_type("i32")
    last = code.sub(rows, _I64(1))
    numbers = [writer.at_most(k, last) for k in range(ROWS)]
    with writer.loop(_I64(0), blocks, 1) as block, writer.loop(_I64(0), steps, 1) as step:
        lines = [load(code, kind, writer.at(0, block, number, step), _ITEM) for number in numbers]
        into = writer.at(1, block, _I64(0), step)
        for k, pairs in enumerate(transposed(code, lines)):
            store(code, pairs, code.add(into, _I64(k * VECTOR_BYTES)), _ITEM)
    return MachineCode(writer.end())


def _product(biased: bool) -> MachineCode:
    writer = Writer(3, [Operand("bf16", _ITEM)] * (3 + biased))
    code = writer.code
    sums = writer.array(vector_type("f32"), CHUNK)
    with (
        tiles(writer, dict.fromkeys(range(TOGETHER + 2), (ROWS, ROW_BYTES))) as registers,
        chunks(writer) as (n, chunk, rows),
    ):
        whole = code.and_(rows, _I64(-TOGETHER * ROWS))
        for start, stop, count in ((_I64(0), whole, TOGETHER), (whole, rows, 1)):
            with writer.loop(start, stop, count * ROWS) as r:
                _multiply(writer, registers, n, code.add(chunk, r), place(code, sums, r), count)
        transpose_sums(writer, sums, rows)
        store_results(writer, sums, n, chunk, rows, biased=biased)
    return MachineCode(writer.end())


def _multiply(writer: Writer, registers: Tiles, n: Any, row: Any, sums: Any, count: int) -> None:
    """Writes the products of 16 rows of weights by ``count`` blocks of rows to ``sums``."""
    code, weights, activations = writer.code, count, count + 1
    for k in range(count):
        registers.zero(k)
    distance = row_bytes(writer)
    with writer.loop(_I64(0), writer.lengths[1], 1) as step:
        registers.load(weights, writer.at(0, n, step), distance)
        for k in range(count):
            registers.load(activations, writer.at(1, n, step, code.add(row, _I64(k * ROWS))), ROW_BYTES)
            registers.multiply("bf16", k, weights, activations)
    for k in range(count):
        registers.store(k, code.add(sums, _I64(k * _TILE_BYTES)), ROW_BYTES)
