"""Products in bf16, by VDPBF16PS of AVX-512, which multiplies pairs and adds both products to each of 16 f32.

Pairs of inputs of 16 rows of weights are transposed, as many as stay in the first-level cache, so that each lane adds
up one result. The instruction takes subnormal numbers as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.vectors import LANES, Vector, declared, load, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn

__all__ = ["bind_half_product", "multiplies_pairs"]

PAIRS: Final = 256
"""Pairs of inputs whose weights, 16 KiB, are transposed at a time."""

CHUNK: Final = 128
"""Rows whose sums are in the cache at once. Weights are transposed anew for each chunk of rows."""

TOGETHER: Final = 8
"""Rows that are multiplied at once by a vector of weights: as many as hide the latency of the instruction."""

_ITEM: Final = 2
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_VECTOR_BYTES: Final = 64


def multiplies_pairs() -> bool:
    """Whether the processor has the instruction."""
    return {"avx512bf16", "avx512f"} <= target().features


def bind_half_product(stream: Stream, out: Arg, x: Arg, w: Arg, b: Arg | None) -> Call:
    """The call ``out = x @ w.T + b`` of dense operands in bf16, with at least 16 rows of weights of an even length."""
    outputs, inputs = w.shape
    rows, line = x.size // inputs, inputs * _ITEM
    code = stream.artefact(("half product", b is not None), partial(_product, b is not None))
    biases = [] if b is None else [b]
    strides = [(LANES * line, 2 * _ITEM, 0), (0, 2 * _ITEM, line), *[(LANES * _ITEM, 0, 0) for _ in biases]]
    strides.append((LANES * _ITEM, 0, outputs * _ITEM))
    calls = []
    # Of rows of weights that are no multiple of 16 the last 16 are multiplied too, some of them a second time.
    for first, count in ((0, outputs // LANES), (outputs - LANES, int(outputs % LANES > 0))):
        if count:
            args = [_from(w, first * line), x, *[_from(a, first * _ITEM) for a in (*biases, out)]]
            walk = Walk((count, inputs // 2, rows), tuple(strides))
            calls.append(bind_walk(stream, code, walk, args, work=1, by_first=True))
    return in_turn(calls)


def _from(arg: Arg, nbytes: int) -> Arg:
    return Arg(arg.buffer, arg.offset + nbytes, arg.dtype, arg.shape, arg.strides)


def _product(biased: bool) -> MachineCode:
    writer = Writer(3, [Operand("bf16", _ITEM)] * (3 + biased))
    code, (blocks, pairs, all_rows), out = writer.code, writer.lengths, 2 + biased
    sums = writer.array(vector_type("f32"), CHUNK + TOGETHER)
    panel = writer.array(vector_type("i32"), PAIRS)

    def place(array: Any, i: Any) -> Any:
        return code.add(array, code.mul(i, _I64(_VECTOR_BYTES)))

    def at_most(limit: Any, value: Any) -> Any:
        return code.select(code.icmp_signed("<", value, limit), value, limit)

    with ExitStack() as stack:
        n = stack.enter_context(writer.loop(_I64(0), blocks, 1))
        chunk = stack.enter_context(writer.loop(_I64(0), all_rows, CHUNK))
        rows = at_most(_I64(CHUNK), code.sub(all_rows, chunk))
        with writer.loop(_I64(0), code.add(rows, _I64(TOGETHER)), 1) as r:
            store(code, ir.Constant(vector_type("f32"), None), place(sums, r), 64)
        with writer.loop(_I64(0), pairs, PAIRS) as first:
            count = at_most(_I64(PAIRS), code.sub(pairs, first))
            with writer.loop(_I64(0), count, LANES) as p:
                _transpose(writer, writer.at(0, n, code.add(first, p)), code.sub(count, p), place(panel, p))
            with writer.loop(_I64(0), rows, TOGETHER) as r:
                last = code.sub(all_rows, _I64(1))  # rows behind it would lie outside of x
                numbers = [at_most(last, code.add(chunk, code.add(r, _I64(k)))) for k in range(TOGETHER)]
                xs = [writer.at(1, n, first, number) for number in numbers]
                _multiply(writer, xs, panel, count, place(sums, r))
        with writer.loop(_I64(0), rows, 1) as r:
            result = Vector(code, load(code, vector_type("f32"), place(sums, r), 64), "f32")
            if biased:
                result = result + writer.read(2, writer.at(2, n), _I64(0))
            writer.write(out, writer.at(out, n, _I64(0), code.add(chunk, r)), _I64(0), result)
    return MachineCode(writer.end())


def _transpose(writer: Writer, weights: Any, left: Any, panel: Any) -> None:
    """Up to 16 pairs of each of 16 rows of weights become vectors of 16 pairs, of one place each."""
    code, kind = writer.code, vector_type("i32")
    lanes = ir.Constant(vector_type("i64"), list(range(LANES)))
    mask = code.icmp_signed("<", lanes, writer.splat(left, "i64").value)
    row = code.lshr(writer.strides[0][0], _I64(4))
    types = [kind.as_pointer(), _I32, vector_type("bool"), kind]
    function = declared(code, f"llvm.masked.load.v{LANES}i32.p0", kind, types)
    rows = []
    for k in range(LANES):
        address = code.inttoptr(code.add(weights, code.mul(row, _I64(k))), kind.as_pointer())
        rows.append(code.call(function, [address, _I32(_ITEM), mask, ir.Constant(kind, None)]))
    for k, column in enumerate(transposed(code, rows)):
        store(code, column, code.add(panel, _I64(k * _VECTOR_BYTES)), 64)


def _multiply(writer: Writer, xs: Sequence[Any], panel: Any, count: Any, sums: Any) -> None:
    """Adds the products of some rows and transposed weights to their sums."""
    code, sum_type, pairs_type = writer.code, vector_type("f32"), vector_type("i32")
    function = declared(code, "llvm.x86.avx512bf16.dpbf16ps.512", sum_type, [sum_type, pairs_type, pairs_type])
    places = [code.add(sums, _I64(k * _VECTOR_BYTES)) for k in range(len(xs))]
    cells = [writer.cell(Vector(code, load(code, sum_type, place, 64), "f32")) for place in places]
    with writer.loop(_I64(0), count, 1) as p:
        weights = load(code, pairs_type, code.add(panel, code.mul(p, _I64(_VECTOR_BYTES))), 64)
        for x, cell in zip(xs, cells, strict=True):
            pair = load(code, _I32, code.add(x, code.mul(p, _I64(2 * _ITEM))), _ITEM)
            total = code.call(function, [cell.get().value, weights, writer.splat(pair, "i32").value])
            cell.set(Vector(code, total, "f32"))
    for place, cell in zip(places, cells, strict=True):
        store(code, cell.get().value, place, 64)
