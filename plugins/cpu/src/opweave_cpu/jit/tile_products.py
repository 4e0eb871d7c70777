"""Products of quantized weights by activations of integers, with AMX.

Tiles hold the integers of a group of 16 rows of weights, as they are unpacked, and the digits of 16 rows of
activations, which are interleaved once for all weights (`opweave_cpu.jit.activations`). So nothing is transposed but
the results, in which each lane is a row of activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg
from opweave.graph.dtypes import DType
from opweave_cpu.jit.activations import Digits, sums_of_products
from opweave_cpu.jit.amx import ROW_BYTES, ROWS, Tiles, tiles
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.integers import BYTES, RUNS, STRETCH, Form, Row
from opweave_cpu.jit.row_blocks import (
    CHUNK,
    block_writer,
    chunks,
    clear_sums,
    place,
    row_bytes,
    store_results,
    transpose_sums,
)
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, fma, load, store, vector_type
from opweave_cpu.jit.writer import Writer

__all__ = ["multiply_tiles"]

UNPACKED: Final = STRETCH + VECTOR_BYTES
"""Bytes of a stretch of a row of weights: its integers, then its factors."""

_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()


def multiply_tiles(
    form: Form, digits: Digits, tail: int, biases: Sequence[Arg], into: DType, *, grouped: bool = False
) -> MachineCode:
    """The kernel that multiplies any number of rows, whose records are interleaved, by blocks of 16 rows of weights.

    Args:
        tail: weights of a last stretch that is not whole.
        biases: a bias, if there is one.
        into: type of the result.
        grouped: the rows are in groups, as of `opweave_cpu.jit.row_blocks`.
    """
    writer = block_writer(biases, into, grouped=grouped)
    code, weights, product = writer.code, Row(writer, form, tail, LANES), _TileProduct(writer, form, digits)
    sums = writer.array(vector_type("f32"), CHUNK)
    with tiles(writer, product.shapes) as registers, chunks(writer, grouped=grouped) as (n, chunk, rows):
        clear_sums(writer, sums, rows, LANES)
        with writer.loop(_I64(0), writer.lengths[1], 1) as s:
            with writer.loop(_I64(0), _I64(LANES), 1) as lane:
                row = code.add(writer.at(0, n), code.mul(lane, row_bytes(writer)))
                vectors, factors = form.decode(weights.stretch(row, s))
                product.keep(lane, form.integers(code, vectors), factors)
            with writer.loop(_I64(0), rows, LANES) as r:
                record = writer.at(1, _I64(0), s, code.add(chunk, r))
                product.multiply(registers, record, place(code, sums, r))
        transpose_sums(writer, sums, rows)
        store_results(writer, sums, n, chunk, rows, biased=bool(biases), grouped=grouped)
    return MachineCode(writer.end())


class _TileProduct:
    """The product of a stretch of 16 rows of weights by 16 rows of activations, while a kernel is written.

    Attributes:
        shapes: of its tiles, by number.
    """

    def __init__(self, writer: Writer, form: Form, digits: Digits) -> None:
        self._writer, self._form, self._digits = writer, form, digits
        width = self._width = STRETCH // form.groups  # bytes of a group
        # Two groups at once, so that the second one is multiplied while the first one's products are added up.
        self._together: Final = 2 if digits.places == 1 else 1
        count = self._together * digits.places
        self._products: Final = range(count)
        self._weights: Final = range(count, count + self._together)
        self._activations: Final = range(count + self._together, 2 * count + self._together)
        self.shapes: Final = {
            **dict.fromkeys(self._products, (ROWS, ROW_BYTES)),
            **dict.fromkeys(self._weights, (ROWS, width)),
            **dict.fromkeys(self._activations, (width // 4, ROW_BYTES)),
        }
        self._unpacked = writer.array(ir.ArrayType(_I8, UNPACKED), LANES)
        self._results = writer.array(vector_type("i32"), 2 * LANES * count)

    def keep(self, row: Any, vectors: Sequence[Any], factors: Vector) -> None:
        """Stores the integers and factors of a row of weights."""
        code = self._writer.code
        at = code.add(self._unpacked, code.mul(row, _I64(UNPACKED)))
        for vector in _in_natural_order(code, self._form, vectors):
            signed = code.sub(vector, ir.Constant(vector.type, [self._form.middle] * BYTES))
            store(code, signed, at, VECTOR_BYTES)
            at = code.add(at, _I64(BYTES))
        store(code, factors.value, at, VECTOR_BYTES)

    def multiply(self, registers: Tiles, record: Any, sums: Any) -> None:
        """Adds the products to 16 vectors of sums, one for each row of weights.

        Args:
            record: the address of the interleaved records.
        """
        code, writer = self._writer.code, self._writer
        at = [code.add(sums, _I64(w * VECTOR_BYTES)) for w in range(LANES)]
        cells = [writer.cell(self._floats(address)) for address in at]
        steps = [range(first, first + self._together) for first in range(0, self._form.groups, self._together)]
        self._multiply(registers, record, steps[0], 0)
        for number, groups in enumerate(steps):
            # What tiles wrote is read late: the processor does not forward it, but waits until it is in the cache.
            if number + 1 < len(steps):
                self._multiply(registers, record, steps[number + 1], (number + 1) % 2)
            for k, group in enumerate(groups):
                self._add_group(record, group, (number % 2, k), cells)
        for address, cell in zip(at, cells, strict=True):
            store(code, cell.get().value, address, VECTOR_BYTES)

    def _multiply(self, registers: Tiles, record: Any, groups: range, half: int) -> None:
        """Writes the products of some groups to a half of the results."""
        code, places = self._writer.code, self._digits.places
        for k, group in enumerate(groups):
            left, rows = self._weights[k], group * self._width * LANES
            registers.load(left, code.add(self._unpacked, _I64(group * self._width)), UNPACKED)
            for digit in range(places):
                product = self._products[k * places + digit]
                right = self._activations[k * places + digit]
                registers.load(right, code.add(record, _I64(digit * STRETCH * LANES + rows)), ROW_BYTES)
                registers.zero(product)
                registers.multiply("int8", product, left, right)
        for product in self._products:
            registers.store(product, self._result(half, product, 0), ROW_BYTES)

    def _add_group(self, record: Any, group: int, number: tuple[int, int], cells: Sequence[Any]) -> None:
        """Adds the products of a group, multiplied by its factors, to the sums.

        Args:
            number: the half of the results, and the number of the group in it.
        """
        code, form, digits = self._writer.code, self._form, self._digits
        scalars = code.add(record, _I64(digits.places * STRETCH * LANES + group * VECTOR_BYTES))
        factors = self._floats(scalars)
        rests = self._floats(code.add(scalars, _I64(form.groups * VECTOR_BYTES))) if form.has_rest else None
        for w, cell in enumerate(cells):

            def add(totals: list[Any], digit: int, w: int = w) -> list[Any]:
                at = self._result(number[0], number[1] * digits.places + digit, w)
                return [code.add(totals[0], load(code, vector_type("i32"), at, VECTOR_BYTES))]

            (total,) = sums_of_products(code, form, digits, add, 1, self._width)
            numbers = code.add(self._unpacked, _I64(w * UNPACKED + STRETCH + 4 * group))
            cell.set(fma(total * self._repeated(numbers), factors, cell.get()))
            if rests is not None:
                cell.set(fma(rests, self._repeated(code.add(numbers, _I64(32))), cell.get()))

    def _result(self, half: int, product: int, row: int) -> Any:
        at = (half * len(self._products) + product) * LANES + row
        return self._writer.code.add(self._results, _I64(at * VECTOR_BYTES))

    def _floats(self, address: Any) -> Vector:
        return Vector(self._writer.code, load(self._writer.code, vector_type("f32"), address, VECTOR_BYTES), "f32")

    def _repeated(self, address: Any) -> Vector:
        return self._writer.splat(load(self._writer.code, _F32, address, 4), "f32")


def _in_natural_order(code: Any, form: Form, vectors: Sequence[Any]) -> list[Any]:
    """The integers of a stretch in the order of the weights. Each two vectors hold those of half of it."""
    found = []
    for k in range(RUNS // 4):
        pair = 2 * (k // 2)
        places = [form.order.index(run) - 4 * pair for run in range(4 * k, 4 * k + 4)]
        lanes = [at * LANES + i for at in places for i in range(LANES)]
        found.append(code.shuffle_vector(*vectors[pair : pair + 2], ir.Constant(ir.VectorType(_I32, BYTES), lanes)))
    return found
