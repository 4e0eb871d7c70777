"""Activations as integers, for products with the integers of quantized weights.

Each 256 activations of a row become a *record*: the digits of their integers, a byte each, all first digits before all
second ones; then 16 f32. With 8 groups of 32 these are the factor of each group, then the sum of each times the
``offset`` of the `Form`; with groups of 16 their factors, and 16 more for such sums. Products take what the weights of
a group have beside a multiple of their integers, g of the `Form`, from the sum.

For products of tiles (`opweave_cpu.jit.amx`) the records of 16 rows are interleaved: four digits of each row in turn,
and one f32 of each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave.graph.precision import Precision
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.integers import RUNS, STRETCH, Form
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, fma, intrinsic, load, select, store, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn

__all__ = ["Digits", "Order", "bind_records", "digits_of", "sums_of_products"]

Order = Literal["unpacked", "interleaved"]
"""How digits lie: in the order of the integers of weights, or in that of the activations with 16 rows interleaved."""

SMALLEST: Final = 2.0**-80
LARGEST: Final = 2.0**100
"""For three digits the largest magnitude of a group is 0, or between these: factors are then normal numbers, and sums
of products finite."""

_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)


class Digits(NamedTuple):
    """How the integers of activations are written, as signed digits.

    One digit holds integers to 127: each group of 32 is rounded to a multiple of a 127th of its largest magnitude, as
    in q8_0. Three digits hold integers to ``2**bits``, and the factor of a group is a power of two, so that activations
    of few bits are not rounded at all. The root mean square of 32 normal numbers being 0.4 of the largest, rounding to
    20 bits brings a normalized mean squared error below 5e-13.

    Attributes:
        places: the number of digits, 1 or 3.
        base_bits: the base is 2 to the power of this.
        bits: integers of three digits are from ``-2**bits`` to ``2**bits``.
    """

    places: int
    base_bits: int
    bits: int

    def record_bytes(self, form: Form) -> int:
        """Bytes of 256 activations."""
        return self.places * STRETCH + VECTOR_BYTES * (form.groups // 8)


def digits_of(form: Form, precision: Precision) -> Digits:
    """How activations are written for weights of that form: the more digits, the closer is the product."""
    if precision == "int8":
        return Digits(1, 8, 7)
    if form.signed:  # a digit may be negated, and its products with two weights added up in an i16: so none is -128
        return Digits(3, 7, 20)
    # As many bits as leave room in an i32 for the sum of all products of a group, or of four with bytes.
    return Digits(3, 8, 22 if form.largest <= 15 else 21)


def bind_records(
    stream: Stream,
    form: Form,
    digits: Digits,
    x: Arg,
    w: DType,
    records: Arg,
    marks: Arg | None,
    *,
    padded: int,
    order: Order,
    places: Arg | None = None,
    repeats: int = 0,
) -> Call:
    """The call that makes records of dense activations. The records of all rows for one stretch lie side by side.

    Args:
        marks: with three digits, ``u8``, one for each row: set to 1 where integers cannot represent activations of the
            row because they are infinite, NaN, or of magnitudes beyond `SMALLEST` and `LARGEST`; else to 0.
        padded: rows for which there is memory, a multiple of 16 if they are interleaved. Those behind the last row
            stay as they are.
        places: i64, for each of the ``padded`` records, interleaved ones, the number of the row that it is made of,
            where each row has ``repeats`` numbers in turn; negative where there is none. Default: all rows in turn.
    """
    inputs, size = x.shape[-1], x.dtype.itemsize
    rows, stretches, tail = x.size // inputs, -(-inputs // STRETCH), inputs % STRETCH
    record = digits.record_bytes(form)
    key = "records", w.name, digits, x.dtype.name, tail, order, repeats
    code = stream.artefact(key, partial(_records, form, digits, x.dtype, tail, order=order, repeats=repeats))
    # Two axes of rows: of blocks, and of the rows of each.
    parts, of_block, of_row = [(0, rows, 1)], record, 0
    if order == "interleaved":
        rows = rows if places is None else padded
        parts, of_block, of_row = [(0, rows // LANES, LANES), (rows // LANES, 1, rows % LANES)], LANES * record, 4
    height = max(n for _, _, n in parts)
    calls = []
    for first, count, n in parts:
        if count and n:
            strides = [(height * inputs * size if places is None else 0, inputs * size, STRETCH * size, size)]
            strides += [(of_block, of_row, padded * record, 1), *[(height, 1, 0, 0)] * (marks is not None)]
            args = [moved(x, first * strides[0][0]), moved(records, first * of_block)]
            args += [] if marks is None else [moved(marks, first * height)]
            if places is not None:
                args.append(places)
                strides.append((height * 8, 8, 0, 0))
            walk = Walk((count, n, stretches, STRETCH), tuple(strides), 1)
            calls.append(bind_walk(stream, code, walk, args, work=4 * digits.places))
    return in_turn(calls)


def _records(form: Form, digits: Digits, x: DType, tail: int, *, order: Order, repeats: int = 0) -> MachineCode:
    exact = digits.places > 1
    operands = [Operand(x.name, x.itemsize), *[Operand("i8", 1)] * (1 + exact)]
    writer = Writer(4, [*operands, *[Operand("i64", 8)] * (repeats > 0)])
    code, lengths = writer.code, writer.lengths
    place = {run: at for at, run in enumerate(form.order)} if order == "unpacked" else {run: run for run in range(RUNS)}
    rows = LANES if order == "interleaved" else 1
    scalars_at = rows * digits.places * STRETCH
    with ExitStack() as stack:
        block = stack.enter_context(writer.loop(_I64(0), lengths[0], 1))
        s = stack.enter_context(writer.loop(_I64(0), lengths[2], 1))
        if order == "interleaved":
            # Numbers of rows that do not exist would be any, and arithmetic with subnormal ones takes long.
            for at in range(scalars_at, rows * digits.record_bytes(form), VECTOR_BYTES):
                place_of_scalars = code.add(writer.at(1, block, _I64(0), s), _I64(at))
                store(code, ir.Constant(vector_type("f32"), None), place_of_scalars, 4)
        # The rows of a block inside: interleaved, they share cache lines.
        r = stack.enter_context(writer.loop(_I64(0), lengths[1], 1))
        row, record = r, writer.at(1, block, r, s)
        if repeats:
            number = load(code, _I64, writer.at(-1, block, r), 8)
            stack.enter_context(code.if_then(code.icmp_signed(">=", number, _I64(0))))
            row = code.sdiv(number, _I64(repeats))
        source, mark = writer.at(0, block, row, s), writer.cell(writer.number(0, "i32"))
        is_last = code.icmp_signed("==", s, code.sub(lengths[2], _I64(1)))
        left = code.select(is_last, _I64(tail or STRETCH), _I64(STRETCH))
        for group in range(RUNS // 2):
            runs = (2 * group, 2 * group + 1)
            values = []
            for run in runs:
                lanes = ir.Constant(vector_type("i64"), list(range(run * LANES, (run + 1) * LANES)))
                mask = code.icmp_signed("<", lanes, writer.splat(left, "i64").value) if tail else None
                values.append(writer.read(0, source, _I64(run * LANES), mask))
            # Magnitudes of floats are in the order of their bits, with NaN above infinity.
            magnitudes = [v.bits("i32") & 0x7FFFFFFF for v in values]
            largest = writer.reduced(intrinsic("smax", *magnitudes), "smax").bits("f32")
            if exact:
                factor, inverse = _powers(largest, digits, mark)
            else:
                factor, inverse = largest * (1 / 127), select(largest > 1e-37, 127.0 / largest, 0.0)
            sums = []
            for run, value in zip(runs, values, strict=True):
                scaled = intrinsic("rint", value * inverse)
                # In int8 an infinity or NaN makes the factor of its group infinite or NaN, and the result NaN.
                whole = select(intrinsic("fabs", scaled) < float(2**digits.bits + 1), scaled, 0.0)
                integers = Vector(code, code.fptosi(whole.value, vector_type("i32")), "i32")
                for number, digit in enumerate(_split(integers, digits)):
                    at = rows * (number * STRETCH + place[run] * LANES)
                    _store_digits(code, digit, code.add(record, _I64(at)), interleaved=order == "interleaved")
                sums.append(integers)
            if form.groups == 8:
                sums = [sums[0] + sums[1]]
            first = [writer.reduced(v, "add").to("f32") * factor * form.offset for v in sums]
            scalars = code.add(record, _I64(scalars_at))
            _store_scalars(writer, scalars, group, factor, first, 4 * rows)
        if exact:
            at, found = writer.at(2, block, r), code.trunc(writer.first(mark.get()), _I8)
            before = code.select(code.icmp_signed("==", s, _I64(0)), _I8(0), load(code, _I8, at))
            store(code, code.or_(before, found), at)
    return MachineCode(writer.end())


def _powers(largest: Vector, digits: Digits, mark: Any) -> tuple[Vector, Vector]:
    """The power of two by which integers are multiplied, and its inverse. Both are 0 outside of `SMALLEST` to
    `LARGEST`, where the row is marked unless the group is 0."""
    fits = largest.compare(">=", SMALLEST) & largest.compare("<=", LARGEST)
    marked = (fits | largest.compare("==", 0.0)) ^ 1
    mark.set(mark.get() | marked.to("i32"))
    exponent = largest.bits("i32") & 0x7F800000
    factor = (exponent - ((digits.bits - 1) << 23)).bits("f32")
    inverse = (-exponent + ((254 + digits.bits - 1) << 23)).bits("f32")
    return select(fits, factor, 0.0), select(fits, inverse, 0.0)


def _split(integers: Vector, digits: Digits) -> list[Vector]:
    """The digits, the most significant one first; the others are from ``-base / 2`` to ``base / 2 - 1``."""
    found = []
    half, mask = 1 << (digits.base_bits - 1), (1 << digits.base_bits) - 1
    for _ in range(digits.places - 1):
        raised = integers + half
        found.append((raised & mask) - half)
        integers = raised >> digits.base_bits
    return [integers, *found[::-1]]


def _store_digits(code: Any, digits: Vector, address: Any, *, interleaved: bool) -> None:
    """16 digits, one after the other, or the fours of them apart."""
    value = digits.to("i8").value
    if not interleaved:
        store(code, value, address)
        return
    fours = code.bitcast(value, ir.VectorType(_I32, 4))
    for k in range(4):
        store(code, code.extract_element(fours, _I32(k)), code.add(address, _I64(k * VECTOR_BYTES)), 4)


def _store_scalars(writer: Writer, scalars: Any, group: int, factor: Vector, sums: list[Vector], distance: int) -> None:
    """A group's factor and sum; with groups of 16, those of both halves. ``distance``: bytes from one f32 to the next
    one."""
    code, count = writer.code, len(sums)
    for k, total in enumerate(sums):
        at = count * group + k
        for value, lane in ((factor, at), (total, 8 * count + at)):
            store(code, writer.first(value), code.add(scalars, _I64(distance * lane)), 4)


def sums_of_products(
    code: Any, form: Form, digits: Digits, add: Callable[[list[Any], int], list[Any]], count: int, products: int
) -> list[Vector]:
    """Some vectors of sums of products, of integers of weights with those of activations, as f32.

    Args:
        add: adds the products with a digit to ``count`` vectors of i32.
        products: how many are added up in a lane.
    """
    zeros = ir.Constant(vector_type("i32"), None)
    shift, last = ir.Constant(zeros.type, [digits.base_bits] * LANES), digits.places - 1
    fits = products * form.largest << digits.bits < 1 << 31
    totals = add([zeros] * count, 0)
    for digit in range(1, digits.places if fits else last):
        totals = add([code.shl(total, shift) for total in totals], digit)
    if fits:
        return [_float(code, total) for total in totals]
    # Whole sums would leave the range of i32: those of the last digit are added as f32.
    ends, base = add([zeros] * count, last), 2.0**digits.base_bits
    return [fma(_float(code, total), base, _float(code, end)) for total, end in zip(totals, ends, strict=True)]


def _float(code: Any, integers: Any) -> Vector:
    return Vector(code, code.sitofp(integers, vector_type("f32")), "f32")
