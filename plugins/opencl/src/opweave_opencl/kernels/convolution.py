"""Convolutions as products with windows that are gathered while they are packed; depthwise ones, im2col and col2im
directly; transposed ones on processors as products whose results are added up where they overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.kernels import KernelTable, of_other_type
from opweave.contract.workspace import Arrays
from opweave.ops.convolution import window_places
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.products import Product, launch_product
from opweave_opencl.kernels.table import KERNELS, MOVABLE
from opweave_opencl.kernels.words import word
from opweave_opencl.layouts import coalesce, element_offset, element_strides, optional_strides
from opweave_opencl.tuning import processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["add_folds"]

FLOATS: Final = "f32 f16 bf16"
MOST_COLUMNS: Final = processor_limit("columns_bytes", 1 << 26, 1 << 10, 1 << 28)
"""The most bytes of columns of a transposed convolution; where all images have more, some are taken at a time."""

Lengths = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]


def _why_not(step: Step) -> str | None:
    return of_other_type(step, 1) or (None if step.out.is_dense else "the output is not dense")


@KERNELS("conv1d", "conv2d", "conv3d", dtypes=FLOATS, when=_why_not)
def conv(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    stride: Lengths,
    padding: Pads,
    dilation: Lengths,
    groups: int,
) -> Call:
    before = tuple([first for first, _ in padding])
    windows = _windows(x, w.shape[2:], out.shape[2:], stride, dilation, before)
    w_steps = element_strides(w)
    if w.shape[1] == 1:
        return _depthwise(stream, out, x, w, b, windows + _weight_steps(0, w_steps), out.shape[1] // groups)
    m = w.shape[0] // groups
    product = _product(out, x, w, b, groups, m, w_m=w_steps[0], w_group=w_steps[0] * m, w_k=_only_step(w, 1))
    once = {*w.shape[2:], *stride} == {1} and not any(map(sum, padding))
    positions = _only_step(x, 2)
    if once and positions:  # windows of one element, which lie in x as they are
        return launch_product(stream, replace(product, a_k=w_steps[1], b_k=element_strides(x)[1], b_n=positions))
    return launch_product(stream, _gathering(product, windows + _weight_steps(w_steps[1], w_steps)))


@KERNELS("conv_transpose1d", "conv_transpose2d", dtypes=FLOATS, when=_why_not)
def conv_transpose(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    stride: Lengths,
    padding: Lengths,
    output_padding: Lengths,
    groups: int,
    dilation: Lengths,
    columns: Arg | None = None,
) -> Call:
    windows = _transposed_windows(out, x, w, stride, padding, dilation)
    if columns is not None:
        return _by_columns(stream, out, x, w, b, groups, windows, columns)
    w_steps = element_strides(w)
    group = w_steps[0] * (x.shape[1] // groups)
    product = _product(out, x, w, b, groups, w.shape[1], w_m=w_steps[1], w_group=group, w_k=0)
    return launch_product(stream, _gathering(product, windows + _weight_steps(w_steps[0], w_steps)))


def add_folds(table: KernelTable) -> None:
    """Register transposed convolutions and col2im for a processor, in the table of the device.

    Where the stride is s, a window of the output reads elements of x at one of s positions along each axis, and zeros
    elsewhere. Products with windows multiply these zeros, too. Here a product of the weights with x gives the columns,
    which have no zeros, and each number in them is added where it belongs.
    """
    table("conv_transpose1d", "conv_transpose2d", layout="dense", when=_columns_why_not, workspace=_columns)(
        conv_transpose
    )
    table("col2im", layout="dense")(folded_columns)


def _columns_of_image(out: Arg, x: Arg, w: Arg) -> int:
    """Numbers that the columns of one image have."""
    return out.shape[1] * prod(w.shape[2:]) * prod(x.shape[2:])


def _columns_why_not(step: Step) -> str | None:
    most = MOST_COLUMNS.value // 4
    return (
        f"the columns of an image have more than {most:,} numbers"
        if _columns_of_image(step.out, *step.srcs[:2]) > most
        else None
    )


def _columns(step: Step) -> Arrays:
    x, w = step.srcs[:2]
    image = _columns_of_image(step.out, x, w)
    return {"columns": ("f32", (min(x.shape[0], MOST_COLUMNS.value // 4 // image), image))}


def _by_columns(
    stream: OpenCLStream, out: Arg, x: Arg, w: Arg, b: Arg | None, groups: int, windows: Lengths, columns: Arg
) -> Call:
    """A transposed convolution: products write ``columns``, of as many images as fit, which are then added up."""
    images, inputs = x.shape[:2]
    deep, rows, elements = inputs // groups, out.shape[1] // groups * prod(w.shape[2:]), prod(x.shape[2:])
    calls: list[Call] = []
    for first in range(0, images, columns.shape[0]):
        count = min(columns.shape[0], images - first)
        given = Arg(x.buffer, x.offset + 4 * first * inputs * elements, x.dtype, (count, *x.shape[1:]), x.strides)
        product = Product(
            *(columns, w, given, None),
            m=rows,
            n=elements,
            k=deep,
            out_m=elements,
            out_n=1,
            a_m=1,
            a_k=rows,
            b_k=elements,
            b_n=1,
            batch=(groups, count),
            steps=((rows * elements, columns.shape[1]), (deep * rows, 0), (deep * elements, inputs * elements)),
        )
        calls.append(launch_product(stream, product))
        size = out.shape[1:]
        given = Arg(out.buffer, out.offset + 4 * first * prod(size), out.dtype, (count, *size), out.strides)
        calls.append(_fold(stream, given, columns, windows, b))
    return in_order(calls)


def _fold(stream: OpenCLStream, out: Arg, columns: Arg, windows: Lengths, bias: Arg | None = None) -> Call:
    """Add columns up, each number at the position where its tap meets its element."""
    words = [out.shape[1], out.shape[0], int(bias is not None), element_offset(out), element_offset(columns)]
    words += [element_offset(bias) if bias else 0, *windows, 0, 0, 0, 0]
    program = stream.target.programs.get("convolution", {"FOLD": "1", "T": "f32"})
    size = (min(prod(out.shape[:-1]), stream.target.tuning.most_groups),)
    return stream.launch(program, "fold", size, (1,), (out, columns, bias or out), words)


@KERNELS("im2col", dtypes=MOVABLE)
def im2col(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    kernel_size: Lengths,
    dilation: Lengths,
    padding: Lengths,
    stride: Lengths,
) -> Call:
    positions = window_places(x.shape[2:], kernel_size, dilation, padding, stride)
    windows = _windows(x, kernel_size, positions, stride, dilation, padding)
    image, row, column = element_strides(out)
    images, rows, columns = out.shape
    words = [rows, row, column, images, image, element_strides(x)[0], element_offset(out), element_offset(x)]
    words += (*windows, 0, 0, 0, 0)
    tuning = stream.target.tuning
    lines = tuning.row_group == 1
    size, group = spread((columns, rows, images), tuning.group)
    if lines:
        size, group = (min(rows * images, tuning.most_groups), 1, 1), (1, 1, 1)
    macros = {"COLUMNS_OF": "1", "LINES": str(int(lines)), "T": word(x.dtype.itemsize)}
    program = stream.target.programs.get("convolution", macros)
    return stream.launch(program, "columns", size, group, (out, x), words)


@KERNELS("col2im", dtypes=FLOATS)
def col2im(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    size: Lengths,
    kernel_size: Lengths,
    dilation: Lengths,
    padding: Lengths,
    stride: Lengths,
) -> Call:
    """Each element gathers from the windows in which it lies."""
    windows = (*_column_windows(size, kernel_size, dilation, padding, stride), 0, 0, 0, 0)
    words = [*element_strides(x), element_offset(x), *windows]
    return _sums(stream, {"SUMS_OF": "1", "T": out.dtype.name}, (out, x), words)


def folded_columns(stream: OpenCLStream, op: str, out: Arg, x: Arg, **given: Lengths) -> Call:
    """`col2im`, line by line."""
    return _fold(stream, out, x, _column_windows(**given))


# --- shared ---------------------------------------------------------------------------------------


def _windows(
    x: Arg,
    kernel: Lengths,
    positions: Lengths,
    stride: Lengths,
    dilation: Lengths,
    before: Lengths,
    apart: Lengths | None = None,
) -> Lengths:
    """The struct ``Windows`` but for the weights: every length and step along three axes."""
    steps = element_strides(x)
    geometry = _geometry(kernel, positions, x.shape[2:], stride, dilation, before, apart or (1,) * len(kernel))
    return (*geometry, steps[1], *_three(steps[2:], 0))


def _geometry(*values: Lengths) -> Lengths:
    """The beginning of ``Windows``: kernel size, positions, lengths, stride, dilation, before and spread."""
    missing = (1, 1, 1, 1, 1, 0, 1)
    return tuple([n for each, none in zip(values, missing, strict=True) for n in _three(each, none)])


def _transposed_windows(out: Arg, x: Arg, w: Arg, stride: Lengths, padding: Lengths, dilation: Lengths) -> Lengths:
    """`_windows` of a transposed convolution: element i of x meets position j with tap k where
    stride · i = j + padding - dilation · k."""
    one = (1,) * len(stride)
    backwards, before = tuple([-d for d in dilation]), tuple([-p for p in padding])
    return _windows(x, w.shape[2:], out.shape[2:], one, backwards, before, stride)


def _column_windows(
    size: Lengths, kernel_size: Lengths, dilation: Lengths, padding: Lengths, stride: Lengths
) -> Lengths:
    """Of columns that are added up: element j meets tap k of the window at i, where
    stride · i = j + padding - dilation · k, as in a transposed convolution."""
    places = window_places(size, kernel_size, dilation, padding, stride)
    backwards, before = tuple([-d for d in dilation]), tuple([-p for p in padding])
    return (*_geometry(kernel_size, size, places, (1,) * len(size), backwards, before, stride), 0, 0, 0, 0)


def _weight_steps(channel: int, steps: Lengths) -> Lengths:
    return (channel, *_three(steps[2:], 0))


def _three(values: Lengths, none: int) -> Lengths:
    return (*(none,) * (3 - len(values)), *values)


def _only_step(x: Arg, axis: int) -> int:
    """The step of the axes from ``axis`` on, merged into one, or 0 where they cannot be merged."""
    lengths, (steps,) = coalesce(x.shape[axis:], [element_strides(x)[axis:]])
    return steps[0] if len(lengths) == 1 else 0


def _product(
    out: Arg, x: Arg, w: Arg, b: Arg | None, groups: int, m: int, *, w_m: int, w_group: int, w_k: int
) -> Product:
    """The product of the weights of each group with each image's windows."""
    o_steps, x_steps = element_strides(out), element_strides(x)
    bias = optional_strides(b, 1)[0]
    positions = prod(out.shape[2:])
    taps = prod(w.shape[2:]) * (x.shape[1] // groups)
    return Product(
        *(out, w, x, b),
        m=m,
        n=positions,
        k=taps,
        out_m=o_steps[1],
        out_n=1,
        a_m=w_m,
        a_k=w_k,
        b_k=0,
        b_n=0,
        bias_m=bias,
        batch=(groups, x.shape[0]),
        steps=(
            (o_steps[1] * m, o_steps[0]),
            (w_group, 0),
            (x_steps[1] * (x.shape[1] // groups), x_steps[0]),
            (bias * m, 0),
        ),
    )


def _gathering(product: Product, windows: Lengths) -> Product:
    """The product whose b are windows; where the weights' elements do not follow evenly, they are gathered too."""
    return replace(product, macros={"CONVOLUTION": "1", "EVEN": str(int(product.a_k != 0))}, extra=windows)


def _depthwise(stream: OpenCLStream, out: Arg, x: Arg, w: Arg, b: Arg | None, windows: Lengths, each: int) -> Call:
    operands = (out, x, w, out if b is None else b)
    words = [each, element_strides(x)[0], element_strides(w)[0], optional_strides(b, 1)[0], int(b is not None)]
    words += [*map(element_offset, operands[1:]), *windows]
    return _sums(stream, {"DEPTHWISE": "1", "T": x.dtype.name, "BIAS": (b or x).dtype.name}, operands, words)


def _sums(stream: OpenCLStream, macros: dict[str, str], operands: Sequence[Arg], words: Sequence[int]) -> Call:
    """The call of the kernel with a work-item for each element of the first operand, the output."""
    out = operands[0]
    steps, positions = element_strides(out), _three(out.shape[2:], 1)
    head = [out.shape[1], *steps[:2], *_three(steps[2:], 0), element_offset(out)]
    shape = (positions[2], positions[0] * positions[1], out.shape[0] * out.shape[1])
    size, group = spread(shape, stream.target.tuning.group)
    program = stream.target.programs.get("convolution", macros)
    return stream.launch(program, "sums", size, group, operands, [*head, *words])
