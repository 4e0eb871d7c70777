"""Kernels that compute element by element: one operation, or a chain of them, in one pass over its operands.

The source of such a kernel is generated. The operations themselves are macros for vectors of any type, in
``elementwise.cl activation.cl gated.cl rounding.cl selection.cl comparison.cl``. A program depends on operations and
types only, not on shapes, layouts and numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract import Arg, Call, Step
from opweave.graph.dtypes import DType
from opweave.graph.opdef import OPS
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.kernels.words import as_word
from opweave_opencl.layouts import Axes, element_offset, element_strides, nested, padded, padded_strides
from opweave_opencl.tuning import CHUNK, GROUPS, Tuning, processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = [
    "FORMULAS", "Formula", "Writer", "bind_pointwise", "formulas", "launch_pointwise", "spread", "walk_words", "window",
]  # fmt: skip


class Formula(NamedTuple):
    """How sources call an operation: ``op_<name>(type, values..., numbers...)``.

    Attributes:
        numbers: the attributes that it takes, in order.
        variant: the attribute whose value is the end of the name.
        of_source: whether the type is that of the sources, not that of the result.
    """

    numbers: tuple[str, ...] = ()
    variant: str = ""
    of_source: bool = False


FORMULAS: Final[dict[str, Formula]] = {}
"""What generated kernels compute, by operation."""


def formulas(*ops: str, dtypes: str = "", inplace: bool | None = None, **special: Formula) -> None:
    """Enter operations into both tables, of formulas and of kernels.

    Args:
        dtypes, inplace: the types, and whether the kernels work in place; by default as the definitions have it.
        special: operations whose formulas take more than the sources.
    """
    for op, formula in (dict.fromkeys(ops, Formula()) | special).items():
        FORMULAS[op] = formula
        writes_over = bool(OPS[op].inplace) if inplace is None else inplace
        KERNELS(op, dtypes=dtypes or OPS[op].dtypes, inplace=writes_over)(_single)


def _single(stream: OpenCLStream, op: str, out: Arg, *srcs: Arg, **attrs: Any) -> Call:
    return bind_pointwise(stream, [Step(op, out, srcs, attrs)])


def bind_pointwise(stream: OpenCLStream, steps: Sequence[Step]) -> Call:
    """The call for steps over one output shape, as `opweave.contract.pointwise_groups` gives them.

    Results without a buffer are used by later ones of the steps only, and stay in registers.
    """
    writer = Writer(shared=len(steps) > 1)
    for at, step in enumerate(steps):
        used = any(window(src) == window(step.out) for later in steps[at + 1 :] for src in later.srcs)
        writer.compute(step, rounded=used)
    return launch_pointwise(stream, writer, steps[0].out.shape)


def window(arg: Arg) -> Hashable:
    """A key that is equal for two operands of the same elements."""
    memory = arg.value if arg.buffer is None else (id(arg.buffer), arg.offset)
    return memory, arg.shape, arg.strides, arg.dtype.name


class Writer:
    """Writes the source of a kernel, and collects what it will be given.

    Args:
        shared: whether sources that show the same elements are one operand.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.operands: list[Arg] = []
        self.words: list[int] = []
        self._shared = shared
        self._values: dict[Hashable, str] = {}  # what an operand shows -> the variable that holds it
        self._helpers: dict[str, None] = {}
        self._parameters: list[str] = []
        self._body: list[str] = []
        self._stores: list[str] = []

    def compute(self, step: Step, *, rounded: bool = False) -> None:
        """Add a step.

        Args:
            rounded: whether its result is used by later steps.
        """
        values = [self._value(src) for src in step.srcs]
        self.put(self.let(step.out.dtype, self._call(step, values, rounded)), step.out)

    def put(self, value: str, out: Arg) -> None:
        """Take a variable as the value of an operand, and store it if the operand has memory."""
        self._values[window(out)] = value
        if out.buffer is not None:
            number = self._add_operand(out, const=False)
            self._stores.append(f"put_{out.dtype}({value}, row{number}, i, p.stride[{number}][0], count);")

    def number(self, value: float, dtype: DType) -> str:
        """A new variable, all of whose elements are a number that is a parameter, not a part of the source."""
        return self.let(dtype, f"(V({dtype}))({self.scalar(value, dtype)})")

    def scalar(self, value: float, dtype: DType) -> str:
        """An expression for one such number."""
        self.words.append(as_word(value, dtype))
        return f"SCALAR({dtype}, p.numbers[{len(self.words) - 1}])"

    def let(self, dtype: DType, value: str) -> str:
        """A new variable."""
        name = f"v{len(self._body)}"
        self._body.append(f"const V({dtype}) {name} = {value};")
        return name

    def helper(self, line: str) -> None:
        """A line before the kernel, once."""
        self._helpers[line] = None

    def source(self) -> str:
        """The whole text."""
        count = len(self.operands)
        numbers = f" long numbers[{len(self.words)}];" if self.words else ""
        rows = [f"{self._parameters[k]}row{k} = m{k} + ROW_OF({k}, plane, j);" for k in range(count)]
        return "\n".join(
            [
                '#include "pointwise.cl"',
                *self._helpers,
                f"typedef struct {{ WALK({count}){numbers} }} Params;",
                "__kernel UNVECTORIZED void pointwise(",
                *[f"    {parameter}m{k}," for k, parameter in enumerate(self._parameters)],
                "    const Params p)",
                "{",
                "    FOR_PLANES(plane) FOR_ROWS(j) {",
                *[f"        {row}" for row in rows],
                "        FOR_VECTORS(i) {",
                "            const int count = COUNT(i);",
                *[f"            {line}" for line in (*self._body, *self._stores)],
                "        }",
                "    }",
                "}",
            ]
        )

    def _call(self, step: Step, values: list[str], rounded: bool) -> str:
        dtype = step.out.dtype
        if step.op == "cast":
            source, (value,) = step.srcs[0].dtype, values
            if dtype.kind == "b":
                return f"op_truth({source}, {value})"
            if source.is_float and dtype.is_integer and dtype.itemsize < 4:  # which wraps around what does not fit
                value = f"TON(i32, VEC, {value})"
            converted = f"op_cast({source}, {dtype}, {value})"
            return f"ROUNDN({dtype}, VEC, {converted})" if rounded and dtype.is_half else converted
        formula = FORMULAS[step.op]
        if step.op == "pow" and dtype.is_integer:
            self.helper(f"WHOLE_POWER({dtype})")
        variant = f"_{step.attrs[formula.variant]}" if formula.variant else ""
        given = [step.attrs[name] for name in formula.numbers]
        if step.op == "clamp" and dtype.is_half:  # they are results, which later steps see rounded
            given = [float(np.asarray(value).astype(dtype.numpy)) for value in given]
        numbers = [self.number(value, dtype) for value in given]
        typed = step.srcs[0].dtype if formula.of_source else dtype
        return f"op_{step.op}{variant}({', '.join([typed.name, *values, *numbers])})"

    def _value(self, arg: Arg) -> str:
        known = self._values.get(window(arg))
        if known is None:
            number = self._add_operand(arg, const=True)
            known = self.let(arg.dtype, f"take_{arg.dtype}(row{number}, i, p.stride[{number}][0], count)")
            if self._shared:
                self._values[window(arg)] = known
        return known

    def _add_operand(self, arg: Arg, *, const: bool) -> int:
        self.operands.append(arg)
        self.helper(f"ACCESS({arg.dtype})")
        self._parameters.append(f"__global {'const ' if const else ''}MEM({arg.dtype}) *")
        return len(self.operands) - 1


