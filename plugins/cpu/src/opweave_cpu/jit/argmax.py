"""``argmax`` along an axis with others inside of it: the largest elements of many columns at once, and where they are.

Along the last axis NumPy itself works in vectors, at the speed of memory.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Step, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import LANES, Vector, select, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer, takes

__all__ = ["bind_argmax", "fits"]

VECTORS: Final = 4
"""Vectors of columns that are compared together, so that whole cache lines and more are read from each row."""

_I64: Final = ir.IntType(64)


def fits(step: Step) -> bool:
    """Whether a step is compiled: of dense operands, with at least one vector of columns."""
    x, out = step.srcs[0], step.out
    axis = step.attrs["axis"] % len(x.shape)
    columns = prod(x.shape[axis + 1 :])
    dense = x.is_dense and out.is_dense and out.dtype.name in ("i32", "i64")
    return dense and columns >= LANES and x.shape[axis] < 1 << 31 and takes(x, wide=True)


def bind_argmax(stream: Stream, out: Arg, x: Arg, axis: int) -> Call:
    """The call for the operands of a step that fits."""
    axis, item, size = axis % len(x.shape), x.dtype.itemsize, out.dtype.itemsize
    outer, length, columns = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    strides = (length * columns * item, item, columns * item), (columns * size, size, 0)
    key = x.dtype.name, out.dtype.name
    code = stream.artefact(("argmax", key), partial(_compiled, x.dtype.name, out.dtype.name))
    return bind_walk(stream, code, Walk((outer, columns, length), strides, 2), [x, out], work=4)


def _compiled(of: str, into: str) -> MachineCode:
    sizes = {"f64": 8, "f32": 4, "i64": 8, "i32": 4}
    writer = Writer(3, [Operand(of, sizes.get(of, 2)), Operand(into, sizes[into])])
    code, zero, (outer, columns, length) = writer.code, _I64(0), writer.lengths

    def columns_from(x: Any, out: Any, at: list[Any], mask: Any) -> None:
        first = [writer.read(0, x, i, mask) for i in at]
        best = [writer.cell(value) for value in first]
        places = [writer.cell(writer.number(0, "i32")) for _ in at]
        with writer.loop(_I64(1), length, 1) as r:
            row = code.add(x, code.mul(r, writer.strides[0][2]))
            number = writer.splat(code.trunc(r, ir.IntType(32)), "i32")
            for i, value, place in zip(at, best, places, strict=True):
                new, old = writer.read(0, row, i, mask), value.get()
                # The first NaN is the largest.
                above = code.fcmp_unordered(">", new.value, old.value)
                better = Vector(code, code.and_(above, code.fcmp_ordered("ord", old.value, old.value)), "bool")
                value.set(select(better, new, old))
                place.set(select(better, number, place.get()))
        for i, place in zip(at, places, strict=True):
            writer.write(1, out, i, place.get().to(into), mask)

    with writer.loop(zero, outer, 1) as o:
        x, out = writer.at(0, o), writer.at(1, o)
        step = LANES * VECTORS
        whole = code.and_(columns, _I64(-step))
        with writer.loop(zero, whole, step) as i:
            columns_from(x, out, [code.add(i, _I64(k * LANES)) for k in range(VECTORS)], None)
        with writer.loop(whole, columns, LANES) as i:
            lanes = ir.Constant(vector_type("i64"), list(range(LANES)))
            mask = code.icmp_signed("<", lanes, writer.splat(code.sub(columns, i), "i64").value)
            columns_from(x, out, [i], mask)
    return MachineCode(writer.end())
