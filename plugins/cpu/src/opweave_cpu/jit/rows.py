"""Operations that reduce each row and then compute its elements, softmax and the norms, as one compiled loop each.

A row is passed over two or three times, in the first-level cache where it fits. Sums have 64 running parts, so that
none becomes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.functions import exp, logarithm
from opweave_cpu.jit.vectors import Vector, fma, intrinsic, select
from opweave_cpu.jit.walk import Operand, Prepared, Walk, bind_walk, walk_over
from opweave_cpu.jit.writer import Writer, compute_kind, takes
from opweave_cpu.tunables import limit

__all__ = [
    "FORMS", "bind_reduction", "bind_running", "fits", "fits_reduction", "fits_running", "prepare_rows",
]  # fmt: skip

LONGEST_ROW: Final = limit("compiled_row", 1 << 16, 8, 1 << 16, bounds=(1, 1 << 16))
"""Elements of a row up to which its sums are as accurate as NumPy's: each part has a thousand terms at most."""

SHORTEST_ROW: Final = limit("shortest_compiled_row", 8, 1, 1 << 10)
"""Elements from which on rows are computed a vector at a time."""

PARTS: Final = 4
"""Vectors that a sum, or a maximum, is kept in: an addition takes several cycles, and then four are under way."""

Element = Callable[[Any, Any], Vector]


class Row:
    """A row of the operands of a kernel, while it is written.

    Attributes:
        kind: the type to compute in.
        count: the length of the row, in all lanes.
    """

    def __init__(self, writer: Writer, rows: Sequence[Any], kind: str) -> None:
        self._writer, self._rows, self.kind = writer, rows, kind
        code = writer.code
        self.count: Final = writer.splat(code.sitofp(writer.length, writer.number(0, kind).value.type.element), kind)

    def source(self, k: int) -> Element:
        """``f(i, mask)``: the elements of operand ``k`` from ``i`` on."""
        return lambda i, mask: self._writer.read(k, self._rows[k], i, mask)

    def reduced(self, element: Element, start: float, fold: Callable[[Vector, Vector], Vector]) -> list[Vector]:
        """``element`` of the whole row, folded into `PARTS` vectors that begin as ``start``."""
        writer, code = self._writer, self._writer.code
        first = writer.number(start, self.kind)
        cells = [writer.cell(first) for _ in range(PARTS)]

        def body(i: Any, mask: Any, part: int) -> None:
            value = element(i, mask)
            if mask is not None:
                value = select(Vector(code, mask, "bool"), value, first)
            cells[part].set(fold(cells[part].get(), value))

        writer.elements(body, PARTS)
        return [cell.get() for cell in cells]

    def total(self, element: Element) -> Vector:
        """The sum of ``element`` over the row, in all lanes."""
        a, b, c, d = self.reduced(element, 0.0, lambda total, x: total + x)
        return self._writer.total((a + b) + (c + d))

    def largest(self, element: Element) -> Vector:
        """The largest ``element`` of the row, NaN if there is one, in all lanes."""
        return self.extreme(element, "maximum")

    def extreme(self, element: Element, which: str) -> Vector:
        """The ``maximum`` or ``minimum`` of ``element`` over the row, NaN if there is one, in all lanes.

        NaN is looked for in two vectors at a time: LLVM's functions look for it, and for the sign of zero, in each.
        """
        writer, code, sign = self._writer, self._writer.code, ">" if which == "maximum" else "<"
        start = writer.number(float("-inf" if which == "maximum" else "inf"), self.kind)
        cells = [writer.cell(start) for _ in range(PARTS)]
        is_nan = writer.cell(writer.number(0, "bool"))
        before: list[Vector] = []

        def body(i: Any, mask: Any, part: int) -> None:
            value, best = element(i, mask), cells[part]
            if mask is not None:
                value = select(Vector(code, mask, "bool"), value, start)
            best.set(select(value.compare(sign, best.get()), value, best.get()))
            if mask is None and part % 2 == 0:
                before[:] = [value]
                return
            other = before[0] if mask is None else value
            is_nan.set(is_nan.get() | Vector(code, code.fcmp_unordered("uno", other.value, value.value), "bool"))

        writer.elements(body, PARTS)
        a, b, c, d = [cell.get() for cell in cells]
        fold = partial(intrinsic, which)
        best = writer.extreme(fold(fold(a, b), fold(c, d)), which)
        return select(writer.any(is_nan.get()), float("nan"), best)

    def write(self, element: Element) -> None:
        """Make ``element`` the result."""
        k = len(self._rows) - 1
        self._writer.elements(lambda i, mask, _: self._writer.write(k, self._rows[k], i, element(i, mask), mask), 2)

    def written(self) -> Element:
        """The result so far, where writing did not round it."""
        return self.source(len(self._rows) - 1)

    @property
    def rounds(self) -> bool:
        """Whether writing rounds."""
        return self._writer.operand(len(self._rows) - 1).dtype != self.kind


# --- the operations -------------------------------------------------------------------------------------------------


