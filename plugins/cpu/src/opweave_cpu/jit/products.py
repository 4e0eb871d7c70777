"""Products with quantized weights, and those of half types: decoded in registers, and multiplied there or stored for
BLAS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import dense_strides
from opweave_cpu.jit.blocks import DECODERS, decoded
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integers import prefetch
from opweave_cpu.jit.vectors import LANES, TYPES, Vector, fma, load
from opweave_cpu.jit.walk import Operand, Prepared, Walk, bind_walk, walk_over
from opweave_cpu.jit.writer import Writer, takes
from opweave_cpu.tunables import COMPILED_ROWS, limit

__all__ = [
    "bind_decoded",
    "bind_decoding",
    "bind_expert_product",
    "fits",
    "fits_experts",
    "is_decoded",
    "prepare_product",
    "weight_values",
]

MOST_PASS: Final = limit("product_pass_rows", 8, 1, 8, bounds=(1, 8))
"""Rows that are multiplied in one pass over some rows of weights."""

_SUMS: Final = 4
"""Sums that are under way at once, at least: an addition takes several cycles."""

_I64: Final = ir.IntType(64)
_F32: Final = as_dtype("f32")


def fits(step: Step) -> bool:
    """Whether a product is compiled as a whole."""
    if step.op != "linear" or not (is_decoded(step.srcs[1]) or _is_read(step.srcs[1])):
        return False
    x, w = step.srcs[:2]
    others = (step.out, x, *step.srcs[2:])
    rows = x.size // w.shape[1]
    lies = step.out.is_dense and x.is_dense and all(takes(arg, wide=False) for arg in others)
    return rows <= COMPILED_ROWS.value and lies


def _is_read(w: Arg) -> bool:
    """Whether weights are read as they lie, in vectors."""
    lies = len(w.shape) == 2 and w.shape[1] % LANES == 0 and w.strides[1] == w.dtype.itemsize
    return lies and (w.dtype is _F32 or w.dtype.is_half) and takes(w, wide=False)


def is_decoded(w: Arg) -> bool:
    """Whether weights can be decoded, or converted, by compiled functions."""
    if w.dtype.is_half:
        return _is_read(w)
    lies = len(w.shape) == 2 and w.strides[1] == w.dtype.itemsize and w.dtype.name in DECODERS
    return lies and (w.buffer_type is None or w.buffer_type.is_raw)


def prepare_product(stream: Stream, step: Step) -> Prepared:
    """The kernel for a product that fits; it takes the sources, then the result."""
    out, x, w, *bias = step.out, *step.srcs
    outputs, inputs = w.shape
    rows = x.size // inputs
    together = _together(rows, outputs)
    size = out.dtype.itemsize
    ours, last = range(together), 2 + len(bias)
    places = [(1, k * w.strides[0]) for k in ours] + [(0, r * inputs * x.dtype.itemsize) for r in range(rows)]
    places += [(2, k * b.strides[0]) for b in bias for k in ours]
    places += [(last, (r * outputs + k) * size) for r in range(rows) for k in ours]
    strides = [(together * w.strides[0], 0)] * together + [(0, x.dtype.itemsize)] * rows
    strides += [(together * b.strides[0], 0) for b in bias for _ in ours] + [(together * size, 0)] * (rows * together)
    walk = Walk((outputs // together, inputs), tuple(strides), 1)
    key = w.dtype.name, rows, together, x.dtype.name, bias[0].dtype.name if bias else "", out.dtype.name
    code = stream.artefact(("product", key), partial(_product, w.dtype, *key[1:]))
    return Prepared(code, walk, work=together * (rows + 2), places=places)


def _most_sums() -> int:
    """Vectors of sums that fit the registers beside what is multiplied."""
    return 16 if "avx512f" in target().features else 4


def _together(rows: int, outputs: int) -> int:
    """Rows of weights that are multiplied at once, so that each vector of ``x`` is read less often. A single row of it
    stays in the cache, and memory is read fastest from one place at a time."""
    if rows == 1:
        return 1
    some = min(rows, _most_sums() // 2)
    return next(n for n in (4, 2, 1) if outputs % n == 0 and n * some <= _most_sums())


def _product(weights: DType, rows: int, together: int, of: str, bias: str, into: str) -> MachineCode:
    stored, sources = Operand(weights.name, weights.itemsize), Operand(of, as_dtype(of).itemsize)
    biases, results = [Operand(bias, 0)] * (together * bool(bias)), [Operand(into, 0)] * (rows * together)
    writer = Writer(2, [stored] * together + [sources] * rows + biases + results)
    most = max(1, min(MOST_PASS.value, _most_sums() // together))
    with writer.rows() as places:
        for first in range(0, rows, most):
            some = range(first, min(first + most, rows))
            totals = _sums(writer, weights, places, together, some)
            for (r, k), total in totals.items():
                if bias:
                    at = together + rows + k
                    total = total + writer.read(at, places[at], _I64(0))
                at = len(places) - (rows - r) * together + k
                writer.write_one(at, places[at], total)
    return MachineCode(writer.end())


def _sums(
    writer: Writer, weights: DType, places: Sequence[Any], together: int, rows: range
) -> dict[tuple[int, int], Vector]:
    """By row of x and row of weights: the sum of their products, in all lanes."""
    zero = writer.number(0.0, "f32")
    parts = max(1, _SUMS // (len(rows) * together))
    cells = {(r, k): [writer.cell(zero) for _ in range(parts)] for r in rows for k in range(together)}
    for number, (i, values) in enumerate(weight_values(writer, weights, places[:together], writer.length)):
        for r in rows:
            x = writer.read(together + r, places[together + r], i)
            for k, value in enumerate(values):
                cell = cells[r, k][number % parts]
                cell.set(fma(x, value, cell.get()))
    totals = {}
    for at, (first, *others) in cells.items():
        total = first.get()
        for other in others:
            total = total + other.get()
        totals[at] = writer.total(total)
    return totals


def fits_experts(step: Step) -> bool:
    """Whether `bind_expert_product` takes a step: a few rows, and plain weights that are read as they lie."""
    x, w, ids = step.srcs
    if not 0 < ids.size <= COMPILED_ROWS.value or w.shape[2] % LANES or not w.dtype.is_float:
        return False
    args = step.out, x, w
    return all(arg.strides[-1] == arg.dtype.itemsize and takes(arg, wide=False) for arg in args)


def bind_expert_product(stream: Stream, out: Arg, x: Arg, w: Arg, ids: Arg) -> Call:
    """The call of ``expert_linear``, each row by itself, with ids that exist."""
    outputs, inputs = w.shape[1:]
    shared = x.shape[1] == 1
    strides = (
        (0, 0, *w.strides[1:]),
        (x.strides[0], 0 if shared else x.strides[1], 0, x.strides[2]),
        (*ids.strides, 0, 0),
        (*out.strides, 0),
    )
    kinds = [arg.dtype.name for arg in (w, x, ids, out)]
    code = stream.artefact(("expert product", *kinds), partial(_expert_product, *kinds))
    walk = Walk((*ids.shape, outputs, inputs), strides, 3)
    return bind_walk(stream, code, walk, [w, x, ids, out], [w.strides[0]], work=3)


def _expert_product(weights: str, of: str, picks: str, into: str) -> MachineCode:
    sources = [Operand(name, as_dtype(name).itemsize) for name in (weights, of)]
    writer = Writer(4, [*sources, Operand(picks, 0), Operand(into, 0)])
    code, expert = writer.code, writer.integer()
    with writer.rows() as (w, x, ids, out):
        number = code.sext(load(code, TYPES[picks], ids), _I64) if picks == "i32" else load(code, _I64, ids)
        place = code.add(w, code.mul(number, expert))
        writer.write_one(3, out, _sums(writer, as_dtype(weights), [place, x], 1, range(1))[0, 0])
    return MachineCode(writer.end())


def weight_values(
    writer: Writer, weights: DType, rows: Sequence[Any], length: Any
) -> Iterator[tuple[Any, Sequence[Vector]]]:
    """Writes a loop over the blocks, or vectors, of rows of weights, which are operands 0, 1, ...: gives the index of
    some values in their row, and these values of each row."""
    code = writer.code
    if weights.is_float:
        with writer.loop(_I64(0), length, LANES) as i:
            # Of several rows at once, the processor itself prefetches those that come next too late, except those of
            # half types. A single row it reads as fast as memory is, and slower with such instructions.
            for k, row in enumerate(rows if weights is _F32 and len(rows) > 1 else ()):
                ahead = code.add(row, writer.strides[k][-2])
                prefetch(code, code.add(ahead, code.mul(i, _I64(weights.itemsize))))
            yield i, [writer.read(k, row, i) for k, row in enumerate(rows)]
        return
    with writer.loop(_I64(0), length, weights.block) as start:
        for k, values in enumerate(zip(*[decoded(writer, weights, row, start) for row in rows], strict=True)):
            yield code.add(start, _I64(k * LANES)), values


def bind_decoding(stream: Stream, w: Arg, rows: slice, values: Arg) -> Call:
    """The call that decodes rows of weights into the first rows of a dense array in f32."""
    shape = rows.stop - rows.start, w.shape[1]
    some = Arg(w.buffer, w.offset + rows.start * w.strides[0], w.dtype, shape, w.strides)
    return bind_decoded(stream, Arg(values.buffer, values.offset, _F32, shape, dense_strides(shape, _F32)), some)


def bind_decoded(stream: Stream, out: Arg, x: Arg, *, alone: bool = False) -> Call:
    """The call that decodes, or converts, ``x`` into ``out``, f32, whose elements of a row lie side by side, as do the
    blocks of ``x``; with ``alone`` in the thread that makes it."""
    walk = walk_over(x.shape, [x.strides, out.strides], rows=True)
    if alone:
        walk = walk._replace(divisible=0)
    key = x.dtype, len(walk.lengths), walk.operands([x, out])
    code = stream.artefact(("decoding", key), partial(_decoding, *key))
    return bind_walk(stream, code, walk, [x, out], work=2)


def _decoding(stored: DType, axes: int, operands: Sequence[Operand]) -> MachineCode:
    writer = Writer(axes, operands)
    with writer.rows() as (x, out):
        if stored.is_float:
            writer.elements(lambda i, mask, _: writer.write(1, out, i, writer.read(0, x, i, mask), mask), 4)
        else:
            for i, (value,) in weight_values(writer, stored, [x], writer.length):
                writer.write(1, out, i, value)
    return MachineCode(writer.end())
