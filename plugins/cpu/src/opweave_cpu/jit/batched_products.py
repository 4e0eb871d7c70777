"""Many small products, f32 or f64, as one compiled loop: each thread does whole products of its own.

BLAS does one after the other, and wakes its threads for each. An encoder of 64 tokens whose attention is products and a
softmax takes 1.17 times as long with it.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Step, Stream
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.vectors import LANES, Vector, fma, load, vector_type
from opweave_cpu.jit.walk import Operand, Prepared, Walk, walk_over
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tunables import SMALL_PRODUCT, limit

__all__ = ["fits", "prepare_products"]

LONGEST_SUM: Final = limit("batched_sum", 1 << 10, 1, 1 << 10, bounds=(1, 1 << 10))
"""Terms of a sum at most: they are added up one by one."""

RIGHT_BYTES: Final = limit("batched_right_bytes", 1 << 17, 1, 1 << 20)
"""Bytes of the right matrix at most: it is read where it lies, again for each few rows of the left one, and stays in
the second-level cache."""

_I64: Final = ir.IntType(64)


def fits(step: Step) -> bool:
    """Whether this is faster for a product than BLAS: both operands have the leading axes of the result, of one type in
    ordinary memory."""
    out, (a, b) = step.out, step.srcs
    item, (m, n), k = out.dtype.itemsize, out.shape[-2:], a.shape[-1]
    if out.dtype.name not in ("f32", "f64") or m * n * k > SMALL_PRODUCT.value or n < LANES or prod(out.shape[:-2]) < 2:
        return False
    if any(arg.shape[:-2] != out.shape[:-2] or arg.dtype is not out.dtype for arg in (a, b)):
        return False
    return k <= LONGEST_SUM.value and k * n * item <= RIGHT_BYTES.value and {b.strides[-1], out.strides[-1]} == {item}


def prepare_products(stream: Stream, step: Step) -> Prepared:
    """The kernel for a product that fits; it takes the sources, then the result."""
    out, (a, b) = step.out, step.srcs
    item, (m, n), k = out.dtype.itemsize, out.shape[-2:], a.shape[-1]
    lead = walk_over(out.shape[:-2], [arg.strides[:-2] for arg in (a, b, out)])
    rows, columns = _tile(n, out.dtype.name)
    strides = (
        (*lead.strides[0], a.strides[-2], 0, a.strides[-1]),
        (*lead.strides[1], 0, item, b.strides[-2]),
        (*lead.strides[2], out.strides[-2], item, 0),
    )
    key = len(lead.lengths) + 3, out.dtype.name, item, rows, columns
    code = stream.artefact(("batched products", key), partial(_compiled, *key))
    return Prepared(code, Walk((*lead.lengths, m, n, k), strides, 1), work=1)


def _tile(n: int, dtype: str) -> tuple[int, int]:
    """How many rows of the left matrix are multiplied by how many vectors of columns of the right one at a time, so
    that their sums stay in registers."""
    if "avx512f" not in target().features:
        return (6, 1) if dtype == "f32" else (3, 1)
    most = 4 if dtype == "f32" else 2
    # Columns that are computed in vain cost as much as others.
    vectors = min(range(most, 1, -1), key=lambda v: -(-n // (v * LANES)) * v)
    return {2: 12, 3: 8, 4: 6}[vectors] if dtype == "f32" else 6, vectors


def _compiled(axes: int, dtype: str, item: int, rows: int, vectors: int) -> MachineCode:
    """Sums of ``rows`` by ``vectors`` vectors at a time; of the last rows, some are computed again."""
    writer = Writer(axes, [Operand(dtype, 0), Operand(dtype, item), Operand(dtype, item)])
    code, (m, n, k) = writer.code, writer.lengths[-3:]
    (down, _, along), (_, _, next_row), (out_row, _, _) = [strides[-3:] for strides in writer.strides]
    step, element = LANES * vectors, vector_type(dtype).element

    def block(a: Any, b: Any, out: Any, row: Any, column: Any, masks: Any) -> None:
        last = code.sub(m, _I64(1))
        numbers = [code.add(row, _I64(r)) for r in range(rows)]
        numbers = [code.select(code.icmp_signed("<", number, last), number, last) for number in numbers]
        lefts = [code.add(a, code.mul(number, down)) for number in numbers]
        sums = [[writer.cell(writer.number(0.0, dtype)) for _ in range(vectors)] for _ in range(rows)]
        right = code.add(b, code.mul(column, _I64(item)))
        with writer.loop(_I64(0), k, 1) as i:
            line = code.add(right, code.mul(i, next_row))
            values = [writer.read(1, line, _I64(LANES * v), masks[v]) for v in range(vectors)]
            offset = code.mul(i, along)
            for left, cells in zip(lefts, sums, strict=True):
                factor = writer.splat(load(code, element, code.add(left, offset), item), dtype)
                for value, cell in zip(values, cells, strict=True):
                    cell.set(fma(factor, value, cell.get()))
        for number, cells in zip(numbers, sums, strict=True):
            place = code.add(code.add(out, code.mul(number, out_row)), code.mul(column, _I64(item)))
            for v, cell in enumerate(cells):
                writer.write(2, place, _I64(LANES * v), cell.get(), masks[v])

    def blocks(a: Any, b: Any, out: Any, column: Any, masks: Any) -> None:
        with writer.loop(_I64(0), m, rows) as row:
            block(a, b, out, row, column, masks)

    lanes = Vector(code, ir.Constant(vector_type("i64"), list(range(LANES))), "i64")
    with writer.blocks(3) as (a, b, out):
        whole = code.mul(code.sdiv(n, _I64(step)), _I64(step))
        with writer.loop(_I64(0), whole, step) as column:
            blocks(a, b, out, column, [None] * vectors)
        with writer.loop(whole, n, step) as column:
            left = writer.splat(code.sub(n, column), "i64")
            blocks(a, b, out, column, [(lanes + LANES * v < left).value for v in range(vectors)])
    return MachineCode(writer.end())
