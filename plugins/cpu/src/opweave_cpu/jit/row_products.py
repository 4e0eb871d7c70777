"""Products of some rows with weights in f32, whose lanes are the rows: ``x`` is transposed first.

Each element of the weights is then multiplied by a vector of rows, so that sums over the inputs stay within their
lanes. While some rows of weights are multiplied, those behind them are prefetched into the second-level cache: on a
Zen 4 half of the time would else be spent waiting for memory, although the processor prefetches too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integers import prefetch
from opweave_cpu.jit.vectors import LANES, fma, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Cell, Writer
from opweave_cpu.tiles import in_turn

__all__ = ["bind_row_product", "padded"]

PAGE: Final = 4096
"""Bytes: rows of weights whose distance is a multiple of this share the sets of a first-level cache."""

STRETCH: Final = 256
"""Inputs whose products are added one after the other: the sums of stretches are then added up, as rounding errors grow
with the length of a sum."""

Cells = Sequence[Sequence[Cell]]

_ITEM: Final = 4
_I64: Final = ir.IntType(64)


def padded(rows: int) -> int:
    """Rows in whole vectors."""
    return -(-rows // LANES) * LANES


def bind_row_product(stream: Stream, out: Arg, x: Arg, w: Arg, b: Arg | None, turned: Arg) -> Call:
    """The call ``out = x @ w.T + b`` of dense operands.

    Args:
        turned: memory for ``x``, transposed, its rows padded to whole vectors.
    """
    outputs, inputs = w.shape
    rows = x.size // inputs
    line = padded(rows) * _ITEM
    lies = (_ITEM, inputs * _ITEM), (line, _ITEM)
    code = stream.artefact("transposed", _transposed)
    before = bind_walk(stream, code, Walk((inputs, rows), lies, 1), [x, turned], work=2)
    together = _together(padded(rows) // LANES, inputs, outputs)
    args, strides = [turned], [(0, line, _ITEM)]
    for k in range(together):
        args.append(moved(w, k * inputs * _ITEM))
        strides.append((together * inputs * _ITEM, _ITEM, 0))
    if b is not None:
        args += [moved(b, k * _ITEM) for k in range(together)]
        strides += [(together * _ITEM, 0, 0)] * together
    args += [moved(out, k * _ITEM) for k in range(together)]
    strides += [(together * _ITEM, 0, outputs * _ITEM)] * together
    walk = Walk((outputs // together, inputs, rows), tuple(strides), 1)
    key = padded(rows) // LANES, together, b is not None
    code = stream.artefact(("row product", key), partial(_product, *key))
    return in_turn([before, bind_walk(stream, code, walk, args, work=2 * together)])


def _together(vectors: int, inputs: int, outputs: int) -> int:
    """Rows of weights that are multiplied at once: as many as there are registers for their sums, to hide the latency
    of additions, but no more than the first-level cache holds where rows share its sets."""
    most = (16 if "avx512f" in target().features else 4) // vectors
    if inputs * _ITEM % PAGE == 0:
        most = min(most, 4)
    return next(n for n in (8, 6, 4, 3, 2, 1) if n <= max(1, most) and outputs % n == 0)


def _transposed() -> MachineCode:
    """The kernel that writes each column of ``x`` as a dense row."""
    writer = Writer(2, [Operand("f32", -1), Operand("f32", _ITEM)])
    with writer.rows() as (x, line):
        writer.elements(lambda i, mask, _: writer.write(1, line, i, writer.read(0, x, i, mask)))
    return MachineCode(writer.end())


def _product(vectors: int, together: int, biased: bool) -> MachineCode:
    line, weight, result = Operand("f32", _ITEM), Operand("f32", 0), Operand("f32", -1)
    writer = Writer(3, [line, *[weight] * (together * (1 + biased)), *[result] * together])
    code, (tiles, inputs, rows) = writer.code, writer.lengths
    weights, results = range(1, together + 1), range(1 + together * (1 + biased), 1 + together * (2 + biased))
    with writer.loop(_I64(0), tiles, 1) as tile:
        places = [writer.at(k, tile) for k in range(results.stop)]
        zero = writer.number(0.0, "f32")
        starts = [writer.read(k + together, places[k + together], 0) if biased else zero for k in weights]
        totals = [[writer.cell(start) for _ in range(vectors)] for start in starts]
        sums = [[writer.cell(zero) for _ in range(vectors)] for _ in starts]

        def multiply(i: Any, into: Cells, places: Any = places) -> None:
            at = code.add(places[0], code.mul(i, writer.strides[0][1]))
            xs = [writer.read(0, at, _I64(v * LANES)) for v in range(vectors)]
            for k, cells in zip(weights, into, strict=True):
                value = writer.read(k, code.add(places[k], code.mul(i, _I64(_ITEM))), 0)
                for x, cell in zip(xs, cells, strict=True):
                    cell.set(fma(x, value, cell.get()))

        whole = code.and_(inputs, _I64(-LANES))
        with writer.loop(_I64(0), whole, STRETCH) as start:
            for cell in chain(*sums):
                cell.set(zero)
            end = code.add(start, _I64(STRETCH))
            end = code.select(code.icmp_signed("<", end, whole), end, whole)
            with writer.loop(start, end, LANES) as i:
                for k in weights:
                    ahead = code.add(places[k], writer.strides[k][0])
                    prefetch(code, code.add(ahead, code.mul(i, _I64(_ITEM))))
                for k in range(LANES):
                    multiply(code.add(i, _I64(k)), sums)
            for total, cell in zip(chain(*totals), chain(*sums), strict=True):
                total.set(total.get() + cell.get())
        with writer.loop(whole, inputs, 1) as i:
            multiply(i, totals)
        lanes = ir.Constant(vector_type("i64"), list(range(LANES)))
        last = (vectors - 1) * LANES
        mask = code.icmp_signed("<", lanes, writer.splat(code.sub(rows, _I64(last)), "i64").value)
        for k, cells in zip(results, totals, strict=True):
            for v, cell in enumerate(cells):
                i = v * LANES
                writer.write(k, places[k], _I64(i), cell.get(), mask if i == last else None)
    return MachineCode(writer.end())