def _scores(row: Row, sources: int, scale: Vector) -> Element:
    """The argument of softmax: the first source, scaled, plus the mask if there is one."""

    def score(i: Any, mask: Any) -> Vector:
        x = row.source(0)(i, mask) * scale
        return x + row.source(1)(i, mask) if sources > 1 else x

    return score


def _softmax(row: Row, sources: int, scale: Vector) -> None:
    score = _scores(row, sources, scale)
    top = row.largest(score)

    def power(i: Any, mask: Any) -> Vector:
        return exp(score(i, mask) - top)

    if row.rounds:  # computed twice, as they cannot be kept in the result
        factor = 1.0 / row.total(power)
        row.write(lambda i, mask: power(i, mask) * factor)
        return
    row.write(power)
    factor = 1.0 / row.total(row.written())
    row.write(lambda i, mask: row.written()(i, mask) * factor)


def _log_softmax(row: Row, sources: int) -> None:
    x = row.source(0)
    top = row.largest(x)
    rest = logarithm(row.total(lambda i, mask: exp(x(i, mask) - top)))
    row.write(lambda i, mask: (x(i, mask) - top) - rest)


def _l2_norm(row: Row, sources: int, eps: Vector) -> None:
    x = row.source(0)
    length = intrinsic("sqrt", _squares(row, x))
    least = select(length < eps, eps, length)
    row.write(lambda i, mask: x(i, mask) / least)


def _squares(row: Row, element: Element) -> Vector:
    def square(i: Any, mask: Any) -> Vector:
        x = element(i, mask)
        return x * x

    return row.total(square)


def _centred(row: Row, element: Element) -> Element:
    """The elements less their mean over the row."""
    mean = row.total(element) / row.count
    return lambda i, mask: element(i, mask) - mean


def _norm(row: Row, sources: int, eps: Vector, *, centred: bool) -> None:
    """Sources are the values, then a weight, or a weight and a bias, or nothing."""
    element = row.source(0)
    if centred:
        element = _centred(row, element)
    factor = 1.0 / intrinsic("sqrt", _squares(row, element) / row.count + eps)

    def result(i: Any, mask: Any) -> Vector:
        y = element(i, mask) * factor
        if sources == 2:
            return y * row.source(1)(i, mask)
        return fma(y, row.source(1)(i, mask), row.source(2)(i, mask)) if sources > 2 else y

    row.write(result)


# --- their gradients ------------------------------------------------------------------------------------------------


def _softmax_backward(row: Row, sources: int, scale: Vector) -> None:
    grad, y = row.source(0), row.source(1)
    along = row.total(lambda i, mask: grad(i, mask) * y(i, mask))
    row.write(lambda i, mask: (grad(i, mask) - along) * (y(i, mask) * scale))


def _log_softmax_backward(row: Row, sources: int) -> None:
    grad, y = row.source(0), row.source(1)
    total = row.total(grad)
    row.write(lambda i, mask: grad(i, mask) - exp(y(i, mask)) * total)


def _norm_backward(row: Row, sources: int, eps: Vector, *, centred: bool) -> None:
    """Sources are the gradient, the values, then a weight or nothing."""
    values = row.source(1)

    def inner(i: Any, mask: Any) -> Vector:
        given = row.source(0)(i, mask)
        return given * row.source(2)(i, mask) if sources > 2 else given

    element: Element = values
    given: Element = inner
    if centred:
        element, given = _centred(row, values), _centred(row, inner)
    factor = 1.0 / intrinsic("sqrt", _squares(row, element) / row.count + eps)
    along = row.total(lambda i, mask: given(i, mask) * element(i, mask)) / row.count * (factor * factor)
    row.write(lambda i, mask: (given(i, mask) - element(i, mask) * along) * factor)


class _Form(NamedTuple):
    """How to compute an operation.

    Attributes:
        write: writes it for one row, given the number of sources and the numbers.
        work: elementary operations for one element.
        numbers: attributes, in order.
        wide: whether it computes in f64 too.
    """

    write: Callable[..., None]
    work: int
    numbers: tuple[str, ...] = ()
    wide: bool = False


FORMS: Final[Mapping[str, _Form]] = {
    "softmax": _Form(_softmax, 20, ("scale",)),
    "log_softmax": _Form(_log_softmax, 20),
    "l2_norm": _Form(_l2_norm, 6, ("eps",), wide=True),
    "rms_norm": _Form(partial(_norm, centred=False), 6, ("eps",), wide=True),
    "layer_norm": _Form(partial(_norm, centred=True), 8, ("eps",), wide=True),
    "softmax_backward": _Form(_softmax_backward, 6, ("scale",), wide=True),
    "log_softmax_backward": _Form(_log_softmax_backward, 16),
    "rms_norm_backward": _Form(partial(_norm_backward, centred=False), 10, ("eps",), wide=True),
    "layer_norm_backward": _Form(partial(_norm_backward, centred=True), 14, ("eps",), wide=True),
}


