"""Products of rows in groups, each of which a matrix of its own multiplies, in f32: `expert_linear` of many rows.

Stretches of 16 rows of weights are decoded, or converted, and transposed once for all rows of a group, so that each
lane adds up one result.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.jit.blocks import DECODERS
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integers import prefetch
from opweave_cpu.jit.products import weight_values
from opweave_cpu.jit.row_blocks import (
    CHUNK,
    bind_groups,
    bind_row_blocks,
    chunks,
    clear_sums,
    place,
    row_bytes,
    store_results,
)
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, fma, load, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand
from opweave_cpu.jit.writer import Writer, takes
from opweave_cpu.tiles import in_turn

__all__ = ["bind_grouped_product", "fits_groups"]

STRETCH: Final = 256
"""Inputs whose weights, 16 KiB in f32, are transposed at a time. Blocks have no more."""

UNROLLED: Final = 4
"""Inputs that a turn of the innermost loop multiplies."""

_I64: Final = ir.IntType(64)


def fits_groups(step: Step) -> bool:
    """Whether `bind_grouped_product` takes a step: dense operands, and at least 16 rows of weights that are quantized,
    f32 or of a half type, in whole vectors."""
    x, w, ids = step.srcs
    if not ids.size or w.shape[1] < LANES or w.shape[2] % LANES or not all(a.is_dense for a in (step.out, x, w, ids)):
        return False
    is_decoded = w.dtype.name in DECODERS and (w.buffer_type is None or w.buffer_type.is_raw)
    is_read = (w.dtype is as_dtype("f32") or w.dtype.is_half) and takes(w, wide=False)
    return (is_decoded or is_read) and takes(step.out, wide=False) and takes(x, wide=False)


def bind_grouped_product(stream: Stream, out: Arg, x: Arg, w: Arg, ids: Arg, places: Arg, bounds: Arg) -> Call:
    """The call of ``expert_linear`` with ids that exist.

    Args:
        places, bounds: as of `bind_groups`.
    """
    experts, _, inputs = w.shape
    key = inputs % STRETCH, ids.size * inputs // x.size, x.dtype.name, out.dtype.name
    code = stream.artefact(("grouped product", w.dtype.name, key), partial(_product, w.dtype, *key))
    lengths, line = (-(-inputs // STRETCH), experts), inputs * x.dtype.itemsize
    of_weights, of_rows = (w.strides[1], w.dtype.row_bytes(STRETCH)), (STRETCH * x.dtype.itemsize, line)
    work = max(1, ids.size // experts) * STRETCH
    product = bind_row_blocks(stream, code, [w, x, out], lengths, of_weights, of_rows, work, groups=[places, bounds])
    return in_turn([bind_groups(ids.view, places.view, bounds.view), product])


def _product(weights: DType, tail: int, repeats: int, of: str, into: str) -> MachineCode:
    operands = [Operand(weights.name, weights.itemsize), Operand(of, 0), Operand(into, as_dtype(into).itemsize)]
    writer = Writer(3, [*operands, *[Operand("i64", 8)] * 2])
    code, zero, kind = writer.code, _I64(0), vector_type("f32")
    together = 8 if "avx512f" in target().features else 4  # rows whose sums fit the registers
    sums = writer.array(kind, CHUNK)
    values, panel = (writer.array(kind, STRETCH) for _ in range(2))
    with chunks(writer, grouped=True) as (n, chunk, rows):
        clear_sums(writer, sums, rows, together)
        with writer.loop(zero, writer.lengths[1], 1) as s:
            is_last = code.icmp_signed("==", s, code.sub(writer.lengths[1], _I64(1)))
            count = code.select(is_last, _I64(tail or STRETCH), _I64(STRETCH))
            blocks = code.udiv(count, _I64(weights.block))
            with writer.loop(zero, _I64(LANES), 1) as lane:
                row = code.add(writer.at(0, n, s), code.mul(lane, row_bytes(writer)))
                with writer.loop(zero, code.mul(blocks, _I64(weights.itemsize)), VECTOR_BYTES) as ahead:
                    prefetch(code, code.add(row, code.add(writer.strides[0][0], ahead)))  # the next 16 rows
                for i, (value,) in weight_values(writer, weights, [row], count):
                    store(code, value.value, place(code, values, code.add(i, lane)), VECTOR_BYTES)
            with writer.loop(zero, count, LANES) as i:
                at = [code.add(i, _I64(k)) for k in range(LANES)]
                some = [load(code, kind, place(code, values, k), VECTOR_BYTES) for k in at]
                for k, column in zip(at, transposed(code, some), strict=True):
                    store(code, column, place(code, panel, k), VECTOR_BYTES)
            with writer.loop(zero, rows, together) as r:
                xs, last = [], code.sub(code.sub(rows, _I64(1)), r)
                for k in range(together):  # behind the last row that one again: the result is stored nowhere
                    number = code.add(chunk, code.add(r, writer.at_most(k, last)))
                    row = load(code, _I64, writer.at(-2, zero, zero, number), 8)
                    xs.append(writer.at(1, zero, s, code.sdiv(row, _I64(repeats))))
                _multiply(writer, xs, as_dtype(of).itemsize, panel, count, place(code, sums, r))
        store_results(writer, sums, n, chunk, rows, biased=False, grouped=True)
    return MachineCode(writer.end())


def _multiply(writer: Writer, xs: list[Any], size: int, panel: Any, count: Any, sums: Any) -> None:
    """Adds the products of some rows and transposed weights to their sums, by a sum of each stretch: rounding errors
    grow with the length of a sum."""
    code, kind = writer.code, vector_type("f32")

    def vector(array: Any, i: Any) -> Vector:
        return Vector(code, load(code, kind, place(code, array, i), VECTOR_BYTES), "f32")

    cells = [writer.cell(writer.number(0.0, "f32")) for _ in xs]
    with writer.loop(_I64(0), count, UNROLLED) as first:
        for i in [code.add(first, _I64(k)) for k in range(UNROLLED)]:
            weights = vector(panel, i)
            for x, cell in zip(xs, cells, strict=True):
                cell.set(fma(writer.read(1, code.add(x, code.mul(i, _I64(size))), i), weights, cell.get()))
    for k, cell in enumerate(cells):
        total = vector(sums, _I64(k)) + cell.get()
        store(code, total.value, place(code, sums, _I64(k)), VECTOR_BYTES)
