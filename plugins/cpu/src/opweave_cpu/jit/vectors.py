"""Arithmetic that is written down, not computed: vectors of `LANES` numbers whose operators emit LLVM instructions.

The formulas of kernels are Python functions of such vectors. Each lane is computed as NumPy does it: no operation is
contracted or reordered, except where `fma` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

__all__ = [
    "LANES", "TYPES", "VECTOR_BYTES", "Vector", "declared", "fma", "intrinsic", "load", "loop", "polynomial", "select",
    "store", "totals", "transposed", "vector_type",
]  # fmt: skip

LANES: Final = 16
"""Numbers of a vector, of whatever type: one register of 512 bits in f32, and LLVM cuts what is wider."""

VECTOR_BYTES: Final = 64
"""Bytes of `LANES` numbers in f32, or of four bytes each."""

TYPES: Final[dict[str, Any]] = {
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
    "bool": ir.IntType(1),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
}
"""Types of elements in registers."""


def vector_type(name: str) -> Any:
    return ir.VectorType(TYPES[name], LANES)


class Vector:
    """`LANES` numbers at one place of a kernel.

    Args:
        code: the builder that emits the instructions.
        value: LLVM's value.
        kind: the type of the elements, a key of `TYPES`.
    """

    __slots__ = ("code", "kind", "value")

    def __init__(self, code: Any, value: Any, kind: str) -> None:
        self.code, self.value, self.kind = code, value, kind

    @property
    def is_float(self) -> bool:
        return self.kind in ("f32", "f64")

    def number(self, value: float, kind: str = "") -> Vector:
        """A vector of equal numbers, of this one's type unless another one is named."""
        kind = kind or self.kind
        return Vector(self.code, ir.Constant(vector_type(kind), [ir.Constant(TYPES[kind], value)] * LANES), kind)

    def other(self, value: Vector | float) -> Vector:
        return value if isinstance(value, Vector) else self.number(value)

    def _emit(self, name: str, value: Vector | float, kind: str = "") -> Vector:
        return Vector(self.code, getattr(self.code, name)(self.value, self.other(value).value), kind or self.kind)

    def __add__(self, value: Vector | float) -> Vector:
        return self._emit("fadd" if self.is_float else "add", value)

    def __sub__(self, value: Vector | float) -> Vector:
        return self._emit("fsub" if self.is_float else "sub", value)

    def __mul__(self, value: Vector | float) -> Vector:
        return self._emit("fmul" if self.is_float else "mul", value)

    def __truediv__(self, value: Vector | float) -> Vector:
        return self._emit("fdiv", value)

    def __radd__(self, value: float) -> Vector:
        return self.number(value) + self

    def __rsub__(self, value: float) -> Vector:
        return self.number(value) - self

    def __rmul__(self, value: float) -> Vector:
        return self.number(value) * self

    def __rtruediv__(self, value: float) -> Vector:
        return self.number(value) / self

    def __neg__(self) -> Vector:
        if self.is_float:
            return Vector(self.code, self.code.fneg(self.value), self.kind)
        return self.number(0) - self

    def __and__(self, value: Vector | int) -> Vector:
        return self._emit("and_", value)

    def __or__(self, value: Vector | int) -> Vector:
        return self._emit("or_", value)

    def __xor__(self, value: Vector | int) -> Vector:
        return self._emit("xor", value)

    def __lshift__(self, value: int) -> Vector:
        return self._emit("shl", value)

    def __rshift__(self, value: int) -> Vector:
        """The sign is shifted in; `shifted` shifts zeros in."""
        return self._emit("ashr", value)

    def shifted(self, value: int) -> Vector:
        """Shifted right as an unsigned number."""
        return self._emit("lshr", value)

    def compare(self, sign: str, value: Vector | float) -> Vector:
        """Where ``self sign value`` holds, as bool; with NaN only ``!=`` does."""
        other = self.other(value).value
        if not self.is_float:
            # As a signed number, true is -1.
            integers = self.code.icmp_unsigned if self.kind == "bool" else self.code.icmp_signed
            return Vector(self.code, integers(sign, self.value, other), "bool")
        test = self.code.fcmp_unordered if sign == "!=" else self.code.fcmp_ordered
        return Vector(self.code, test(sign, self.value, other), "bool")

    def __lt__(self, value: Vector | float) -> Vector:
        return self.compare("<", value)

    def __gt__(self, value: Vector | float) -> Vector:
        return self.compare(">", value)

    def is_nan(self) -> Vector:
        return self.compare("!=", self)

    def bits(self, kind: str) -> Vector:
        """The same bits as another type of the same size."""
        return Vector(self.code, self.code.bitcast(self.value, vector_type(kind)), kind)

    def to(self, kind: str) -> Vector:
        """Converted to another type: floats to floats, integers and bool to integers of any size or floats."""
        if kind == self.kind:
            return self
        code, target = self.code, vector_type(kind)
        sizes = {"bool": 0, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f32": 4, "f64": 8}
        wider = sizes[kind] > sizes[self.kind]
        if self.is_float:
            convert = code.fpext if wider else code.fptrunc
        elif kind in ("f32", "f64"):
            convert = code.uitofp if self.kind == "bool" else code.sitofp
        elif wider:
            convert = code.zext if self.kind == "bool" else code.sext
        else:
            convert = code.trunc
        return Vector(code, convert(self.value, target), kind)


def declared(code: Any, name: str, result: Any, types: Sequence[Any]) -> Any:
    """A function that LLVM knows, in the module of ``code``."""
    known = code.module.globals.get(name)
    return known or ir.Function(code.module, ir.FunctionType(result, types), name)


@contextmanager
def loop(code: Any, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
    """Code for each i from ``start`` on, as long as it is below ``stop``: signed integers of LLVM, of one type."""
    before, (head, body, after) = code.block, [code.append_basic_block() for _ in range(3)]
    code.branch(head)
    code.position_at_end(head)
    i = code.phi(start.type)
    i.add_incoming(start, before)
    code.cbranch(code.icmp_signed("<", i, stop), body, after)
    code.position_at_end(body)
    yield i
    i.add_incoming(code.add(i, start.type(step)), code.block)
    code.branch(head)
    code.position_at_end(after)


def load(code: Any, kind: Any, address: Any, align: int = 1) -> Any:
    """A value of that type of LLVM at an address."""
    return code.load(code.inttoptr(address, kind.as_pointer()), align=align)


def store(code: Any, value: Any, address: Any, align: int = 1) -> None:
    code.store(value, code.inttoptr(address, value.type.as_pointer()), align=align)


def transposed(code: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of a matrix, of whose `LANES` rows each is a vector of LLVM."""
    rows = list(rows)
    for distance in (8, 4, 2, 1):
        for r in range(LANES):
            if not r & distance:
                rows[r], rows[r + distance] = _exchanged(code, rows[r], rows[r + distance], distance)
    return rows


def totals(code: Any, rows: Sequence[Any]) -> Any:
    """A vector of LLVM of the sums of `LANES` others, each in the lane of its number: their columns added up."""
    rows, distance = list(rows), LANES // 2
    while distance:
        rows = [code.fadd(*_exchanged(code, rows[r], rows[r + distance], distance)) for r in range(distance)]
        distance //= 2
    return rows[0]


def _exchanged(code: Any, a: Any, b: Any, distance: int) -> tuple[Any, Any]:
    """Two rows of a matrix that is being transposed, with blocks of ``distance`` lanes exchanged."""
    kind = ir.VectorType(ir.IntType(32), LANES)
    low = [lane + (LANES - distance if lane & distance else 0) for lane in range(LANES)]
    high = [lane + (LANES if lane & distance else distance) for lane in range(LANES)]
    return code.shuffle_vector(a, b, ir.Constant(kind, low)), code.shuffle_vector(a, b, ir.Constant(kind, high))


def intrinsic(name: str, *values: Vector) -> Vector:
    """LLVM's function ``llvm.<name>`` of vectors of one type."""
    code, kind = values[0].code, values[0].kind
    vector = vector_type(kind)
    function = declared(code, f"llvm.{name}.v{LANES}{kind}", vector, [vector] * len(values))
    return Vector(code, code.call(function, [v.value for v in values]), kind)


def fma(a: Vector, b: Vector | float, c: Vector | float) -> Vector:
    """a b + c, rounded once."""
    return intrinsic("fma", a, a.other(b), a.other(c))


def select(condition: Vector, a: Vector | float, b: Vector | float) -> Vector:
    """The lanes of ``a`` where the condition holds, and those of ``b`` elsewhere; one of them is a vector."""
    shape = a if isinstance(a, Vector) else b
    assert isinstance(shape, Vector)
    first, second = shape.other(a), shape.other(b)
    return Vector(shape.code, condition.code.select(condition.value, first.value, second.value), shape.kind)


def polynomial(x: Vector, coefficients: Sequence[float]) -> Vector:
    """The sum of ``coefficients[i] x**i`` by Horner's rule."""
    result = x.number(coefficients[-1])
    for c in coefficients[-2::-1]:
        result = fma(result, x, c)
    return result
