"""Convolutions by torch's libraries; those with kernels of one element as products, which write into the output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.contract.workspace import Arrays
from opweave.graph.layout import reshape_strides
from opweave.ops.windows import fitting
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, widened
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import tensor
from opweave_torch.native import convolve

Pads = Sequence[tuple[int, int]]


def _padded_array(x: Arg, padding: Pads) -> Arrays:
    """Workspace of `_padded`."""
    return {"padded": (x.dtype, (*x.shape[:2], *[n + a + b for n, (a, b) in zip(x.shape[2:], padding, strict=True)]))}


def _padded(x: Arg, padding: Pads, padded: Arg) -> tuple[torch.Tensor, list[Call]]:
    """The operand with zeros around it, and the calls that copy it there."""
    whole = tensor(padded)
    inner = [slice(a, a + n) for n, (a, _) in zip(x.shape[2:], padding, strict=True)]
    return whole, [whole.zero_, partial(whole[(..., *inner)].copy_, tensor(x))]


# --- convolution ----------------------------------------------------------------------------------------------------


def _conv_arrays(step: Step) -> Arrays:
    """torch pads both ends of an axis alike; operands that are padded otherwise are copied."""
    padding = step.attrs["padding"]
    return _padded_array(step.srcs[0], padding) if any(before != after for before, after in padding) else {}


@KERNELS("conv1d", "conv2d", "conv3d", when=lambda step: of_other_type(step, 1, 2), workspace=_conv_arrays)
def conv(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    stride: tuple[int, ...],
    padding: Pads,
    dilation: tuple[int, ...],
    groups: int,
    padded: Arg | None = None,
) -> Call:
    if groups == 1 and prod(w.shape[2:]) == 1 and max(stride) == 1 and not any(map(any, padding)):
        product = _product_of_points(out, x, w, b)
        if product is not None:
            return product
    source, pads = tensor(x), [before for before, _ in padding]
    calls: list[Call] = []
    if padded is not None:
        source, calls = _padded(x, padding, padded)
        pads = [0] * len(pads)
    geometry = (stride, pads, dilation, False, [0] * len(pads), groups)
    operands = [source, *[tensor(arg) for arg in (w, b) if arg is not None]]
    return in_order([*calls, _library_call(tensor(out), operands, geometry)])


def _library_call(out: torch.Tensor, operands: Sequence[torch.Tensor], geometry: tuple[Any, ...]) -> Call:
    """torch's own convolution, which has no ``out=``."""
    x, weight, bias = (*operands, None)[:3]
    return lambda: out.copy_(convolve(x, weight, bias, geometry))


def _product_of_points(out: Arg, x: Arg, w: Arg, b: Arg | None) -> Call | None:
    """The call for kernels of one element: each point's channels multiplied by the weights, if they lie as a matrix."""
    points = [_as_points(arg) for arg in (x, out)]
    if points[0] is None or points[1] is None:
        return None
    source, target = points[0], points[1]
    weights = tensor(w).view(w.shape[:2]) if w.is_dense else None
    if weights is None:
        return None
    if len(source) == 1:
        if b is None:
            return partial(torch.mm, weights, source[0], out=target[0])
        return partial(torch.addmm, tensor(b).unsqueeze(1), weights, source[0], out=target[0])
    many = weights.expand(len(source), *weights.shape)
    if b is None:
        return partial(torch.bmm, many, source, out=target)
    return partial(torch.baddbmm, tensor(b).unsqueeze(1), many, source, out=target)


def _as_points(arg: Arg) -> torch.Tensor | None:
    """The operand with one axis behind those of batch and channels, if that needs no copy."""
    shape = (*arg.shape[:2], prod(arg.shape[2:]))
    strides = reshape_strides(arg.shape, arg.strides, shape, arg.dtype)
    return None if strides is None else tensor(Arg(arg.buffer, arg.offset, arg.dtype, shape, strides))


# --- transposed convolution -----------------------------------------------------------------------------------------


def _transpose_arrays(step: Step) -> Arrays:
    """Half types compute in f32: on processors without arithmetic for them torch adds up rounded products."""
    return conversion_arrays(widened(step.out.dtype), step.srcs)


@KERNELS(
    "conv_transpose1d", "conv_transpose2d", when=lambda step: of_other_type(step, 1, 2), workspace=_transpose_arrays
)
def conv_transpose(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    groups: int,
    dilation: tuple[int, ...],
    **arrays: Arg,
) -> Call:
    args = [x, w] if b is None else [x, w, b]
    on_cpu = tensor(out).device.type == "cpu"
    operands, calls = converted(widened(out.dtype), args, arrays) if on_cpu else ([tensor(arg) for arg in args], [])
    geometry = (stride, padding, dilation, True, output_padding, groups)
    return in_order([*calls, _library_call(tensor(out), operands, geometry)])


# --- columns --------------------------------------------------------------------------------------------------------


def _pairs(padding: Sequence[int]) -> Pads:
    return [(n, n) for n in padding]


def _im2col_arrays(step: Step) -> Arrays:
    padding = step.attrs["padding"]
    return _padded_array(step.srcs[0], _pairs(padding)) if any(padding) else {}


@KERNELS("im2col", dtypes=PLAIN, workspace=_im2col_arrays)
def im2col(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
    padded: Arg | None = None,
) -> Call:
    source = tensor(x)
    calls: list[Call] = []
    if padded is not None:
        source, calls = _padded(x, _pairs(padding), padded)
    counts = tuple(map(fitting, source.shape[2:], kernel_size, stride, dilation))
    steps = source.stride()
    windows = source.as_strided(
        (*x.shape[:2], *kernel_size, *counts),
        (
            *steps[:2],
            *[s * d for s, d in zip(steps[2:], dilation, strict=True)],
            *[s * d for s, d in zip(steps[2:], stride, strict=True)],
        ),
    )
    target = tensor(out).unflatten(2, counts).unflatten(1, (x.shape[1], *kernel_size))
    return in_order([*calls, partial(target.copy_, windows)])
