"""`Writer`: writes a kernel in LLVM IR, its loops over rows and vectors, and its accesses to memory.

A kernel has one argument, the address of an array of 64-bit words: the lengths of its axes; for each operand the
address of its first element and the bytes from one element to the next along each axis; then numbers in f64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg
from opweave_cpu.jit.compiler import ENTRY, target
from opweave_cpu.jit.vectors import LANES, TYPES, Vector, declared, intrinsic, loop, select, vector_type
from opweave_cpu.jit.walk import Operand

__all__ = ["Cell", "Writer", "compute_kind", "takes"]

_I64: Final = ir.IntType(64)
_BYTE: Final = ir.IntType(8).as_pointer()
_STORED: Final = {
    "f32": "f32",
    "f64": "f64",
    "f16": "i16",
    "bf16": "i16",
    "bool": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
}
"""By dtype: the type of LLVM as which its elements are read and written."""

_SIZES: Final = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "bool": 1, "i16": 2, "i32": 4, "i64": 8}


def compute_kind(dtype: str) -> str:
    """The type that kernels compute in for a type in memory."""
    return "f32" if dtype in ("f16", "bf16") else dtype


def _has_halves() -> bool:
    """Whether the processor converts between f16 and f32; elsewhere LLVM calls functions that are not here."""
    return not target().features.isdisjoint({"f16c", "fp-armv8", "neon"})


def takes(arg: Arg, *, wide: bool) -> bool:
    """Whether kernels read and write an operand: floats in ordinary memory, f64 if ``wide``."""
    dtype, kind = arg.dtype, arg.buffer_type
    if not dtype.is_float or (dtype.name == "f64" and not wide) or (dtype.name == "f16" and not _has_halves()):
        return False
    return kind is None or kind.is_raw


class Cell:
    """A variable of a kernel, which loops change."""

    def __init__(self, code: Any, place: Any, kind: str) -> None:
        self._code, self._place, self._kind = code, place, kind

    def get(self) -> Vector:
        return Vector(self._code, self._code.load(self._place), self._kind)

    def set(self, value: Vector) -> None:
        self._code.store(value.value, self._place)


class Writer:
    """One kernel.

    Args:
        axes: how many its walk has.
        operands: sources first or last, in the order of the array of words.

    Attributes:
        code: where instructions go.
        lengths: elements along each axis.
        length: elements along the last axis.
        bases: addresses of the operands.
        strides: of each operand, bytes from one element to the next along each axis.
    """

    def __init__(self, axes: int, operands: Sequence[Operand]) -> None:
        self._module: Final = ir.Module()
        self._module.triple = target().triple
        self._function: Final = ir.Function(self._module, ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]), ENTRY)
        self.code: Any = ir.IRBuilder(self._function.append_basic_block())
        self._operands: Final = operands
        self._words = 0
        self.lengths: Final = [self._word() for _ in range(axes)]
        self.length: Final = self.lengths[-1]
        self.bases: Final[list[Any]] = []
        self.strides: Final[list[list[Any]]] = []
        for _ in operands:
            self.bases.append(self._word())
            self.strides.append([self._word() for _ in range(axes)])

    def _word(self) -> Any:
        self._words += 1
        return self.code.load(self.code.gep(self._function.args[0], [_I64(self._words - 1)]))

    def scalar(self) -> Vector:
        """The next of the numbers, in all lanes, in f64. Call this before the first loop."""
        word = self.code.bitcast(self._word(), TYPES["f64"])
        return self.splat(word, "f64")

    def integer(self) -> Any:
        """The next of the numbers, which is whole, as an integer of 64 bits. Call this before the first loop."""
        return self.code.fptosi(self.first(self.scalar()), _I64)

    def numbers(self) -> Any:
        """The address of the next of the numbers, f64, for `dense`: as many as were given."""
        return self.code.ptrtoint(self.code.gep(self._function.args[0], [_I64(self._words)]), _I64)

    def splat(self, value: Any, kind: str) -> Vector:
        """A number in all lanes."""
        code = self.code
        first = code.insert_element(ir.Constant(vector_type(kind), ir.Undefined), value, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return Vector(code, code.shuffle_vector(first, first, lanes), kind)

    def number(self, value: float, kind: str) -> Vector:
        return Vector(self.code, ir.Constant(vector_type(kind), [value] * LANES), kind)

    def operand(self, k: int) -> Operand:
        return self._operands[k]

    def at(self, k: int, *indices: Any) -> Any:
        """The address of an element of operand ``k``, by its indices along the first axes."""
        code, address = self.code, self.bases[k]
        for index, stride in zip(indices, self.strides[k], strict=False):
            address = code.add(address, code.mul(index, stride))
        return address

    def array(self, kind: Any, count: int) -> Any:
        """The address of memory for that many values of a type of LLVM, which begins at a cache line."""
        with self.code.goto_entry_block():
            place = self.code.alloca(ir.ArrayType(kind, count))
            place.align = 64
            return self.code.ptrtoint(place, _I64)

    def cell(self, start: Vector) -> Cell:
        """A variable that begins as ``start``."""
        with self.code.goto_entry_block():
            place = self.code.alloca(start.value.type)
        self.code.store(start.value, place)
        return Cell(self.code, place, start.kind)

    def at_most(self, limit: int, value: Any) -> Any:
        """The smaller one of two integers of 64 bits."""
        return self.code.select(self.code.icmp_signed("<", value, _I64(limit)), value, _I64(limit))

    # --- loops ------------------------------------------------------------------------------------------------------

    def loop(self, start: Any, stop: Any, step: int) -> AbstractContextManager[Any]:
        """Code for each i from ``start`` on, as long as it is below ``stop``."""
        return loop(self.code, start, stop, step)

    @contextmanager
    def rows(self) -> Iterator[list[Any]]:
        """Code for each row, so each index along all axes but the last; gives the addresses of the operands' rows."""
        with self.blocks(1) as bases:
            yield bases

    @contextmanager
    def blocks(self, inner: int) -> Iterator[list[Any]]:
        """Code for each index along all axes but the last ``inner``; gives the addresses of the operands there."""
        with self._axes(0, self.bases, inner) as bases:
            yield bases

    @contextmanager
    def _axes(self, axis: int, bases: list[Any], inner: int) -> Iterator[list[Any]]:
        if axis == len(self.lengths) - inner:
            yield bases
            return
        with self.loop(_I64(0), self.lengths[axis], 1) as i:
            code = self.code
            moved = [code.add(b, code.mul(i, s[axis])) for b, s in zip(bases, self.strides, strict=True)]
            with self._axes(axis + 1, moved, inner) as places:
                yield places

    def end(self) -> str:
        """The finished module in LLVM IR."""
        self.code.ret_void()
        return str(self._module)

    def elements(self, body: Any, vectors: int = 1) -> None:
        """``body(i, mask)`` for each vector of a row, ``vectors`` at a time; the mask is that of the lanes which exist,
        ``None`` if all do.
        """
        self.over(self.length, body, vectors)

    def over(self, length: Any, body: Any, vectors: int = 1) -> None:
        """The same for a row of another length."""
        code, step = self.code, LANES * vectors
        whole = code.and_(length, _I64(-step))
        with self.loop(_I64(0), whole, step) as i:
            for k in range(vectors):
                body(code.add(i, _I64(k * LANES)), None, k)
        with self.loop(whole, length, LANES) as i:
            lanes = ir.Constant(vector_type("i64"), list(range(LANES)))
            left = self.splat(code.sub(length, i), "i64")
            body(i, code.icmp_signed("<", lanes, left.value), 0)

    # --- memory -----------------------------------------------------------------------------------------------------

    def read(self, k: int, row: Any, i: Any, mask: Any = None) -> Vector:
        """The elements of operand ``k`` from ``i`` on, in the type to compute in; 0 where the mask is false."""
        code, (dtype, inner) = self.code, self._operands[k]
        stored = _STORED[dtype]
        if inner == 0:
            one = code.load(code.inttoptr(row, TYPES[stored].as_pointer()))
            return self._widened(self.splat(one, stored), dtype)
        if inner < 0:
            return self._widened(self._gathered(k, row, i, mask, stored), dtype)
        return self.dense(dtype, row, i, mask)

    def dense(self, dtype: str, row: Any, i: Any, mask: Any = None) -> Vector:
        """The elements from ``i`` on of a row without gaps, as `read` gives them."""
        code, stored = self.code, _STORED[dtype]
        kind = vector_type(stored)
        address = code.inttoptr(code.add(row, code.mul(i, _I64(_SIZES[dtype]))), kind.as_pointer())
        if mask is None:
            return self._widened(Vector(code, code.load(address, align=_SIZES[dtype]), stored), dtype)
        name, types = f"llvm.masked.load.v{LANES}{stored}.p0", [kind.as_pointer(), vector_type("bool"), kind]
        load = self._aligned(name, types, kind, dtype, 1)
        return self._widened(Vector(code, load(address, mask, ir.Constant(kind, None)), stored), dtype)

    def repeated(self, k: int, row: Any, i: Any, count: int, left: Any = None) -> Vector:
        """``count`` elements of operand ``k`` from ``i`` on, again and again in all lanes. If only ``left`` exist, the
        last of them stands for the others."""
        code, (dtype, inner), lane = self.code, self._operands[k], ir.IntType(32)
        stored = _STORED[dtype]
        kind = ir.VectorType(TYPES[stored], count)
        if left is None:
            address = code.inttoptr(code.add(row, code.mul(i, _I64(inner))), kind.as_pointer())
            some = code.load(address, align=_SIZES[dtype])
        else:
            some = ir.Constant(kind, ir.Undefined)
            for c in range(count):
                number = code.add(i, self.at_most(c, code.sub(left, _I64(1))))
                address = code.inttoptr(code.add(row, code.mul(number, _I64(inner))), kind.element.as_pointer())
                some = code.insert_element(some, code.load(address), lane(c))
        lanes = ir.Constant(ir.VectorType(lane, LANES), [n % count for n in range(LANES)])
        return self._widened(Vector(code, code.shuffle_vector(some, some, lanes), stored), dtype)

    def write(self, k: int, row: Any, i: Any, value: Vector, mask: Any = None) -> None:
        """Write to operand ``k`` from element ``i`` on, rounded to its type, where the mask is true."""
        code, (dtype, inner) = self.code, self._operands[k]
        stored = _STORED[dtype]
        narrow = self._narrowed(value, dtype)
        kind = vector_type(stored)
        if inner < 0:
            pointers = self._pointers(k, row, i, stored)
            name = f"llvm.masked.scatter.v{LANES}{stored}.v{LANES}p0"
            store = self._aligned(name, [kind, pointers.type, vector_type("bool")], ir.VoidType(), dtype, 2)
            store(narrow.value, pointers, self._all() if mask is None else mask)
            return
        address = code.inttoptr(code.add(row, code.mul(i, _I64(inner))), kind.as_pointer())
        if mask is None:
            code.store(narrow.value, address, align=_SIZES[dtype])
            return
        name, types = f"llvm.masked.store.v{LANES}{stored}.p0", [kind, kind.as_pointer(), vector_type("bool")]
        self._aligned(name, types, ir.VoidType(), dtype, 2)(narrow.value, address, mask)

    def write_one(self, k: int, row: Any, value: Vector) -> None:
        """Write the first lane to the only element of operand ``k``, rounded to its type."""
        narrow = self._narrowed(value, self._operands[k].dtype)
        one = self.first(narrow)
        self.code.store(one, self.code.inttoptr(row, one.type.as_pointer()))

    def first(self, x: Vector) -> Any:
        """The first lane."""
        return self.code.extract_element(x.value, ir.IntType(32)(0))

    def last(self, x: Vector) -> Any:
        """The last lane."""
        return self.code.extract_element(x.value, ir.IntType(32)(LANES - 1))

    def rounded(self, value: Vector, dtype: str) -> Vector:
        """A value as it would be read after it was written."""
        return self._widened(self._narrowed(value, dtype), dtype) if dtype in ("f16", "bf16") else value

    def _aligned(self, name: str, types: list[Any], result: Any, dtype: str, position: int) -> Any:
        """A function of LLVM that takes an alignment, that of ``dtype``, at that position."""
        before, align = position, ir.IntType(32)(_SIZES[dtype])
        function = declared(self.code, name, result, [*types[:before], align.type, *types[before:]])
        return lambda *values: self.code.call(function, [*values[:before], align, *values[before:]])

    def _all(self) -> Any:
        return ir.Constant(vector_type("bool"), [1] * LANES)

    def _pointers(self, k: int, row: Any, i: Any, stored: str) -> Any:
        code = self.code
        lanes = Vector(code, ir.Constant(vector_type("i64"), list(range(LANES))), "i64")
        stride = self.splat(self.strides[k][-1], "i64")
        places = (lanes + self.splat(i, "i64")) * stride + self.splat(row, "i64")
        return code.inttoptr(places.value, ir.VectorType(TYPES[stored].as_pointer(), LANES))

    def _gathered(self, k: int, row: Any, i: Any, mask: Any, stored: str) -> Vector:
        kind, pointers = vector_type(stored), self._pointers(k, row, i, stored)
        name, types = f"llvm.masked.gather.v{LANES}{stored}.v{LANES}p0", [pointers.type, vector_type("bool"), kind]
        load = self._aligned(name, types, kind, self._operands[k].dtype, 1)
        return Vector(self.code, load(pointers, self._all() if mask is None else mask, ir.Constant(kind, None)), stored)

    # --- types in memory --------------------------------------------------------------------------------------------

    def _widened(self, x: Vector, dtype: str) -> Vector:
        if dtype == "bf16":
            return (Vector(x.code, x.code.zext(x.value, vector_type("i32")), "i32") << 16).bits("f32")
        if dtype == "f16":
            halves = ir.VectorType(ir.HalfType(), LANES)
            return Vector(x.code, x.code.fpext(x.code.bitcast(x.value, halves), vector_type("f32")), "f32")
        return x.compare("!=", 0) if dtype == "bool" else x

    def _narrowed(self, x: Vector, dtype: str) -> Vector:
        code = x.code
        if dtype == "bf16":
            bits = x.bits("i32")
            # Rounds to nearest, ties to even; a NaN keeps its upper bits, and gets one that keeps it a NaN.
            nearest = (bits + (bits.shifted(16) & 1) + 0x7FFF).shifted(16)
            return select(x.is_nan(), bits.shifted(16) | 0x40, nearest).to("i16")
        if dtype == "f16":
            halves = code.fptrunc(x.value, ir.VectorType(ir.HalfType(), LANES))
            return Vector(code, code.bitcast(halves, vector_type("i16")), "i16")
        return Vector(code, code.zext(x.value, vector_type("i8")), "i8") if dtype == "bool" else x

    # --- over the lanes of a vector ---------------------------------------------------------------------------------

    def total(self, x: Vector) -> Vector:
        """The sum of the lanes, pairwise, in all lanes."""
        return self.folded(x, lambda a, b: a + b)

    def running(self, x: Vector) -> Vector:
        """For each lane the sum of the lanes up to it, added up pairwise."""
        code, distance, zeros = self.code, 1, x.number(0.0)
        while distance < LANES:
            lanes = [i - distance if i >= distance else LANES for i in range(LANES)]  # LANES: a zero
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes)
            x = x + Vector(code, code.shuffle_vector(x.value, zeros.value, mask), x.kind)
            distance *= 2
        return x

    def largest(self, x: Vector) -> Vector:
        """The largest lane, NaN if there is one, in all lanes."""
        return self.extreme(x, "maximum")

    def reduced(self, x: Vector, operation: str) -> Vector:
        """The lanes of integers joined by an operation, as LLVM calls it (``add``, ``smax``), in all lanes."""
        kind = x.value.type
        function = declared(self.code, f"llvm.vector.reduce.{operation}.v{LANES}{x.kind}", kind.element, [kind])
        return self.splat(self.code.call(function, [x.value]), x.kind)

    def extreme(self, x: Vector, which: str) -> Vector:
        """The ``maximum`` or ``minimum`` of the lanes, NaN if there is one, in all lanes."""
        return self.folded(x, partial(intrinsic, which))

    def any(self, x: Vector) -> Vector:
        """Whether a lane of bool is true, in all lanes."""
        word = self.code.bitcast(x.value, ir.IntType(LANES))
        return self.splat(self.code.icmp_unsigned("!=", word, word.type(0)), "bool")

    def folded(self, x: Vector, fold: Any, count: int = LANES) -> Vector:
        """Each ``count`` lanes, a power of two, joined by ``fold``, in all of them."""
        code, distance = self.code, count // 2
        while distance:
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [i ^ distance for i in range(LANES)])
            x = fold(x, Vector(code, code.shuffle_vector(x.value, x.value, lanes), x.kind))
            distance //= 2
        return x
