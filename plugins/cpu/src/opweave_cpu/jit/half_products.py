"""Products in bf16, by VDPBF16PS of AVX-512, which multiplies pairs and adds both products to each of 16 f32.

Pairs of inputs of 16 rows of weights are transposed, as many as stay in the first-level cache, so that each lane adds
up one result. The instruction takes subnormal numbers as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.row_blocks import CHUNK, bind_row_blocks, chunks, clear_sums, place, row_bytes, store_results
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, declared, load, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand
from opweave_cpu.jit.writer import Writer

__all__ = ["bind_half_product", "multiplies_pairs"]

PAIRS: Final = 256
"""Pairs of inputs whose weights, 16 KiB, are transposed at a time."""

TOGETHER: Final = (8, 12, 16)
"""Rows that may be multiplied at once by a vector of weights: registers hold the sums and addresses of so many."""

UNDER_WAY: Final = 12
"""Rows from which on the latency of the instruction is hidden: fewer take as long. Zen 5 begins two in each of the six
cycles that one takes."""

_ITEM: Final = 2
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)


def multiplies_pairs() -> bool:
    """Whether the processor has the instruction."""
    return {"avx512bf16", "avx512f"} <= target().features


def bind_half_product(stream: Stream, out: Arg, x: Arg, w: Arg, b: Arg | None) -> Call:
    """The call ``out = x @ w.T + b`` of dense operands in bf16, with at least 16 rows of weights of an even length."""
    inputs = w.shape[1]
    rows, line = x.size // inputs, inputs * _ITEM
    together = min(TOGETHER, key=lambda some: -(-rows // some) * max(some, UNDER_WAY))
    key = b is not None, together
    code = stream.artefact(("half product", key), partial(_product, *key))
    args = [w, x, *([] if b is None else [b]), out]
    return bind_row_blocks(stream, code, args, (inputs // 2, rows), (line, 2 * _ITEM), (2 * _ITEM, line), LANES)


def _product(biased: bool, together: int) -> MachineCode:
    writer = Writer(3, [Operand("bf16", _ITEM)] * (3 + biased))
    code, (_, pairs, all_rows) = writer.code, writer.lengths
    sums = writer.array(vector_type("f32"), CHUNK + together)
    panel = writer.array(vector_type("i32"), PAIRS)
    with chunks(writer) as (n, chunk, rows):
        clear_sums(writer, sums, rows, together)
        with writer.loop(_I64(0), pairs, PAIRS) as first:
            count = writer.at_most(PAIRS, code.sub(pairs, first))
            with writer.loop(_I64(0), count, LANES) as p:
                _transpose(writer, writer.at(0, n, code.add(first, p)), code.sub(count, p), place(code, panel, p))
            with writer.loop(_I64(0), rows, together) as r:
                last = code.sub(all_rows, _I64(1))  # rows behind it would lie outside of x
                numbers = [code.add(chunk, code.add(r, _I64(k))) for k in range(together)]
                numbers = [code.select(code.icmp_signed("<", number, last), number, last) for number in numbers]
                xs = [writer.at(1, n, first, number) for number in numbers]
                _multiply(writer, xs, panel, count, place(code, sums, r))
        store_results(writer, sums, n, chunk, rows, biased=biased)
    return MachineCode(writer.end())


def _transpose(writer: Writer, weights: Any, left: Any, panel: Any) -> None:
    """Up to 16 pairs of each of 16 rows of weights become vectors of 16 pairs, of one place each."""
    code, kind = writer.code, vector_type("i32")
    lanes = ir.Constant(vector_type("i64"), list(range(LANES)))
    mask = code.icmp_signed("<", lanes, writer.splat(left, "i64").value)
    row = row_bytes(writer)
    types = [kind.as_pointer(), _I32, vector_type("bool"), kind]
    function = declared(code, f"llvm.masked.load.v{LANES}i32.p0", kind, types)
    rows = []
    for k in range(LANES):
        address = code.inttoptr(code.add(weights, code.mul(row, _I64(k))), kind.as_pointer())
        rows.append(code.call(function, [address, _I32(_ITEM), mask, ir.Constant(kind, None)]))
    for k, column in enumerate(transposed(code, rows)):
        store(code, column, code.add(panel, _I64(k * VECTOR_BYTES)), 64)


def _multiply(writer: Writer, xs: Sequence[Any], panel: Any, count: Any, sums: Any) -> None:
    """Adds the products of some rows and transposed weights to their sums."""
    code, sum_type, pairs_type = writer.code, vector_type("f32"), vector_type("i32")
    function = declared(code, "llvm.x86.avx512bf16.dpbf16ps.512", sum_type, [sum_type, pairs_type, pairs_type])
    places = [code.add(sums, _I64(k * VECTOR_BYTES)) for k in range(len(xs))]
    cells = [writer.cell(Vector(code, load(code, sum_type, at, 64), "f32")) for at in places]
    with writer.loop(_I64(0), count, 1) as p:
        weights = load(code, pairs_type, code.add(panel, code.mul(p, _I64(VECTOR_BYTES))), 64)
        for x, cell in zip(xs, cells, strict=True):
            pair = load(code, _I32, code.add(x, code.mul(p, _I64(2 * _ITEM))), _ITEM)
            total = code.call(function, [cell.get().value, weights, writer.splat(pair, "i32").value])
            cell.set(Vector(code, total, "f32"))
    for at, cell in zip(places, cells, strict=True):
        store(code, cell.get().value, at, 64)
