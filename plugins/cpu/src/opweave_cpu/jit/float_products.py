"""Products of one row with quantized weights at full precision: the integers of the blocks become f32 in registers.

Bytes are not widened. A byte that stands in the mantissa of an f32 whose exponent is chosen for its place gives a power
of two plus the byte, from which that power is subtracted, both without rounding. The four bytes of each lane are four
vectors; activations are put into the same order first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integer_products import Row, bind_few, write_totals
from opweave_cpu.jit.integers import PIECES, STRETCH, Form, form_of, load, store
from opweave_cpu.jit.vectors import LANES, Vector, fma, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn

__all__ = ["RECORD", "bind_float_product", "has_registers"]

RECORD: Final = 4 * STRETCH
"""Bytes of 256 activations."""

_I64: Final = ir.IntType(64)
_VECTOR_BYTES: Final = 64


def has_registers() -> bool:
    """Whether the processor has enough registers for all that is multiplied at once."""
    return {"avx512f", "avx512bw", "f16c"} <= target().features


def bind_float_product(stream: Stream, out: Arg, x: Arg, w: Arg, b: Arg | None, records: Arg) -> Call:
    """The call ``out = x @ w.T + b`` of one row, of dense operands.

    Args:
        records: ``u8``, `RECORD` bytes for each 256 inputs or part of them.
    """
    inputs, size, form = w.shape[1], x.dtype.itemsize, form_of(w.dtype.name, signed=False)
    stretches, tail = -(-inputs // STRETCH), inputs % STRETCH
    lies = (inputs * size, STRETCH * size, size), (RECORD, RECORD, 1)
    code = stream.artefact(("ordered", w.dtype.name, x.dtype.name, tail), partial(_ordered, form, x.dtype, tail))
    before = bind_walk(stream, code, Walk((1, stretches, STRETCH), lies), [x, records], work=1, by_first=True)
    args = [w, records, *([] if b is None else [b]), out]
    return in_turn([before, bind_few(stream, _one_exactly, form, tail, (1, stretches), args, RECORD)])


def _ordered(form: Form, x: DType, tail: int) -> MachineCode:
    """Puts activations into the order in which integers are unpacked: by vector, then by byte of its lanes."""
    writer = Writer(3, [Operand(x.name, x.itemsize), Operand("i8", 1)])
    code = writer.code
    with writer.loop(_I64(0), writer.lengths[0], 1) as r, writer.loop(_I64(0), writer.lengths[1], 1) as s:
        source, record = writer.at(0, r, s), writer.at(1, r, s)
        is_last = code.icmp_signed("==", s, code.sub(writer.lengths[1], _I64(1)))
        left = code.select(is_last, _I64(tail or STRETCH), _I64(STRETCH))
        for vector in range(PIECES // 4):
            runs = []
            for run in form.order[4 * vector : 4 * vector + 4]:
                lanes = ir.Constant(vector_type("i64"), list(range(run * LANES, (run + 1) * LANES)))
                mask = code.icmp_signed("<", lanes, writer.splat(left, "i64").value) if tail else None
                runs.append(writer.read(0, source, _I64(run * LANES), mask).value)
            pairs = [code.shuffle_vector(*runs[k : k + 2], _lanes(range(2 * LANES))) for k in (0, 2)]
            every = code.shuffle_vector(*pairs, _lanes(range(4 * LANES)))
            for byte in range(4):
                some = code.shuffle_vector(every, every, _lanes(range(byte, 4 * LANES, 4)))
                store(code, some, code.add(record, _I64((4 * vector + byte) * _VECTOR_BYTES)), 4)
    return MachineCode(writer.end())


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), list(numbers))


def _one_exactly(form: Form, tail: int, rows: int, biases: Sequence[Arg], into: DType) -> MachineCode:
    """One row by one row of weights after the other."""
    operands = [Operand("i8", 1)] * 2 + [Operand(b.dtype.name, 0) for b in biases] + [Operand(into.name, 0)] * rows
    writer = Writer(2, operands)
    code, weights = writer.code, Row(writer, form, tail)
    middle = -form.offset if form.offset < -1 else 0
    with writer.rows() as places:
        sums = [writer.cell(writer.number(0.0, "f32")) for _ in range(PIECES // 4)]
        with writer.loop(_I64(0), writer.length, 1) as s:
            integers, factors = form.decode(weights.stretch(places[0], s))
            record = writer.at(1, _I64(0), s)
            for vector, (some, total) in enumerate(zip(integers, sums, strict=True)):
                groups = form.group_of_run[4 * vector : 4 * vector + 4]
                of_lanes = [groups[lane // 4] for lane in range(LANES)]
                words = Vector(code, code.bitcast(some, vector_type("i32")), "i32")
                numbers = [_number(words, byte, middle) for byte in range(4)]
                xs = [_vector(code, record, 4 * vector + byte) for byte in range(4)]
                scale = _shuffled(code, factors, of_lanes)
                if middle:  # the four of a lane are multiplied by one factor
                    sum_of_lane = numbers[0] * xs[0]
                    for number, x in zip(numbers[1:], xs[1:], strict=True):
                        sum_of_lane = fma(number, x, sum_of_lane)
                    total.set(fma(sum_of_lane, scale, total.get()))
                    continue
                least = _shuffled(code, factors, [8 + lane for lane in of_lanes])
                least = least if form.offset > 0 else -least
                for number, x in zip(numbers, xs, strict=True):
                    total.set(fma(fma(number, scale, least), x, total.get()))
        first, second, third, fourth = [total.get() for total in sums]
        write_totals(writer, places, [(first + second) + (third + fourth)])
    return MachineCode(writer.end())


def _vector(code: Any, record: Any, number: int) -> Vector:
    at = code.add(record, _I64(number * _VECTOR_BYTES))
    return Vector(code, load(code, vector_type("f32"), at, 4), "f32")


def _shuffled(code: Any, x: Vector, lanes: Sequence[int]) -> Vector:
    return Vector(code, code.shuffle_vector(x.value, x.value, _lanes(lanes)), x.kind)


def _number(words: Vector, byte: int, middle: int) -> Vector:
    """A byte of each word, less ``middle``, as f32."""
    if byte > 1:
        words = words.shifted(16)
    place = 8 * (byte % 2)
    power = 23 - place
    bits = (words & (255 << place)) | ((127 + power) << 23)
    return bits.bits("f32") - float((1 << power) + middle)
