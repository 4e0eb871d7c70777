"""Products of the integers of quantized weights, as they lie, by activations that became integers too: in ``int8`` one
byte each, exactly three (`opweave_cpu.jit.activations`).

Few rows are multiplied one after the other by the integers of a row of weights, in registers. For more rows, stretches
of 16 rows of weights are unpacked and transposed, so that each lane adds up one result. Sums of products are exact
within a group of weights; groups are added up as f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave.graph.precision import Precision
from opweave_cpu.jit.activations import Digits, bind_records, digits_of
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integers import BYTES, RUNS, STRETCH, Form, Stretch, dot, form_of, prefetch
from opweave_cpu.jit.vectors import LANES, Vector, fma, load, select, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn
from opweave_cpu.tunables import INTEGER_ROWS

__all__ = ["bind_integer_product", "padded_rows", "record_bytes"]

CHUNK: Final = 128
"""Rows whose sums are in the cache at once. Weights are unpacked anew for each chunk of rows."""

AHEAD: Final = 512
"""Bytes by which rows of weights are prefetched. The processor does so too, but anew for each row and page: on a Zen 4
a single row of ``x`` takes up to 8 % less time with this, 16 rows a sixth less; with 256 to 1024 bytes the same."""

_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()
_VECTOR_BYTES: Final = 64


def _together() -> int:
    """Rows that are multiplied at once by a vector of transposed integers: their sums fit the registers."""
    return 8 if "avx512f" in target().features else 2


def record_bytes(weights: DType, precision: Precision) -> int:
    """Bytes of 256 activations, for weights of that type."""
    form = form_of(weights.name)
    return digits_of(form, precision).record_bytes(form)


def padded_rows(rows: int) -> int:
    """Rows for which there are records: a multiple of those that are multiplied at once."""
    return rows if rows <= INTEGER_ROWS.value else -(-rows // _together()) * _together()


def bind_integer_product(
    stream: Stream, out: Arg, x: Arg, w: Arg, b: Arg | None, records: Arg, marks: Arg | None = None
) -> Call:
    """The call ``out = x @ w.T + b``, of dense operands: in ``int8``, or, with ``marks``, exactly, except for rows that
    get a mark.

    Args:
        records: ``u8``, `record_bytes` for each of the `padded_rows` and 256 inputs or part of them.
        marks: as of `bind_records`.
    """
    inputs, form = w.shape[1], form_of(w.dtype.name)
    digits = digits_of(form, "int8" if marks is None else "exact")
    rows, stretches, tail = x.size // inputs, -(-inputs // STRETCH), inputs % STRETCH
    padded, few = padded_rows(rows), rows <= INTEGER_ROWS.value
    before = bind_records(stream, form, digits, x, w.dtype, records, marks, padded=padded, ordered=few)
    args = [w, records, *([] if b is None else [b]), out]
    bind = _bind_few if few else _bind_many
    lengths = rows, stretches
    return in_turn([before, *bind(stream, form, digits, tail, lengths, args, padded * digits.record_bytes(form))])


def _bind_few(
    stream: Stream,
    form: Form,
    digits: Digits,
    tail: int,
    lengths: tuple[int, int],
    args: Sequence[Arg],
    of_stretch: int,
) -> list[Call]:
    """The call that multiplies rows by one row of weights after the other.

    Args:
        tail: weights of a last stretch that is not whole.
        lengths: rows, and stretches of each.
        args: weights, records, a bias if there is one, the result.
        of_stretch: bytes of the records of one stretch.
    """
    (rows, stretches), (w, records, *biases, out) = lengths, args
    outputs, inputs = w.shape
    size, types = out.dtype.itemsize, (w.dtype.name, *[a.dtype.name for a in args[2:]])
    make = partial(_few, form, digits, tail, rows, biases, out.dtype)
    code = stream.artefact(("few rows", digits, rows, tail, types), make)
    strides = [(stretches_bytes(form, inputs), form.size * form.blocks), (0, of_stretch)]
    strides += [*[(a.dtype.itemsize, 0) for a in biases], *[(size, 0)] * rows]
    results = [_from(out, r * outputs * size) for r in range(rows)]
    walk = Walk((outputs, stretches), tuple(strides))
    work = STRETCH // 4 * (rows + 1)
    return [bind_walk(stream, code, walk, [w, records, *biases, *results], work=work, by_first=True)]


def _bind_many(
    stream: Stream,
    form: Form,
    digits: Digits,
    tail: int,
    lengths: tuple[int, int],
    args: Sequence[Arg],
    of_stretch: int,
) -> list[Call]:
    """The calls that multiply rows by 16 rows of weights after the other; arguments as of `_bind_few`."""
    (rows, stretches), (w, records, *biases, out) = lengths, args
    outputs, inputs = w.shape
    row, size = stretches_bytes(form, inputs), out.dtype.itemsize
    types = w.dtype.name, *[a.dtype.name for a in args[2:]]
    code = stream.artefact(("many rows", digits, tail, types), partial(_many, form, digits, tail, biases, out.dtype))
    strides = [(LANES * row, form.size * form.blocks, 0), (0, of_stretch, digits.record_bytes(form))]
    strides += [*[(LANES * a.dtype.itemsize, 0, 0) for a in biases], (LANES * size, 0, outputs * size)]
    calls = []
    # Of rows of weights that are no multiple of 16 the last 16 are multiplied too, some of them a second time.
    for first, count in ((0, outputs // LANES), (outputs - LANES, int(outputs % LANES > 0))):
        if count:
            some = [_from(w, first * row), records, *[_from(a, first * a.dtype.itemsize) for a in (*biases, out)]]
            walk = Walk((count, stretches, rows), tuple(strides))
            calls.append(bind_walk(stream, code, walk, some, work=STRETCH, by_first=True))
    return calls


def stretches_bytes(form: Form, inputs: int) -> int:
    """Bytes of a row of weights."""
    return inputs * form.blocks // STRETCH * form.size


def _from(arg: Arg, nbytes: int) -> Arg:
    return Arg(arg.buffer, arg.offset + nbytes, arg.dtype, arg.shape, arg.strides)


# --- rows of weights ------------------------------------------------------------------------------------------------


class Row:
    """Rows of weights, while a kernel is written: where their stretches are.

    A last stretch that has fewer than eight blocks is read from a copy, behind which are zeros.
    """

    def __init__(self, writer: Writer, form: Form, tail: int) -> None:
        self._writer, self._form, self._tail = writer, form, tail
        if tail:
            with writer.code.goto_entry_block():
                kind = ir.ArrayType(_I8, form.size * form.blocks)
                self._copy = writer.code.alloca(kind)
                writer.code.store(ir.Constant(kind, None), self._copy)

    def stretch(self, row: Any, s: Any) -> Stretch:
        """Stretch ``s`` of the row at an address."""
        writer, form, code = self._writer, self._form, self._writer.code
        size = form.size * form.blocks
        address = code.add(row, code.mul(s, _I64(size)))
        for line in range(0, size, _VECTOR_BYTES):
            prefetch(code, code.add(address, _I64(AHEAD + line)))
        if self._tail:
            is_last = code.icmp_signed("==", s, code.sub(writer.lengths[1], _I64(1)))
            copy = code.ptrtoint(self._copy, _I64)
            with code.if_then(is_last, likely=False):
                for at in range(0, self._tail * size // STRETCH, 2):
                    half = load(code, ir.IntType(16), code.add(address, _I64(at)))
                    store(code, half, code.add(copy, _I64(at)))
            address = code.select(is_last, copy, address)
        return Stretch(writer, address, form.size)


def _vector(code: Any, address: Any, at: int) -> Vector:
    return Vector(code, load(code, vector_type("f32"), code.add(address, _I64(at)), 4), "f32")


def _float(code: Any, integers: Any) -> Vector:
    return Vector(code, code.sitofp(integers, vector_type("f32")), "f32")


def _few(form: Form, digits: Digits, tail: int, rows: int, biases: Sequence[Arg], into: DType) -> MachineCode:
    """The kernel of `_bind_few`, which multiplies ``rows`` rows."""
    record, scalars = digits.record_bytes(form), digits.places * STRETCH
    operands = [Operand("i8", 1)] * 2 + [Operand(b.dtype.name, 0) for b in biases] + [Operand(into.name, 0)] * rows
    writer = Writer(2, operands)
    code, weights = writer.code, Row(writer, form, tail)
    zero = writer.number(0.0, "f32")
    with writer.rows() as places:
        cells = [[writer.cell(zero) for _ in range(3)] for _ in range(rows)]
        with writer.loop(_I64(0), writer.length, 1) as s:
            integers, factors = form.decode(weights.stretch(places[0], s))
            first = writer.at(1, _I64(0), s)
            for r, (*sums, rest) in enumerate(cells):
                x = code.add(first, _I64(r * record))
                both = factors * _vector(code, x, scalars)
                if form.groups == 8:
                    rest.set(rest.get() + both)
                else:
                    rest.set(fma(factors, _vector(code, x, scalars + _VECTOR_BYTES), rest.get()))
                for number, (groups, those) in enumerate(_alike(form)):

                    def add(totals: list[Any], digit: int, x: Any = x, those: Sequence[int] = those) -> list[Any]:
                        for k in those:
                            at = code.add(x, _I64(digit * STRETCH + k * BYTES))
                            some = load(code, ir.VectorType(_I8, BYTES), at)
                            totals = [dot(code, totals[0], integers[k], some, signed=form.signed)]
                        return totals

                    (total,) = _sums_of_products(code, form, digits, add, 1, 4 * len(those))
                    lanes = ir.Constant(vector_type("i32"), [groups[lane // 4] for lane in range(LANES)])
                    of_lanes = Vector(code, code.shuffle_vector(both.value, both.value, lanes), "f32")
                    cell = sums[number % 2]
                    cell.set(fma(total, of_lanes, cell.get()))
        totals = []
        for one, two, rest in cells:
            beyond = rest.get()
            if form.groups == 8:
                upper = ir.Constant(vector_type("bool"), [0] * 8 + [1] * 8)
                beyond = select(Vector(code, upper, "bool"), beyond, 0.0)
            totals.append(one.get() + two.get() + beyond)
        _write_totals(writer, places, totals)
    return MachineCode(writer.end())


def _sums_of_products(
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


def _write_totals(writer: Writer, places: Sequence[Any], totals: Sequence[Vector]) -> None:
    """Stores the sum of all lanes for each row, plus the bias if there is one among the operands."""
    first = len(places) - len(totals)
    for at, total in enumerate(totals, first):
        result = writer.total(total)
        if first > 2:
            result = result + writer.read(2, places[2], _I64(0))
        writer.write_one(at, places[at], result)


def _alike(form: Form) -> list[tuple[tuple[int, ...], list[int]]]:
    """The vectors of integers by the groups of their quarters: those with equal groups are added up as integers."""
    found: dict[tuple[int, ...], list[int]] = {}
    for k in range(RUNS // 4):
        found.setdefault(form.group_of_run[4 * k : 4 * k + 4], []).append(k)
    return [*found.items()]


# --- 16 rows of weights at a time -----------------------------------------------------------------------------------


def _many(form: Form, digits: Digits, tail: int, biases: Sequence[Arg], into: DType) -> MachineCode:
    """The kernel of `_bind_many`, which multiplies any number of rows."""
    operands = [Operand("i8", 1)] * 2 + [Operand(b.dtype.name, b.dtype.itemsize) for b in biases]
    writer = Writer(3, [*operands, Operand(into.name, into.itemsize)])
    code, weights, out = writer.code, Row(writer, form, tail), len(operands)
    sums = writer.array(vector_type("f32"), CHUNK)
    panel = writer.array(vector_type("i32"), BYTES)
    factors = writer.array(vector_type("f32"), LANES)
    unpacked = writer.array(vector_type("i32"), 5 * LANES)
    all_rows, together, zero = writer.lengths[2], _together(), ir.Constant(vector_type("f32"), None)

    def place(array: Any, i: Any) -> Any:
        return code.add(array, code.mul(i, _I64(_VECTOR_BYTES)))

    with ExitStack() as stack:
        n = stack.enter_context(writer.loop(_I64(0), writer.lengths[0], 1))
        chunk = stack.enter_context(writer.loop(_I64(0), all_rows, CHUNK))
        beyond = code.sub(all_rows, chunk)
        rows = code.select(code.icmp_signed("<", beyond, _I64(CHUNK)), beyond, _I64(CHUNK))
        with writer.loop(_I64(0), rows, together) as r:  # those behind the last row, too
            for k in range(together):
                store(code, zero, place(sums, code.add(r, _I64(k))), 64)
        with writer.loop(_I64(0), writer.lengths[1], 1) as s:
            with writer.loop(_I64(0), _I64(LANES), 1) as lane:
                row = code.add(writer.at(0, n), code.mul(lane, code.lshr(writer.strides[0][0], _I64(4))))
                vectors, scales = form.decode(weights.stretch(row, s))
                for k, vector in enumerate((*vectors, scales.value)):
                    store(code, vector, place(unpacked, code.add(lane, _I64(k * LANES))), 64)
            _transpose(writer, form, unpacked, panel, factors)
            with writer.loop(_I64(0), rows, together) as r:
                x = writer.at(1, _I64(0), s, code.add(chunk, r))
                _multiply(writer, form, digits, x, panel, factors, place(sums, r))
        with writer.loop(_I64(0), rows, 1) as r:
            result = Vector(code, load(code, vector_type("f32"), place(sums, r), 64), "f32")
            if biases:
                result = result + writer.read(2, writer.at(2, n), _I64(0))
            writer.write(out, writer.at(out, n, _I64(0), code.add(chunk, r)), _I64(0), result)
    return MachineCode(writer.end())


def _transpose(writer: Writer, form: Form, unpacked: Any, panel: Any, factors: Any) -> None:
    """Rows of integers and factors become columns: four integers of one place, or a factor, of each of the rows. The
    integers are put into the order of the activations."""
    code, kind = writer.code, vector_type("i32")
    for k in range(5):
        rows = [load(code, kind, code.add(unpacked, _I64((k * LANES + r) * _VECTOR_BYTES)), 64) for r in range(LANES)]
        for lane, column in enumerate(transposed(code, rows)):
            at = lane if k == 4 else 4 * form.order[4 * k + lane // 4] + lane % 4
            store(code, column, code.add(factors if k == 4 else panel, _I64(at * _VECTOR_BYTES)), 64)


def _multiply(writer: Writer, form: Form, digits: Digits, x: Any, panel: Any, factors: Any, sums: Any) -> None:
    """Adds the products of some rows and a stretch of 16 rows of weights to their sums."""
    code, record, scalars = writer.code, digits.record_bytes(form), digits.places * STRETCH
    words, together = BYTES // form.groups, _together()
    cells = [writer.cell(_vector(code, sums, r * _VECTOR_BYTES)) for r in range(together)]
    with writer.loop(_I64(0), _I64(form.groups), 1) as group:
        integers = code.add(panel, code.mul(group, _I64(words * _VECTOR_BYTES)))
        bytes_at = code.add(x, code.mul(group, _I64(4 * words)))
        lane = code.mul(group, _I64(_VECTOR_BYTES))
        factor = _vector(code, code.add(factors, lane), 0)
        beyond = _vector(code, code.add(factors, lane), 8 * _VECTOR_BYTES) if form.groups == 8 else factor
        numbers = code.add(x, code.mul(group, _I64(4)))

        def add(totals: list[Any], digit: int) -> list[Any]:
            for word in range(words):
                some = load(code, ir.VectorType(_I8, BYTES), code.add(integers, _I64(word * _VECTOR_BYTES)), 64)
                for r in range(together):
                    at = _I64(r * record + digit * STRETCH + 4 * word)
                    four = load(code, _I32, code.add(bytes_at, at), 4)
                    same = code.bitcast(writer.splat(four, "i32").value, ir.VectorType(_I8, BYTES))
                    totals[r] = dot(code, totals[r], some, same, signed=form.signed)
            return totals

        for r, (cell, total) in enumerate(
            zip(cells, _sums_of_products(code, form, digits, add, together, 4 * words), strict=True)
        ):
            at = r * record + scalars
            own, rest = (
                writer.splat(load(code, _F32, code.add(numbers, _I64(at + ahead)), 4), "f32")
                for ahead in (0, 32 if form.groups == 8 else _VECTOR_BYTES)
            )
            cell.set(fma(total, factor * own, cell.get()))
            cell.set(fma(beyond, rest, cell.get()))
    for r, cell in enumerate(cells):
        store(code, cell.get().value, code.add(sums, _I64(r * _VECTOR_BYTES)), 4)