def fits(step: Step) -> bool:
    """Whether a step is compiled."""
    form = FORMS.get(step.op)
    if form is None or not SHORTEST_ROW.value <= step.out.shape[-1] <= LONGEST_ROW.value:
        return False
    return all(takes(arg, wide=form.wide) for arg in (step.out, *step.srcs))


def prepare_rows(stream: Stream, step: Step) -> Prepared:
    """The kernel for a step that fits; it takes the sources, then the result."""
    form, args, shape = FORMS[step.op], [*step.srcs, step.out], step.out.shape
    walk = walk_over(shape, [_repeated(arg, len(shape)) for arg in args], rows=True)
    key = step.op, len(walk.lengths), walk.operands(args)
    code = stream.artefact(("rows", key), partial(_compiled, *key))
    numbers = [step.attrs[name] for name in form.numbers]
    return Prepared(code, walk, numbers, work=form.work)


def _repeated(arg: Arg, axes: int) -> tuple[int, ...]:
    """The strides of an operand that is repeated along the axes which it lacks, by NumPy's rule of broadcasting."""
    strides = tuple([0 if n == 1 else stride for n, stride in zip(arg.shape, arg.strides, strict=True)])
    return (*(0,) * (axes - len(strides)), *strides)


def _compiled(op: str, axes: int, operands: Sequence[Operand]) -> MachineCode:
    writer, form = Writer(axes, operands), FORMS[op]
    kind = compute_kind(operands[-1].dtype)
    numbers = [writer.scalar().to(kind) for _ in form.numbers]
    with writer.rows() as rows:
        form.write(Row(writer, rows, kind), len(operands) - 1, *numbers)
    return MachineCode(writer.end())


# --- a number for each row ------------------------------------------------------------------------------------------


def _mean(row: Row) -> Vector:
    return row.total(row.source(0)) / row.count


_NUMBERS: Final[Mapping[str, Callable[[Row], Vector]]] = {
    "max": lambda row: row.extreme(row.source(0), "maximum"),
    "min": lambda row: row.extreme(row.source(0), "minimum"),
    "sum": lambda row: row.total(row.source(0)),
    "mean": _mean,
}
"""By operation: the number for a row."""


def fits_reduction(step: Step) -> bool:
    """Whether ``max``, ``min``, ``sum`` or ``mean`` is compiled: of the last axes of a dense operand."""
    x, axes = step.srcs[0], sorted(step.attrs["axes"])
    rank = len(x.shape)
    if not axes or axes != list(range(rank - len(axes), rank)):
        return False
    length = prod(x.shape[axes[0] :])
    if length < SHORTEST_ROW.value or (step.op in ("sum", "mean") and length > LONGEST_ROW.value):
        return False
    return x.is_dense and step.out.is_dense and takes(x, wide=True) and takes(step.out, wide=True)


def bind_reduction(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    """The call for the operands of a step that fits."""
    rows, item = out.size, x.dtype.itemsize
    length = x.size // rows
    code = stream.artefact((op, x.dtype.name), partial(_reduction, op, x.dtype))
    walk = Walk((rows, length), ((length * item, item), (item, 0)), 1)
    return bind_walk(stream, code, walk, [x, out], work=2)


def _reduction(op: str, dtype: DType) -> MachineCode:
    writer = Writer(2, [Operand(dtype.name, dtype.itemsize), Operand(dtype.name, 0)])
    with writer.rows() as places:
        row = Row(writer, places, compute_kind(dtype.name))
        writer.write_one(1, places[1], _NUMBERS[op](row))
    return MachineCode(writer.end())


# --- running sums ---------------------------------------------------------------------------------------------------


def fits_running(step: Step) -> bool:
    """Whether ``cumsum`` is compiled: along a last axis whose elements lie side by side."""
    x, out = step.srcs[0], step.out
    if step.attrs["axis"] % len(x.shape) != len(x.shape) - 1 or x.shape[-1] < SHORTEST_ROW.value:
        return False
    return all(takes(arg, wide=True) and arg.strides[-1] == arg.dtype.itemsize for arg in (x, out))


def bind_running(stream: Stream, out: Arg, x: Arg) -> Call:
    """The call for the operands of a step that fits."""
    walk = walk_over(x.shape, [x.strides, out.strides], rows=True)
    key = len(walk.lengths), walk.operands([x, out])
    code = stream.artefact(("running sums", key), partial(_running, *key))
    return bind_walk(stream, code, walk, [x, out], work=4)


def _running(axes: int, operands: Sequence[Operand]) -> MachineCode:
    """The sums within vectors are added up in the type to compute in, those of all vectors before in f64."""
    writer = Writer(axes, operands)
    kind = compute_kind(operands[1].dtype)
    with writer.rows() as rows:
        before = writer.cell(writer.number(0.0, "f64"))

        def element(i: Any, mask: Any, _: int) -> None:
            sums = writer.running(writer.read(0, rows[0], i, mask))
            total = before.get()
            writer.write(1, rows[1], i, sums + total.to(kind), mask)
            before.set(total + writer.splat(writer.last(sums), kind).to("f64"))

        writer.elements(element)
    return MachineCode(writer.end())
