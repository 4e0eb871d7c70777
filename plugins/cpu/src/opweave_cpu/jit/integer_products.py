"""Products of the integers of quantized weights, as they lie, by activations that became integers too: in ``int8`` one
byte each, exactly three (`opweave_cpu.jit.activations`).

Few rows are multiplied one after the other by the integers of a row of weights, in registers. For more rows, stretches
of 16 rows of weights are unpacked and transposed, so that each lane adds up one result; or they become tiles where the
processor multiplies such (`opweave_cpu.jit.tile_products`). Sums of products are exact within a group of weights;
groups are added up as f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave.graph.precision import Precision
from opweave_cpu.jit.activations import Digits, Order, bind_records, digits_of, sums_of_products
from opweave_cpu.jit.amx import has_tiles
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integers import BYTES, RUNS, STRETCH, Form, Row, dot, form_of
from opweave_cpu.jit.row_blocks import CHUNK, bind_row_blocks, chunks, clear_sums, place, row_bytes, store_results
from opweave_cpu.jit.tile_products import multiply_tiles
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, fma, load, select, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Writer
from opweave_cpu.tiles import in_turn
from opweave_cpu.tunables import INTEGER_ROWS, PREFETCHED, TILE_ROWS

__all__ = ["bind_integer_product", "padded_rows", "record_bytes"]

_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()


def _together() -> int:
    """Rows that are multiplied at once by a vector of transposed integers: their sums fit the registers."""
    return 8 if "avx512f" in target().features else 2


def record_bytes(weights: DType, precision: Precision) -> int:
    """Bytes of 256 activations, for weights of that type."""
    form = form_of(weights.name)
    return digits_of(form, precision).record_bytes(form)


class _Product(NamedTuple):
    """A product, as its kernels see it.

    Attributes:
        form: of the weights.
        digits: of the activations.
        inputs: weights of a row.
        rows: of activations.
        args: weights, records, a bias if there is one, the result.
    """

    form: Form
    digits: Digits
    inputs: int
    rows: int
    args: Sequence[Arg]

    @property
    def stretches(self) -> int:
        return -(-self.inputs // STRETCH)

    @property
    def tail(self) -> int:
        """Weights of a last stretch that is not whole."""
        return self.inputs % STRETCH

    @property
    def of_weights(self) -> tuple[int, int]:
        """Bytes of a row of weights, and of a stretch of it."""
        size = self.form.size * self.form.blocks
        return self.inputs * size // STRETCH, size

    @property
    def biases(self) -> Sequence[Arg]:
        return self.args[2:-1]

    @property
    def types(self) -> tuple[str, ...]:
        """What kernels depend on beside the digits and the tail: types, and how far they prefetch."""
        return self.args[0].dtype.name, *[a.dtype.name for a in self.args[2:]], str(PREFETCHED.value)


def order_of(rows: int) -> Order:
    """How the records lie, which tells by which kernel so many rows are multiplied."""
    if rows >= TILE_ROWS.value and has_tiles("int8"):
        return "interleaved"
    return "unpacked" if rows <= INTEGER_ROWS.value else "natural"


def padded_rows(rows: int) -> int:
    """Rows for which there are records: a multiple of those that are multiplied at once."""
    together = {"interleaved": LANES, "unpacked": 1, "natural": _together()}[order_of(rows)]
    return -(-rows // together) * together


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
    digits, rows = digits_of(form, "int8" if marks is None else "exact"), x.size // w.shape[1]
    padded, order = padded_rows(rows), order_of(rows)
    before = bind_records(stream, form, digits, x, w.dtype, records, marks, padded=padded, order=order)
    product = _Product(form, digits, inputs, rows, [w, records, *([] if b is None else [b]), out])
    if order == "unpacked":
        return in_turn([before, _bind_few(stream, product, padded)])
    return in_turn([before, _bind_many(stream, product, padded, order)])


def _bind_few(stream: Stream, product: _Product, padded: int) -> Call:
    """The call that multiplies rows by one row of weights after the other."""
    form, digits, _, rows, (w, records, *biases, out) = product
    outputs, size = w.shape[0], out.dtype.itemsize
    make = partial(_few, form, digits, product.tail, rows, biases, out.dtype)
    code = stream.artefact(("few rows", digits, rows, product.tail, product.types), make)
    strides = [product.of_weights, (0, padded * digits.record_bytes(form))]
    strides += [*[(a.dtype.itemsize, 0) for a in biases], *[(size, 0)] * rows]
    results = [moved(out, r * outputs * size) for r in range(rows)]
    walk = Walk((outputs, product.stretches), tuple(strides))
    work = STRETCH // 4 * (rows + 1)
    return bind_walk(stream, code, walk, [w, records, *biases, *results], work=work, by_first=True)


def _bind_many(stream: Stream, product: _Product, padded: int, order: Order) -> Call:
    """The call that multiplies rows by 16 rows of weights after the other, of tiles if the records are interleaved."""
    form, digits = product.form, product.digits
    make = _many if order == "natural" else multiply_tiles
    kernel = partial(make, form, digits, product.tail, product.biases, product.args[-1].dtype)
    code = stream.artefact(("many rows", order, digits, product.tail, product.types), kernel)
    record, lengths = digits.record_bytes(form), (product.stretches, product.rows)
    return bind_row_blocks(
        stream, code, product.args, lengths, product.of_weights, (padded * record, record), work=STRETCH
    )


# --- one row of weights after the other -------------------------------------------------------------------------------


def _vector(code: Any, address: Any, at: int) -> Vector:
    return Vector(code, load(code, vector_type("f32"), code.add(address, _I64(at)), 4), "f32")


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
                    rest.set(fma(factors, _vector(code, x, scalars + VECTOR_BYTES), rest.get()))
                for number, (groups, those) in enumerate(_alike(form)):

                    def add(totals: list[Any], digit: int, x: Any = x, those: Sequence[int] = those) -> list[Any]:
                        for k in those:
                            at = code.add(x, _I64(digit * STRETCH + k * BYTES))
                            some = load(code, ir.VectorType(_I8, BYTES), at)
                            totals = [dot(code, totals[0], integers[k], some, signed=form.signed)]
                        return totals

                    (total,) = sums_of_products(code, form, digits, add, 1, 4 * len(those))
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
    code, weights = writer.code, Row(writer, form, tail, LANES)
    sums = writer.array(vector_type("f32"), CHUNK)
    panel = writer.array(vector_type("i32"), BYTES)
    factors = writer.array(vector_type("f32"), LANES)
    unpacked = writer.array(vector_type("i32"), 5 * LANES)
    together = _together()
    with chunks(writer) as (n, chunk, rows):
        clear_sums(writer, sums, rows, together)
        with writer.loop(_I64(0), writer.lengths[1], 1) as s:
            with writer.loop(_I64(0), _I64(LANES), 1) as lane:
                row = code.add(writer.at(0, n), code.mul(lane, row_bytes(writer)))
                vectors, scales = form.decode(weights.stretch(row, s))
                for k, vector in enumerate((*vectors, scales.value)):
                    store(code, vector, place(code, unpacked, code.add(lane, _I64(k * LANES))), 64)
            _transpose(writer, form, unpacked, panel, factors)
            with writer.loop(_I64(0), rows, together) as r:
                x = writer.at(1, _I64(0), s, code.add(chunk, r))
                _multiply(writer, form, digits, x, panel, factors, place(code, sums, r))
        store_results(writer, sums, n, chunk, rows, biased=bool(biases))
    return MachineCode(writer.end())


def _transpose(writer: Writer, form: Form, unpacked: Any, panel: Any, factors: Any) -> None:
    """Rows of integers and factors become columns: four integers of one place, or a factor, of each of the rows. The
    integers are put into the order of the activations."""
    code, kind = writer.code, vector_type("i32")
    for k in range(5):
        rows = [load(code, kind, code.add(unpacked, _I64((k * LANES + r) * VECTOR_BYTES)), 64) for r in range(LANES)]
        for lane, column in enumerate(transposed(code, rows)):
            at = lane if k == 4 else 4 * form.order[4 * k + lane // 4] + lane % 4
            store(code, column, code.add(factors if k == 4 else panel, _I64(at * VECTOR_BYTES)), 64)


def _multiply(writer: Writer, form: Form, digits: Digits, x: Any, panel: Any, factors: Any, sums: Any) -> None:
    """Adds the products of some rows and a stretch of 16 rows of weights to their sums."""
    code, record, scalars = writer.code, digits.record_bytes(form), digits.places * STRETCH
    words, together = BYTES // form.groups, _together()
    cells = [writer.cell(_vector(code, sums, r * VECTOR_BYTES)) for r in range(together)]
    with writer.loop(_I64(0), _I64(form.groups), 1) as group:
        integers = code.add(panel, code.mul(group, _I64(words * VECTOR_BYTES)))
        bytes_at = code.add(x, code.mul(group, _I64(4 * words)))
        lane = code.mul(group, _I64(VECTOR_BYTES))
        factor = _vector(code, code.add(factors, lane), 0)
        beyond = _vector(code, code.add(factors, lane), 8 * VECTOR_BYTES) if form.groups == 8 else factor
        numbers = code.add(x, code.mul(group, _I64(4)))

        def add(totals: list[Any], digit: int) -> list[Any]:
            for word in range(words):
                some = load(code, ir.VectorType(_I8, BYTES), code.add(integers, _I64(word * VECTOR_BYTES)), 64)
                for r in range(together):
                    at = _I64(r * record + digit * STRETCH + 4 * word)
                    four = load(code, _I32, code.add(bytes_at, at), 4)
                    same = code.bitcast(writer.splat(four, "i32").value, ir.VectorType(_I8, BYTES))
                    totals[r] = dot(code, totals[r], some, same, signed=form.signed)
            return totals

        for r, (cell, total) in enumerate(
            zip(cells, sums_of_products(code, form, digits, add, together, 4 * words), strict=True)
        ):
            at = r * record + scalars
            own, rest = (
                writer.splat(load(code, _F32, code.add(numbers, _I64(at + ahead)), 4), "f32")
                for ahead in (0, 32 if form.groups == 8 else VECTOR_BYTES)
            )
            cell.set(fma(total, factor * own, cell.get()))
            cell.set(fma(beyond, rest, cell.get()))
    for r, cell in enumerate(cells):
        store(code, cell.get().value, code.add(sums, _I64(r * VECTOR_BYTES)), 4)