# --- launching ------------------------------------------------------------------------------------------------------


def launch_pointwise(stream: OpenCLStream, writer: Writer, shape: Axes) -> Call:
    """The call of a written kernel over ``shape``."""
    words, size, group = walk_words(stream.target.tuning, writer.operands, shape)
    program = stream.target.programs.generated(writer.source(), {"VEC": str(stream.target.tuning.vector)})
    return stream.launch(program, "pointwise", size, group, writer.operands, words + writer.words)


Size = tuple[int, int, int]


def walk_words(tuning: Tuning, operands: Sequence[Arg], shape: Axes | None = None) -> tuple[list[int], Size, Size]:
    """The words of ``WALK`` over operands, of the last one's shape by default; work-items, and the size of a group."""
    strides = [element_strides(arg) for arg in operands]
    lengths, steps = nested(operands[-1].shape if shape is None else shape, strides, tuning.vector)
    size, chunk, group = divided(lengths, steps, tuning)
    words = [len(lengths), prod(lengths[2:]), *chunk, *padded(lengths, 1), *map(element_offset, operands)]
    words += padded_strides(steps)
    return words, size, group


def divided(lengths: Axes, steps: Sequence[Axes], tuning: Tuning) -> tuple[Size, tuple[int, int], Size]:
    """How a walk is divided: work-items, elements of the first two axes for each, and the size of a group."""
    first, second, planes = lengths[0], lengths[1], prod(lengths[2:])
    if tuning.row_group > 1:
        chunk = tuning.vector, -(-second // GROUPS.value)
        size = -(-first // chunk[0]), -(-second // chunk[1]), min(planes, GROUPS.value)
        return size, chunk, spread(size, tuning.group)[1]
    # A core walks a chunk: not so small that starting it counts, not so large that cores have nothing to do.
    area = min(CHUNK.value, max(CHUNK.value // 8, 2 * first * second * planes // tuning.wanted, 1))
    even = all(own[0] in (0, 1) for own in steps)
    width = min(first, area if even else TILE.value)
    width = -(-width // tuning.vector) * tuning.vector
    height = min(second, max(area // width, 1))
    depth = max(area // (width * height), 1)
    return (-(-first // width), -(-second // height), -(-planes // depth)), (width, height), (1, 1, 1)


TILE: Final = processor_limit("strided_tile", 256, 1, 1 << 12)
"""Elements of a strided walk, whose neighbours in the next row lie in the same cache lines."""


def spread(size: Size, limit: int) -> tuple[Size, Size]:
    """A range of work-items with a group for it: along the first axis, then the second, never much more than needed.

    Lengths are powers of eight, so that drivers which compile for each group size do so rarely.
    """
    first = _power_of_eight(size[0], limit)
    return size, (first, _power_of_eight(size[1], limit // first), 1)


def _power_of_eight(n: int, limit: int) -> int:
    length = 1
    while length * 8 <= min(n, limit):
        length *= 8
    return length
