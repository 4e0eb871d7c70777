"""Products with quantized weights, and those of half types: decoded in registers, and multiplied there or stored for
BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.jit.blocks import DECODERS, Block
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import LANES, Vector, fma
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer, takes

__all__ = ["bind_decoding", "bind_product", "fits", "is_decoded"]

MOST_ROWS: Final = 8
"""Rows up to which a product reads each block once and multiplies it in registers; of more rows BLAS is faster, even
though it reads decoded weights from memory."""

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
    if rows > MOST_ROWS or (
        rows == 1 and w.dtype is _F32
    ):  # a single row BLAS multiplies as fast as memory can be read
        return False
    return step.out.is_dense and x.is_dense and all(takes(arg, wide=False) for arg in others)


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


def bind_product(stream: Stream, step: Step) -> Call:
    """The call for a bound product that fits."""
    out, x, w, *bias = step.out, *step.srcs
    outputs, inputs = w.shape
    rows = x.size // inputs
    args = [w, *[_row(x, r, inputs) for r in range(rows)], *bias, *[_row(out, r, outputs) for r in range(rows)]]
    strides = [(w.strides[0], 0), *[(0, x.dtype.itemsize)] * rows, *[(b.strides[0], 0) for b in bias]]
    walk = Walk((outputs, inputs), (*strides, *[(out.dtype.itemsize, 0)] * rows))
    key = w.dtype.name, rows, x.dtype.name, bias[0].dtype.name if bias else "", out.dtype.name
    code = stream.artefact(("product", key), partial(_product, w.dtype, *key[1:]))
    return bind_walk(stream, code, walk, args, work=rows + 2, rows=True)


def _row(arg: Arg, r: int, length: int) -> Arg:
    """Row ``r`` of a dense operand."""
    itemsize = arg.dtype.itemsize
    return Arg(arg.buffer, arg.offset + r * length * itemsize, arg.dtype, (length,), (itemsize,))


def _product(weights: DType, rows: int, of: str, bias: str, into: str) -> MachineCode:
    sources = [Operand(of, as_dtype(of).itemsize)] * rows
    writer = Writer(
        2,
        [
            Operand(weights.name, weights.itemsize),
            *sources,
            *[Operand(bias, 0)] * bool(bias),
            *[Operand(into, 0)] * rows,
        ],
    )
    parts = max(1, _SUMS // rows)
    with writer.rows() as places:
        zero = writer.number(0.0, "f32")
        cells = [[writer.cell(zero) for _ in range(parts)] for _ in range(rows)]
        for number, (i, value) in enumerate(_values(writer, weights, places[0])):
            for r in range(rows):
                cell = cells[r][number % parts]
                cell.set(fma(writer.read(1 + r, places[1 + r], i), value, cell.get()))
        for r in range(rows):
            first, *others = [cell.get() for cell in cells[r]]
            for other in others:
                first = first + other
            total = writer.total(first)
            if bias:
                total = total + writer.read(1 + rows, places[1 + rows], _I64(0))
            k = len(places) - rows + r
            writer.write_one(k, places[k], total)
    return MachineCode(writer.end())


def _values(writer: Writer, weights: DType, row: Any) -> Iterator[tuple[Any, Vector]]:
    """The values of a row of weights and where they are in it, within a loop over its blocks, or vectors."""
    code = writer.code
    if weights.is_float:
        with writer.loop(_I64(0), writer.length, LANES) as i:
            yield i, writer.read(0, row, i)
        return
    with writer.loop(_I64(0), code.sdiv(writer.length, _I64(weights.block)), 1) as number:
        block = Block(writer, code.add(row, code.mul(number, _I64(weights.itemsize))))
        start = code.mul(number, _I64(weights.block))
        for k, value in enumerate(DECODERS[weights.name](block)):
            yield code.add(start, _I64(k * LANES)), value


def bind_decoding(stream: Stream, w: Arg, rows: slice, values: Arg) -> Call:
    """The call that decodes rows of weights into the first rows of a dense array in f32."""
    count, inputs = rows.stop - rows.start, w.shape[1]
    some = Arg(w.buffer, w.offset + rows.start * w.strides[0], w.dtype, (count, inputs), w.strides)
    walk = Walk((count, inputs), ((w.strides[0], 0), (inputs * _F32.itemsize, _F32.itemsize)))
    code = stream.artefact(("decoding", w.dtype.name), partial(_decoding, w.dtype))
    return bind_walk(stream, code, walk, [some, values], work=2, rows=True)


def _decoding(weights: DType) -> MachineCode:
    writer = Writer(2, [Operand(weights.name, weights.itemsize), Operand("f32", 4)])
    with writer.rows() as places:
        for i, value in _values(writer, weights, places[0]):
            writer.write(1, places[1], i, value)
    return MachineCode(writer.end())
