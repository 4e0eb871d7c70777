"""Convolutions."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.activation import activated
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.quantization import zeroed
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.operators.windows import Windows, read_windows
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

__all__ = ["convolved"]

CONVOLUTIONS = {1: ow.conv1d, 2: ow.conv2d, 3: ow.conv3d}
TRANSPOSED = {1: ow.conv_transpose1d, 2: ow.conv_transpose2d}


def convolved(x: Tensor, w: Tensor, bias: Tensor | None, windows: Windows, groups: int) -> Tensor:
    """A convolution of floats over one to three axes."""
    rank = x.ndim - 2
    if rank not in CONVOLUTIONS:
        raise ShapeError(f"convolutions over {rank} axes are not supported; {x.describe()}")
    padding: Any = windows.before
    if windows.before != windows.after:
        x, padding = windows.pad(x, 0.0), (0,) * rank
    return CONVOLUTIONS[rank](x, w, bias, windows.strides, padding, windows.dilations, groups)


@operator("Conv")
def _conv(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolved(x, w, bias, read_windows(call, x, w.shape[2:]), call.get("group", 1))


@operator("FusedConv", domain=MICROSOFT)
@composite
def _fused_conv(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None, more: Tensor | None = None) -> Tensor:
    y = _conv(call, x, w, bias)
    return activated(call, y if more is None else y + more, call.get("activation_params", ()))


@operator("ConvInteger")
def _conv_integer(
    call: Call, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    # In f64, which holds every sum of products of 8 bits exactly.
    a, b = zeroed(x, x_zero, 1).astype("f64"), zeroed(w, w_zero, 0).astype("f64")
    return convolved(a, b, None, read_windows(call, x, w.shape[2:]), call.get("group", 1)).astype("i32")


# --- transposed -----------------------------------------------------------------------------------------------------


@operator("ConvTranspose")
def _conv_transpose(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    rank, groups = x.ndim - 2, call.get("group", 1)
    kernel = w.shape[2:]
    if call.get("kernel_shape", kernel) != kernel:
        raise ShapeError(f"kernel_shape is {call.get('kernel_shape', kernel)}, and the weights have {kernel}")
    strides = call.get("strides", ()) or (1,) * rank
    dilations = call.get("dilations", ()) or (1,) * rank
    extra = call.get("output_padding", ()) or (0,) * rank
    pads = call.get("pads", ()) or (0,) * (2 * rank)
    full = [(n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(x.shape[2:], strides, dilations, kernel, strict=True)]  # fmt: skip
    shape = call.get("output_shape", ())
    before, after = list(pads[:rank]), list(pads[rank:])
    auto = call.get("auto_pad", "NOTSET")
    if shape or auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = shape[-rank:] if shape else [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        for i in range(rank):
            total = full[i] + extra[i] - wanted[i]
            small = max(total, 0) // 2
            large = max(total, 0) - small
            before[i], after[i] = (small, large) if auto == "SAME_UPPER" else (large, small)
            after[i] += min(total, 0)  # an output longer than all windows has zeros behind them
    elif auto == "VALID":
        before = after = [0] * rank
    y = _full_transpose(x, w, strides, dilations, groups)
    cut, fill = [slice(None)] * 2, [(0, 0)] * 2
    for n, a, b, e in zip(full, before, after, extra, strict=True):
        end = n - b + e
        cut.append(slice(max(a, 0), min(end, n)))
        fill.append((max(-a, 0), max(end - n, 0)))
    y = y[tuple(cut)]
    if any(a or b for a, b in fill):
        y = ow.pad(y, tuple(fill), "constant", 0.0)
    return y if bias is None else y + ow.reshape(bias, (-1, *[1] * rank))


def _full_transpose(x: Tensor, w: Tensor, strides: Any, dilations: Any, groups: int) -> Tensor:
    """The transposed convolution without padding."""
    rank = x.ndim - 2
    if rank in TRANSPOSED:
        return TRANSPOSED[rank](x, w, None, strides, 0, 0, groups, dilations)
    # Zeros between the elements, then a convolution with the flipped kernel.
    for axis, step in enumerate(strides, 2):
        if step > 1:
            n = x.shape[axis]
            wide = ow.pad(
                ow.expand_dims(x, axis + 1), [(0, step - 1) if i == axis + 1 else (0, 0) for i in range(x.ndim + 1)]
            )
            wide = ow.reshape(wide, (*x.shape[:axis], n * step, *x.shape[axis + 1 :]))
            x = wide[tuple([slice(0, (n - 1) * step + 1) if i == axis else slice(None) for i in range(x.ndim)])]
    inputs, outputs, kernel = w.shape[0], w.shape[1], w.shape[2:]
    v = ow.reshape(w, (groups, inputs // groups, outputs, *kernel))
    v = ow.reshape(ow.swapaxes(v, 1, 2), (groups * outputs, inputs // groups, *kernel))
    v = ow.flip(v, tuple(range(2, rank + 2)))
    padding = tuple([d * (k - 1) for k, d in zip(kernel, dilations, strict=True)])
    return CONVOLUTIONS[rank](x, v, None, 1, padding, dilations, groups)


# --- columns, and windows with offsets ------------------------------------------------------------------------------


@operator("Col2Im")
def _col2im(call: Call, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    """The sum of blocks, given as columns, at their places in an image."""
    size, kernel = call.integers(image), call.integers(block)
    rank = len(size)
    dilations, strides = call.get("dilations", ()) or (1,) * rank, call.get("strides", ()) or (1,) * rank
    pads = call.get("pads", ()) or (0,) * (2 * rank)
    before, after = pads[:rank], pads[rank:]
    # Padding of both sides that differs: the image with both is cut.
    whole = [n + a + b for n, a, b in zip(size, before, after, strict=True)]
    cut = [slice(a, a + n) for n, a in zip(size, before, strict=True)]
    y = ow.col2im(x, whole, kernel, dilations, 0, strides)[(slice(None), slice(None), *cut)]
    return ow.cast(y, x.dtype)


@host_operation("deform_conv")
def _deform_conv(
    x: Array, w: Array, offset: Array, bias: Array, mask: Array, *, strides: Any, dilations: Any, before: Any,
    groups: int, offset_groups: int,
) -> Array:  # fmt: skip
    """A convolution whose windows take their elements at positions moved by offsets, by bilinear interpolation."""
    n, channels, _height, _width = x.shape
    outputs, _, kh, kw = w.shape
    oh, ow_ = offset.shape[2:]
    moved = offset.reshape(n, offset_groups, kh, kw, 2, oh, ow_).astype(np.float64)
    weight = mask.reshape(n, offset_groups, kh, kw, oh, ow_).astype(np.float64)
    rows = (np.arange(oh) * strides[0] - before[0])[:, None] + np.zeros(ow_)
    columns = (np.arange(ow_) * strides[1] - before[1])[None, :] + np.zeros((oh, 1))
    columns_of = np.zeros((n, channels, kh, kw, oh, ow_))
    each = channels // offset_groups
    image = x.astype(np.float64)
    for batch in range(n):
        for channel in range(channels):
            group = channel // each
            for i in range(kh):
                for j in range(kw):
                    y = rows + i * dilations[0] + moved[batch, group, i, j, 0]
                    z = columns + j * dilations[1] + moved[batch, group, i, j, 1]
                    columns_of[batch, channel, i, j] = (
                        _bilinear(image[batch, channel], y, z) * weight[batch, group, i, j]
                    )
    parts = columns_of.reshape(n, groups, channels // groups * kh * kw, oh * ow_)
    kernels = w.reshape(groups, outputs // groups, -1).astype(np.float64)
    result = np.einsum("goc,ngcp->ngop", kernels, parts).reshape(n, outputs, oh, ow_)
    return np.asarray(result + bias.reshape(-1, 1, 1))


def _bilinear(image: Array, y: Array, x: Array) -> Array:
    """Values at places between the elements; outside of the image are zeros."""
    height, width = image.shape
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    result = np.zeros(y.shape)
    for i in (0, 1):
        for j in (0, 1):
            row, column = top + i, left + j
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            share = (1 - np.abs(y - row)) * (1 - np.abs(x - column))
            result += np.where(inside, share * image[np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)], 0)
    return result


@operator("DeformConv")
def _deform_conv_node(
    call: Call, x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    windows = read_windows(call, x, w.shape[2:])
    groups = call.get("offset_group", 1)
    if x.ndim != 4:
        raise ShapeError(f"DeformConv takes two spatial axes, not {x.describe()}")
    b = ow.full((w.shape[0],), 0.0, x.dtype) if bias is None else bias
    m = ow.full((x.shape[0], groups * prod(w.shape[2:]), *offset.shape[2:]), 1.0, x.dtype) if mask is None else mask
    return _deform_conv(x, w, offset, b, m, shape=(x.shape[0], w.shape[0], *offset.shape[2:]), dtype=x.dtype,
                        strides=windows.strides, dilations=windows.dilations, before=windows.before,
                        groups=call.get("group", 1), offset_groups=groups)  # fmt: skip
