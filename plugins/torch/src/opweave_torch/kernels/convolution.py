"""Convolutions by torch's libraries; those with kernels of one element as products, which write into the output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import f32
from opweave.ops.convolution import window_places
from opweave.ops.windows import fitting, overlap
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, widened
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import reshaped, tensor
from opweave_torch.native import convolution

Pads = Sequence[tuple[int, int]]


def _padded_array(x: Arg, padding: Pads) -> Arrays:
    """Workspace of `_padded`."""
    return {"padded": (x.dtype, (*x.shape[:2], *[n + a + b for n, (a, b) in zip(x.shape[2:], padding, strict=True)]))}


def _padded(x: Arg, padding: Pads, padded: Arg) -> tuple[Tensor, list[Call]]:
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
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, padded: Arg | None = None, **attrs: Any
) -> Call:
    stride, padding, groups = attrs["stride"], attrs["padding"], attrs["groups"]
    if groups == 1 and prod(w.shape[2:]) == 1 and max(stride) == 1 and not any(map(any, padding)):
        product = _product_of_points(out, x, w, b)
        if product is not None:
            return product
    source, pads = tensor(x), [before for before, _ in padding]
    calls: list[Call] = []
    if padded is not None:
        source, calls = _padded(x, padding, padded)
        pads = [0] * len(pads)
    geometry = (stride, pads, attrs["dilation"], False, [0] * len(pads), groups)
    operands = [source, *[tensor(arg) for arg in (w, b) if arg is not None]]
    return in_order([*calls, _library_call(tensor(out), operands, geometry)])


def _library_call(out: Tensor, operands: Sequence[Tensor], geometry: tuple[Any, ...]) -> Call:
    """torch's own convolution, which has no ``out=``."""
    x, weight, bias = (*operands, None)[:3]
    convolve = convolution(x, weight, bias, geometry)
    return lambda: out.copy_(convolve())


def _product_of_points(out: Arg, x: Arg, w: Arg, b: Arg | None) -> Call | None:
    """The call for kernels of one element: each point's channels multiplied by the weights, if they lie as a matrix."""
    source, target = [reshaped(arg, (*arg.shape[:2], prod(arg.shape[2:]))) for arg in (x, out)]
    if source is None or target is None or not w.is_dense:
        return None
    weights, bias = tensor(w).view(w.shape[:2]), [] if b is None else [tensor(b).unsqueeze(1)]
    if len(source) == 1:
        return partial(torch.addmm if bias else torch.mm, *bias, weights, source[0], out=target[0])
    many = weights.expand(len(source), *weights.shape)
    return partial(torch.baddbmm if bias else torch.bmm, *bias, many, source, out=target)


# --- transposed convolution -----------------------------------------------------------------------------------------


def _transpose_arrays(step: Step) -> Arrays:
    """Half types compute in f32: on processors without arithmetic for them torch adds up rounded products."""
    return conversion_arrays(widened(step.out.dtype), step.srcs)


@KERNELS(
    "conv_transpose1d", "conv_transpose2d", when=lambda step: of_other_type(step, 1, 2), workspace=_transpose_arrays
)
def conv_transpose(stream: Stream, op: str, out: Arg, *srcs: Arg, **given: Any) -> Call:
    operands = [tensor(src) for src in srcs]
    calls: list[Call] = []
    if operands[0].device.type == "cpu":
        operands, calls = converted(widened(out.dtype), srcs, given)
    geometry = (*[given[n] for n in ("stride", "padding", "dilation")], True, given["output_padding"], given["groups"])
    return in_order([*calls, _library_call(tensor(out), operands, geometry)])


# --- columns --------------------------------------------------------------------------------------------------------


def _pairs(padding: Sequence[int]) -> Pads:
    return [(n, n) for n in padding]


def _im2col_arrays(step: Step) -> Arrays:
    padding = step.attrs["padding"]
    return _padded_array(step.srcs[0], _pairs(padding)) if any(padding) else {}


@KERNELS("im2col", dtypes=PLAIN, workspace=_im2col_arrays)
def im2col(stream: Stream, op: str, out: Arg, x: Arg, *, padded: Arg | None = None, **attrs: Any) -> Call:
    source = tensor(x)
    calls: list[Call] = []
    if padded is not None:
        source, calls = _padded(x, _pairs(attrs["padding"]), padded)
    kernel_size, stride, dilation = attrs["kernel_size"], attrs["stride"], attrs["dilation"]
    counts = tuple(map(fitting, source.shape[2:], kernel_size, stride, dilation))
    steps = source.stride()
    within, across = [[s * d for s, d in zip(steps[2:], by, strict=True)] for by in (dilation, stride)]
    windows = source.as_strided((*x.shape[:2], *kernel_size, *counts), (*steps[:2], *within, *across))
    target = tensor(out).unflatten(2, counts).unflatten(1, (x.shape[1], *kernel_size))
    return in_order([*calls, partial(target.copy_, windows)])


def _sums(step: Step) -> Arrays:
    return {"sums": (f32, step.out.shape)} if step.out.dtype.is_half else {}


@KERNELS("col2im", workspace=_sums)
def col2im(stream: Stream, op: str, out: Arg, x: Arg, *, sums: Arg | None = None, **attrs: Any) -> Call:
    """For each element of the kernel one pass over all windows in which it lies inside of the result."""
    places = window_places(attrs.pop("size"), **attrs)
    total = tensor(out if sums is None else sums)
    columns = tensor(x).unflatten(2, places).unflatten(1, (out.shape[1], -1))
    calls: list[Call] = [total.zero_]
    sizes = [attrs[name] for name in ("kernel_size", "stride", "padding", "dilation")]
    axes = [
        [overlap(m, n, s, k * d - p) for k in range(size)]
        for m, n, size, s, p, d in zip(places, out.shape[2:], *sizes, strict=True)
    ]
    for i, taps in enumerate(product(*axes)):
        part = total[(..., *[of for _, of in taps])]
        if part.numel():
            calls.append(partial(part.add_, columns[(slice(None), slice(None), i, *[to for to, _ in taps])]))
    if sums is not None:
        calls.append(partial(tensor(out).copy_, total))
    return in_order(calls)
