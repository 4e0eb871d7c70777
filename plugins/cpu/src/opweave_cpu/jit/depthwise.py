"""Depthwise convolutions of one and two axes: 16 results of a row at a time, each the sum over the kernel's elements of
their products with what they cover. Elements outside of the input are not read."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from llvmlite import ir

from opweave.contract import Arg, Call, Step, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import LANES, Vector, fma, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk
from opweave_cpu.jit.writer import Writer, compute_kind, takes
from opweave_cpu.tunables import limit

__all__ = ["bind_depthwise", "fits"]

MOST_ELEMENTS: Final = limit("depthwise_elements", 49, 1, 121)
"""Elements of a kernel at most: the function has code for each of them."""

_I64: Final = ir.IntType(64)


def fits(step: Step) -> bool:
    """Whether a depthwise convolution is compiled."""
    args = step.out, *step.srcs
    kernel = step.srcs[1].shape[2:]
    small = len(kernel) <= 2 and _elements(kernel) <= MOST_ELEMENTS.value
    return small and all(arg.dtype is step.out.dtype and arg.is_dense and takes(arg, wide=True) for arg in args)


def _elements(kernel: tuple[int, ...]) -> int:
    return kernel[0] * kernel[-1] if len(kernel) > 1 else kernel[0]


def bind_depthwise(
    stream: Stream,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None,
    *,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
) -> Call:
    """The call for the operands of a step that fits. A convolution of one axis is one of images of one row."""
    item, flat = x.dtype.itemsize, (1,) * (2 - len(stride))
    (images, channels), (height, width) = x.shape[:2], (*flat, *x.shape[2:])
    (rows, columns), (kernel_rows, kernel_columns) = (*flat, *out.shape[2:]), (*flat, *w.shape[2:])
    down, along = (*flat, *stride)
    rows_apart, columns_apart = (*flat, *dilation)
    before = (*(0 for _ in flat), *(pads[0] for pads in padding))
    copies, elements, results = w.shape[0] // channels, kernel_rows * kernel_columns, rows * columns
    # The axes: channels, images, the results of a channel, rows, rows of the kernel, its columns, and columns.
    lengths = channels, images, copies, rows, kernel_rows, kernel_columns, columns
    strides = [
        (height * width, channels * height * width, 0, down * width, rows_apart * width, columns_apart, along),
        (copies * elements, 0, elements, 0, kernel_columns, 1, 0),
        *[(copies, 0, 1, 0, 0, 0, 0) for _ in ([] if b is None else [b])],
        (copies * results, channels * copies * results, results, columns, 0, 0, 1),
    ]
    walk = Walk(lengths, tuple([tuple([n * item for n in own]) for own in strides]), 1)
    key = x.dtype.name, item, kernel_rows, kernel_columns, along == 1, b is not None
    code = stream.artefact(("depthwise", key), partial(_compiled, *key))
    args = [x, w, *([] if b is None else [b]), out]
    numbers = height, width, *before, down, rows_apart, along, columns_apart
    return bind_walk(stream, code, walk, args, numbers, work=2)


def _compiled(dtype: str, item: int, kernel_rows: int, kernel_columns: int, dense: bool, biased: bool) -> MachineCode:
    one, some = Operand(dtype, 0), Operand(dtype, item)
    writer = Writer(7, [some if dense else Operand(dtype, -1), one, *[one] * biased, some])
    code, out = writer.code, 2 + biased
    channels, images, copies, rows, _, _, columns = writer.lengths
    numbers = [writer.integer() for _ in range(8)]
    height, width, above, left, down, rows_apart, along, columns_apart = numbers
    lanes = Vector(code, ir.Constant(vector_type("i64"), list(range(LANES))), "i64")
    elements = [(r, k) for r in range(kernel_rows) for k in range(kernel_columns)]

    def within(places: Vector, limit: Any) -> Any:
        """Which numbers are in ``0 .. limit - 1``: compared as unsigned ones, negative numbers are large."""
        return code.icmp_unsigned("<", places.value, writer.splat(limit, "i64").value)

    def filtered(c: Any, n: Any, m: Any, first: Any) -> None:
        """16 columns of the results, in all rows."""
        stored = within(lanes, code.sub(columns, first))
        filters = [writer.read(1, writer.at(1, c, n, m, _I64(0), _I64(r), _I64(k)), 0) for r, k in elements]
        start = writer.read(2, writer.at(2, c, n, m), 0) if biased else writer.number(0.0, compute_kind(dtype))
        begins = [
            code.sub(code.add(code.mul(first, along), code.mul(columns_apart, _I64(k))), left)
            for k in range(kernel_columns)
        ]
        masks = [
            code.and_(stored, within(lanes * writer.splat(along, "i64") + writer.splat(begin, "i64"), width))
            for begin in begins
        ]
        image = writer.at(0, c, n)
        with writer.loop(_I64(0), rows, 1) as row:
            total = writer.cell(start)
            for r in range(kernel_rows):
                source = code.sub(code.add(code.mul(row, down), code.mul(rows_apart, _I64(r))), above)
                with code.if_then(code.icmp_unsigned("<", source, height)):
                    line = code.add(image, code.mul(code.mul(source, width), _I64(item)))
                    for k, (begin, mask) in enumerate(zip(begins, masks, strict=True)):
                        value = writer.read(0, code.add(line, code.mul(begin, _I64(item))), _I64(0), mask)
                        total.set(fma(value, filters[r * kernel_columns + k], total.get()))
            writer.write(out, writer.at(out, c, n, m, row), first, total.get(), stored)

    with ExitStack() as stack:
        axes = [stack.enter_context(writer.loop(_I64(0), length, 1)) for length in (channels, images, copies)]
        axes.append(stack.enter_context(writer.loop(_I64(0), columns, LANES)))
        filtered(*axes)
    return MachineCode(writer.end())
