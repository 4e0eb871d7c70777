"""Products of the integers of quantized weights, as they lie, by activations that became integers too: in ``int8`` one
byte each, exactly three (`opweave_cpu.jit.activations`).

Few rows are multiplied one after the other by the integers of a row of weights, in registers. For more rows, stretches
of 32 rows of weights are unpacked and transposed, so that each lane adds up one result; or they become tiles where the
processor multiplies such (`opweave_cpu.jit.tile_products`). Sums of products are exact within a group of weights;
groups are added up as f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave.graph.precision import Precision
from opweave_cpu.jit.activations import Digits, Order, bind_records, digits_of, sums_of_products
from opweave_cpu.jit.amx import has_tiles
from opweave_cpu.jit.compiler import MachineCode, target
from opweave_cpu.jit.integers import BYTES, RUNS, STRETCH, Form, Row, Stretch, dot, form_of
from opweave_cpu.jit.row_blocks import (
    CHUNK,
    bind_groups,
    bind_row_blocks,
    block_writer,
    chunks,
    clear_sums,
    place,
    row_bytes,
    store_results,
)
from opweave_cpu.jit.tile_products import multiply_tiles
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, fma, load, select, store, transposed, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Cell, Writer
from opweave_cpu.tiles import in_turn
from opweave_cpu.tunables import INTEGER_ROWS, PREFETCHED, TILE_ROWS

__all__ = ["bind_experts", "bind_grouped_experts", "bind_integer_product", "padded_rows", "record_bytes"]

UNROLLED: Final = 4
"""Words of integers that a turn of the innermost loop multiplies."""

_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()


def _together() -> int:
    """Rows that are multiplied at once by two vectors of transposed integers: their sums fit the registers."""
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


def _by_tiles(rows: int) -> bool:
    """Whether so many rows are multiplied as tiles."""
    return rows >= TILE_ROWS.value and has_tiles("int8")


def order_of(rows: int) -> Order:
    """How the records of so many rows lie."""
    return "unpacked" if rows <= INTEGER_ROWS.value and not _by_tiles(rows) else "interleaved"


def padded_rows(rows: int) -> int:
    """Rows for which there are records: a multiple of those that are interleaved."""
    return -(-rows // LANES) * LANES if order_of(rows) == "interleaved" else rows


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
    return in_turn([before, _bind_many(stream, product, padded)])


def _bind_few(stream: Stream, product: _Product, padded: int) -> Call:
    """The call that multiplies rows by one row of weights after the other."""
    form, digits, _, rows, (w, records, *biases, out) = product
    outputs, size = w.shape[0], out.dtype.itemsize
    make = partial(_few, form, digits, product.tail, rows, biases, out.dtype)
    code = stream.artefact(("few rows", digits, rows, product.tail, product.types), make)
    strides = [product.of_weights, (0, padded * digits.record_bytes(form))]
    strides += [*[(a.dtype.itemsize, 0) for a in biases], *[(size, 0)] * rows]
    results = [moved(out, r * outputs * size) for r in range(rows)]
    walk = Walk((outputs, product.stretches), tuple(strides), 1)
    work = STRETCH // 4 * (rows + 1)
    return bind_walk(stream, code, walk, [w, records, *biases, *results], work=work)


def _bind_many(stream: Stream, product: _Product, padded: int, groups: Sequence[Arg] = ()) -> Call:
    """The call that multiplies rows by blocks of rows of weights, by tiles if the processor has them.

    Args:
        groups: as of `bind_row_blocks`.
    """
    form, digits, _, rows, (w, *_) = product
    count, each = (w.shape[0], rows // w.shape[0]) if groups else (rows, rows)
    tiles = _by_tiles(each)
    vectors = 1 if tiles or w.shape[-2] < 2 * LANES else 2
    make: Callable[..., MachineCode] = multiply_tiles if tiles else partial(_many, vectors=vectors)
    kernel = partial(make, form, digits, product.tail, product.biases, product.args[-1].dtype, grouped=bool(groups))
    code = stream.artefact(("many rows", tiles, vectors, digits, product.tail, product.types, bool(groups)), kernel)
    record, lengths = digits.record_bytes(form), (product.stretches, count)
    of_records, work = (padded * record, record), vectors * STRETCH * rows // count
    return bind_row_blocks(stream, code, product.args, lengths, product.of_weights, of_records, work, vectors, groups)


def bind_grouped_experts(
    stream: Stream, out: Arg, x: Arg, w: Arg, ids: Arg, records: Arg, places: Arg, bounds: Arg
) -> Call:
    """The call of `opweave.expert_linear` of dense operands in ``int8``, the rows of an expert at once.

    Args:
        ids: of experts that exist.
        records: as of `bind_integer_product`, for each of the places.
        places, bounds: as of `bind_groups`.
    """
    inputs, form = w.shape[2], form_of(w.dtype.name)
    digits, repeats = digits_of(form, "int8"), ids.size * inputs // x.size
    before = bind_records(
        stream, form, digits, x, w.dtype, records, None, padded=places.size, order="interleaved",
        places=places, repeats=repeats,
    )  # fmt: skip
    product = _Product(form, digits, inputs, ids.size, [w, records, out])
    multiply = _bind_many(stream, product, places.size, [places, bounds])
    return in_turn([bind_groups(ids.view, places.view, bounds.view), before, multiply])


def bind_experts(stream: Stream, out: Arg, x: Arg, w: Arg, ids: Arg, records: Arg, marks: Arg | None = None) -> Call:
    """The call of `opweave.expert_linear` of dense operands, one row of an expert's weights after the other.

    Args:
        ids: of experts that exist.
        records, marks: as of `bind_integer_product`, one record for each row of ``x``.
    """
    (_, outputs, inputs), (tokens, used) = w.shape, ids.shape
    form = form_of(w.dtype.name)
    digits, rows = digits_of(form, "int8" if marks is None else "exact"), x.size // inputs
    product = _Product(form, digits, inputs, rows, [w, records, out])
    before = bind_records(stream, form, digits, x, w.dtype, records, marks, padded=rows, order="unpacked")
    make = partial(_experts, form, digits, product.tail, ids.dtype, out.dtype)
    code = stream.artefact(("experts", digits, product.tail, ids.dtype.name, product.types), make)
    record, (row, stretch), size = digits.record_bytes(form), product.of_weights, out.dtype.itemsize
    of_token = record * (rows // tokens)
    strides: list[tuple[int, ...]] = [
        (row, stretch, outputs * row, 0),
        (0, rows * record, of_token, record if rows > tokens else 0),
    ]
    strides += [(0, 0, *ids.strides), (size, 0, used * outputs * size, outputs * size)]
    walk = Walk((outputs, product.stretches, tokens, used), tuple(strides), 1)
    return in_turn([before, bind_walk(stream, code, walk, [w, records, ids, out], work=STRETCH // 2)])


def _experts(form: Form, digits: Digits, tail: int, ids: DType, into: DType) -> MachineCode:
    """The kernel of `bind_experts`. The third stride of the weights is that from one expert to the next."""
    writer = Writer(4, [Operand("i8", 1), Operand("i8", 1), Operand("i8", 1), Operand(into.name, 0)])
    code, weights, zero = writer.code, Row(writer, form, tail), _I64(0)
    outputs, stretches, tokens, used = writer.lengths
    integer = ir.IntType(8 * ids.itemsize)
    with writer.loop(zero, outputs, 1) as n, writer.loop(zero, tokens, 1) as t, writer.loop(zero, used, 1) as u:
        expert = load(code, integer, writer.at(2, zero, zero, t, u), ids.itemsize)
        row = writer.at(0, n, zero, code.sext(expert, _I64) if ids.itemsize < 8 else expert)
        cells = _cells(writer)
        with writer.loop(zero, stretches, 1) as s:
            records = writer.at(1, zero, s, t, u)
            _add_stretch(writer, form, digits, weights.stretch(row, s), [(records, cells)])
        writer.write_one(3, writer.at(3, n, zero, t, u), writer.total(_added_up(writer, form, cells)))
    return MachineCode(writer.end())


# --- one row of weights after the other -------------------------------------------------------------------------------


def _vector(code: Any, address: Any, at: int) -> Vector:
    return Vector(code, load(code, vector_type("f32"), code.add(address, _I64(at)), 4), "f32")


def _few(form: Form, digits: Digits, tail: int, rows: int, biases: Sequence[Arg], into: DType) -> MachineCode:
    """The kernel of `_bind_few`, which multiplies ``rows`` rows."""
    record = digits.record_bytes(form)
    operands = [Operand("i8", 1)] * 2 + [Operand(b.dtype.name, 0) for b in biases] + [Operand(into.name, 0)] * rows
    writer = Writer(2, operands)
    code, weights = writer.code, Row(writer, form, tail)
    with writer.rows() as places:
        cells = [_cells(writer) for _ in range(rows)]
        with writer.loop(_I64(0), writer.length, 1) as s:
            first = writer.at(1, _I64(0), s)
            at = [code.add(first, _I64(r * record)) for r in range(rows)]
            _add_stretch(writer, form, digits, weights.stretch(places[0], s), list(zip(at, cells, strict=True)))
        _write_totals(writer, places, [_added_up(writer, form, of_row) for of_row in cells])
    return MachineCode(writer.end())


def _cells(writer: Writer) -> list[Cell]:
    """The sums of a row of activations: two of products, which do not wait for each other, and one of the rest."""
    return [writer.cell(writer.number(0.0, "f32")) for _ in range(3)]


def _add_stretch(
    writer: Writer, form: Form, digits: Digits, stretch: Stretch, rows: Sequence[tuple[Any, Sequence[Cell]]]
) -> None:
    """Adds the products of a stretch of a row of weights with rows of activations: addresses of records, and sums."""
    code, scalars = writer.code, digits.places * STRETCH
    vectors, factors = form.decode(stretch)
    integers = form.integers(code, vectors)
    for x, (*sums, rest) in rows:
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


def _added_up(writer: Writer, form: Form, cells: Sequence[Cell]) -> Vector:
    one, two, beyond = (cell.get() for cell in cells)
    if form.groups == 8:
        upper = ir.Constant(vector_type("bool"), [0] * 8 + [1] * 8)
        beyond = select(Vector(writer.code, upper, "bool"), beyond, 0.0)
    return one + two + beyond


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


# --- 32 rows of weights at a time -----------------------------------------------------------------------------------


def _many(
    form: Form, digits: Digits, tail: int, biases: Sequence[Arg], into: DType, vectors: int = 2, *,
    grouped: bool = False,
) -> MachineCode:  # fmt: skip
    """The kernel of `_bind_many`, which multiplies any number of rows by blocks of 16 rows of weights, or of 32."""
    writer = block_writer(biases, into, grouped=grouped)
    height = vectors * LANES
    code, weights = writer.code, Row(writer, form, tail, height)
    sums = writer.array(vector_type("f32"), vectors * CHUNK)
    panel = writer.array(vector_type("i32"), vectors * BYTES)
    factors = writer.array(vector_type("f32"), vectors * LANES)
    unpacked = writer.array(vector_type("i32"), (form.vectors + 1) * height)
    together = _together()
    with chunks(writer, grouped=grouped) as (n, chunk, rows):
        clear_sums(writer, sums, code.mul(rows, _I64(vectors)), vectors * together)
        with writer.loop(_I64(0), writer.lengths[1], 1) as s:
            with writer.loop(_I64(0), _I64(height), 1) as lane:
                row = code.add(writer.at(0, n), code.mul(lane, row_bytes(writer, vectors)))
                stretch, scales = form.decode(weights.stretch(row, s))
                for k, vector in enumerate((*stretch, scales.value)):
                    store(code, vector, place(code, unpacked, code.add(lane, _I64(k * height))), 64)
            with writer.loop(_I64(0), _I64(vectors), 1) as v:
                first = code.mul(v, _I64(LANES))
                columns = place(code, panel, code.mul(v, _I64(BYTES)))
                _transpose(writer, form, place(code, unpacked, first), height, columns, place(code, factors, first))
            with writer.loop(_I64(0), rows, together) as r:
                of_block = code.and_(r, _I64(LANES - 1))
                block = writer.at(1, _I64(0), s, code.add(chunk, code.sub(r, of_block)))
                x = code.add(block, code.mul(of_block, _I64(4)))
                of_rows = place(code, sums, code.mul(r, _I64(vectors)))
                _multiply(writer, form, digits, x, panel, factors, of_rows, vectors)
        store_results(writer, sums, n, chunk, rows, biased=bool(biases), vectors=vectors, grouped=grouped)
    return MachineCode(writer.end())


def _transpose(writer: Writer, form: Form, unpacked: Any, height: int, panel: Any, factors: Any) -> None:
    """Rows of integers and factors become columns: four integers of one place, or a factor, of each of the rows. The
    integers are put into the order of the activations."""
    code, kind = writer.code, vector_type("i32")

    def columns(k: int) -> list[Any]:
        at = [code.add(unpacked, _I64((k * height + r) * VECTOR_BYTES)) for r in range(LANES)]
        return transposed(code, [load(code, kind, address, VECTOR_BYTES) for address in at])

    for k in range(form.vectors):
        for lane, column in enumerate(columns(k)):
            parts = form.integers(code, [code.bitcast(column, ir.VectorType(_I8, BYTES))])
            for number, part in enumerate(parts, len(parts) * k):
                at = 4 * form.order[4 * number + lane // 4] + lane % 4
                store(code, part, code.add(panel, _I64(at * VECTOR_BYTES)), VECTOR_BYTES)
    for lane, column in enumerate(columns(form.vectors)):
        store(code, column, code.add(factors, _I64(lane * VECTOR_BYTES)), VECTOR_BYTES)


def _multiply(
    writer: Writer, form: Form, digits: Digits, x: Any, panel: Any, factors: Any, sums: Any, vectors: int
) -> None:
    """Adds the products of some rows and a stretch of a block of rows of weights to their sums.

    Args:
        x: the address of the first one of the rows in the interleaved records.
        sums: the address of those of the first row, ``vectors`` of each.
    """
    code, words, together, parts = writer.code, BYTES // form.groups, _together(), range(vectors)
    unrolled, bytes_type = min(words, UNROLLED), ir.VectorType(_I8, BYTES)
    with writer.loop(_I64(0), _I64(form.groups), 1) as group:
        integers, fours = (code.add(a, code.mul(group, _I64(words * VECTOR_BYTES))) for a in (panel, x))
        lane = code.mul(group, _I64(VECTOR_BYTES))
        numbers = code.add(code.add(x, lane), _I64(LANES * digits.places * STRETCH))

        def add(totals: list[Any], digit: int) -> list[Any]:
            cells = [writer.cell(Vector(code, total, "i32")) for total in totals]
            with writer.loop(_I64(0), _I64(words), unrolled) as first:
                for word in [code.add(first, _I64(k)) for k in range(unrolled)]:
                    at = [place(code, integers, code.add(word, _I64(v * BYTES))) for v in parts]
                    some = [load(code, bytes_type, address, VECTOR_BYTES) for address in at]
                    x_at = code.add(place(code, fours, word), _I64(LANES * digit * STRETCH))
                    for r in range(together):
                        four = writer.splat(load(code, _I32, code.add(x_at, _I64(4 * r)), 4), "i32")
                        same = code.bitcast(four.value, bytes_type)
                        for v in parts:
                            cell = cells[r * vectors + v]
                            total = dot(code, cell.get().value, some[v], same, signed=form.signed)
                            cell.set(Vector(code, total, "i32"))
            return [cell.get().value for cell in cells]

        totals = iter(sums_of_products(code, form, digits, add, together * vectors, 4 * words))
        at = [code.add(factors, code.add(lane, _I64(v * LANES * VECTOR_BYTES))) for v in parts]
        own = [_vector(code, address, 0) for address in at]
        further = [_vector(code, address, 8 * VECTOR_BYTES) for address in at] if form.has_rest else []
        for r in range(together):
            factor, rest = (
                writer.splat(load(code, _F32, code.add(numbers, _I64(4 * r + ahead)), 4), "f32")
                for ahead in (0, form.groups * VECTOR_BYTES)
            )
            for v in parts:
                address = code.add(sums, _I64((r * vectors + v) * VECTOR_BYTES))
                total, before = next(totals), _vector(code, address, 0)
                if form.has_rest:
                    after = fma(further[v], rest, fma(total, own[v] * factor, before))
                else:
                    after = fma(fma(total, factor, rest), own[v], before)
                store(code, after.value, address, VECTOR_BYTES)
