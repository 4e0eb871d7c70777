"""Copies whose source has its neighbours along another axis than the result: 16 by 16 elements are read along the one
axis, transposed in registers, and written along the other one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.copies import KINDS
from opweave_cpu.jit.vectors import LANES, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer

__all__ = ["bind_transpose"]

_I64: Final = ir.IntType(64)


def bind_transpose(stream: Stream, out: Arg, x: Arg) -> Call | None:
    """The call that copies ``x`` to dense ``out`` of its type and shape, or ``None`` if ``x`` is not transposed."""
    item, last = x.dtype.itemsize, len(x.shape) - 1
    kind = KINDS.get(item)
    inner = next((k for k in range(last) if x.strides[k] == item and x.shape[k] >= LANES), None)
    known = all(arg.buffer_type is None or arg.buffer_type.is_raw for arg in (x, out))
    if kind is None or x.dtype.is_quantized or inner is None or x.shape[last] < LANES or not (known and out.is_dense):
        return None
    axes = [*[k for k in range(last) if k != inner], last, inner]
    lengths = tuple([x.shape[k] for k in axes])
    strides = tuple([tuple([arg.strides[k] for k in axes]) for arg in (x, out)])
    code = stream.artefact(("transpose", kind, len(axes)), partial(_compiled, kind, item, len(axes)))
    return bind_walk(stream, code, Walk(lengths, strides, len(lengths) - 1), [x, out], work=2)


def _compiled(kind: str, item: int, axes: int) -> MachineCode:
    """Elements of the source lie side by side along the last axis, those of the result along the one before it."""
    writer = Writer(axes, [Operand(kind, item), Operand(kind, -1)])
    code, (*_, columns, length) = writer.code, writer.lengths
    source, target = [strides[-2:] for strides in writer.strides]
    even, whole = code.and_(columns, _I64(-LANES)), code.and_(length, _I64(-LANES))

    def at(base: Any, strides: Sequence[Any], c: Any, i: Any) -> Any:
        return code.add(code.add(base, code.mul(c, strides[0])), code.mul(i, strides[1]))

    def move(x: Any, out: Any, c: Any, start: Any) -> None:
        """Copies the elements of a column from ``start`` on, which do not lie side by side in the result."""
        with writer.loop(start, length, LANES) as i:
            lanes = ir.Constant(vector_type("i64"), list(range(LANES)))
            mask = code.icmp_signed("<", lanes, writer.splat(code.sub(length, i), "i64").value)
            value = writer.read(0, at(x, source, c, i), _I64(0), mask)
            writer.write(1, at(out, target, c, i), _I64(0), value, mask)

    with writer.blocks(2) as (x, out):
        with writer.loop(_I64(0), even, LANES) as c:
            with writer.loop(_I64(0), whole, LANES) as i:
                tile = [writer.read(0, at(x, source, code.add(c, _I64(k)), i), _I64(0)).value for k in range(LANES)]
                for k, row in enumerate(transposed(code, tile)):
                    store(code, row, at(out, target, c, code.add(i, _I64(k))), item)
            with writer.loop(c, code.add(c, _I64(LANES)), 1) as column:
                move(x, out, column, whole)
        with writer.loop(even, columns, 1) as column:
            move(x, out, column, _I64(0))
    return MachineCode(writer.end())
