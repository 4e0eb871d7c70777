"""Convolutions, transposed ones, and the columns that turn a convolution into a product of matrices.

As everywhere in machine learning it is a correlation: kernels are not flipped. Dumoulin and Visin, "A guide to
convolution arithmetic for deep learning", 2016, draws stride, padding and dilation of all forms.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any, Final, Literal

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import Infer, OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, builds, check_shape_of, floating, floats, make, misfit, unquantized, wide
from opweave.ops.samples import measured, operand
from opweave.ops.windows import as_lengths, batched, fitting, sum_of_windows, unpadded, window_attrs, windows_of

__all__ = ["col2im", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "im2col"]

Padding = int | tuple[int, ...] | Literal["valid", "same"]
Pads = tuple[tuple[int, int], ...]
"""Zeros before and after each axis."""


def _with_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + wide(bias).reshape(-1, *[1] * (y.ndim - 2))


# --- convolution ----------------------------------------------------------------------------------------------------


def _conv_infer(op: str, rank: int) -> Infer:
    def infer(
        x: Tensor, w: Tensor, b: Tensor | None = None, *, stride: Shape, padding: Pads, dilation: Shape, groups: int
    ) -> tuple[Shape, DType]:
        if x.ndim != rank + 2 or w.ndim != rank + 2:
            shapes = "x (batch, in, ...) and weights (out, in / groups, ...)"
            raise misfit(op, f"{shapes}, {rank} axes behind those of the channels", x, w)
        if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups or not w.shape[0]:
            raise ShapeError(
                f"{op}: {groups} groups do not divide the channels: needs x (batch, in, ...) and weights "
                f"(out, in / groups, ...), not {x.describe()} and {w.describe()}"
            )
        check_shape_of(op, "the bias", b, w.shape[:1], "one number a channel")
        lengths = [n + sum(pads) for n, pads in zip(x.shape[2:], padding, strict=True)]
        places = tuple(map(fitting, lengths, w.shape[2:], stride, dilation))
        if min(places) < 1 or min(w.shape[2:]) < 1:
            raise ShapeError(f"{op}: no window fits: {x.describe()} with padding {padding}, weights {w.describe()}")
        return (x.shape[0], w.shape[0], *places), x.dtype

    return infer


def _conv(
    x: Array, w: Array, b: Array | None = None, *, stride: Shape, padding: Pads, dilation: Shape, groups: int
) -> Array:
    kernel = w.shape[2:]
    rank = len(kernel)
    views = windows_of(np.pad(wide(x), ((0, 0), (0, 0), *padding)), kernel, stride, dilation)
    inputs, outputs = x.shape[1] // groups, w.shape[0] // groups
    axes = [1, *range(2 + rank, 2 + 2 * rank)], [1, *range(2, 2 + rank)]
    parts = [
        np.tensordot(views[:, g * inputs : (g + 1) * inputs], wide(w[g * outputs : (g + 1) * outputs]), axes)
        for g in range(groups)
    ]
    return _with_bias(np.moveaxis(np.concatenate(parts, -1), -1, 1), b)


def _define_conv(op: str, rank: int, **facts: Any) -> OpDef:
    return OpDef(
        op,
        infer=_conv_infer(op, rank),
        reference=_conv,
        flops=lambda out: 2 * out.size * prod(out.srcs[1].shape[1:]),
        formula="y[n, o, i] = Σ_{c, k} x[n, c, stride · i + dilation · k − padding] · w[o, c, k] + b[o]",
        product=True,
        slack=4.0,
        runs_like="conv2d",
        **facts,
    )


def _conv2d_samples() -> list[Tensor]:
    return [conv2d(operand(1, c, n, n), operand(c, c, 3, 3), padding=1) for c, n in ((4, 8), (16, 16), (32, 32))]


CONV1D: Final = _define_conv("conv1d", 1)
CONV2D: Final = _define_conv("conv2d", 2, samples=measured(_conv2d_samples, _conv2d_samples))
CONV3D: Final = _define_conv("conv3d", 3)


def _pads(op: str, padding: Any, kernel: Shape, stride: Shape, dilation: Shape) -> Pads:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        if max(stride) > 1:
            raise ShapeError(f"{op}: padding='same' needs a stride of 1, not {stride}")
        missing = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple([(n // 2, n - n // 2) for n in missing])
    return tuple([(n, n) for n in as_lengths(op, "padding", padding, len(kernel), 0)])


def _build_conv(
    op: OpDef, rank: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Tensor:
    name = op.name
    attrs = window_attrs(name, rank, stride=stride, dilation=dilation)
    attrs["groups"] = as_lengths(name, "groups", groups, 1)[0]
    w = make(name, weight)
    if w.ndim != rank + 2:
        raise misfit(name, f"weights (out, in / groups) and {rank} more axes", w)
    attrs["padding"] = _pads(name, padding, w.shape[2:], attrs["stride"], attrs["dilation"])
    return batched(name, make(name, x), rank, lambda y: node(op, floats(name, y, w, optional=[bias]), attrs))


@builds(CONV1D)
def conv1d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Padding = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Convolution over one axis, as ``torch.nn.functional.conv1d``; as `conv2d` in all else.

    Shapes: x (batch, in, length) or (in, length), weight (out, in / groups, k), the result (batch, out, places).
    """
    return _build_conv(CONV1D, 1, x, weight, bias, stride, padding, dilation, groups)


@builds(CONV2D)
def conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Padding = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Convolution over two axes, as ``torch.nn.functional.conv2d``. Operands are promoted to one float dtype.

    Args:
        x: shape (batch, in, height, width), or without a batch.
        weight: shape (out, in / groups, kh, kw).
        bias: shape (out,), or ``None``.
        stride: steps between windows; here and below one integer or one for each axis.
        padding: zeros on both sides; ``"valid"``: none; ``"same"``: as many as keep the shape, of an odd number one
            more behind than before (needs stride 1).
        dilation: distance between the elements of a window.
        groups: the channels are divided into this many groups, and outputs depend on the inputs of their own group
            only; ``groups=in`` is a depthwise convolution.

    Where a weight that is NaN or infinite meets padding, the result is NaN, or what it is without that weight: devices
    differ. Nodes carry ``padding`` as a pair (before, after) for each axis, and a batch.

    Returns:
        Shape (batch, out, places down, places across), places = (n + pads − dilation · (k − 1) − 1) // stride + 1.

    Raises:
        ShapeError: shapes that do not fit, a window larger than the padded input, arguments that are no such integers.
        DTypeError: a quantized operand.
    """
    return _build_conv(CONV2D, 2, x, weight, bias, stride, padding, dilation, groups)


@builds(CONV3D)
def conv3d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Padding = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Convolution over three axes, as ``torch.nn.functional.conv3d``; as `conv2d` in all else.

    Shapes: x (batch, in, depth, height, width), or without a batch; weight (out, in / groups, kd, kh, kw).
    """
    return _build_conv(CONV3D, 3, x, weight, bias, stride, padding, dilation, groups)


# --- transposed convolution -----------------------------------------------------------------------------------------


def _transpose_infer(op: str, rank: int) -> Infer:
    def infer(
        x: Tensor, w: Tensor, b: Tensor | None = None, *, groups: int, padding: Shape, **window: Shape
    ) -> tuple[Shape, DType]:
        if x.ndim != rank + 2 or w.ndim != rank + 2 or x.shape[1] != w.shape[0] or w.shape[0] % groups:
            shapes = "x (batch, in, ...) and weights (in, out / groups, ...)"
            raise misfit(op, f"{shapes}, {rank} axes behind those of the channels, {groups} groups of them", x, w)
        channels = w.shape[1] * groups
        check_shape_of(op, "the bias", b, (channels,), "one number a channel")
        lengths = tuple([n - 2 * p for n, p in zip(_extents(x.shape[2:], w.shape[2:], **window), padding, strict=True)])
        if min(lengths) < 1 or min(*w.shape[2:], *x.shape[2:]) < 1:
            raise ShapeError(f"{op}: nothing is left by padding {padding} of {x.describe()}, weights {w.describe()}")
        return (x.shape[0], channels, *lengths), x.dtype

    return infer


def _extents(lengths: Shape, kernel: Shape, *, stride: Shape, dilation: Shape, output_padding: Shape) -> list[int]:
    """Lengths of the axes of the result before its padding is cut off."""
    axes = zip(lengths, kernel, stride, dilation, output_padding, strict=True)
    return [(n - 1) * s + d * (k - 1) + 1 + extra for n, k, s, d, extra in axes]


def _transposed(x: Array, w: Array, b: Array | None = None, *, groups: int, padding: Shape, **window: Shape) -> Array:
    kernel, spatial = w.shape[2:], x.shape[2:]
    extents = _extents(spatial, kernel, **window)
    full = np.zeros((x.shape[0], groups, w.shape[1], *extents))
    xs = wide(x).reshape(x.shape[0], groups, -1, *spatial)
    ws = wide(w).reshape(groups, -1, *w.shape[1:])
    for place in product(*map(range, kernel)):
        reach = [
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(place, window["dilation"], spatial, window["stride"], strict=True)
        ]
        to: Any = (..., *reach)
        of: Any = (..., *place)
        full[to] += np.einsum("ngc...,gco->ngo...", xs, ws[of])
    full = full.reshape(x.shape[0], -1, *extents)
    inner: Any = (..., *[slice(p, n - p) for p, n in zip(padding, extents, strict=True)])
    return _with_bias(full[inner], b)


def _define_transposed(op: str, rank: int) -> OpDef:
    return OpDef(
        op,
        infer=_transpose_infer(op, rank),
        attributes=("dilation", "output_padding", "stride"),
        reference=_transposed,
        flops=lambda out: 2 * out.srcs[0].size * prod(out.srcs[1].shape[1:]),
        formula="y[n, o, j] = Σ_{c, i, k: stride · i + dilation · k − padding = j} x[n, c, i] · w[c, o, k] + b[o]",
        product=True,
        slack=4.0,
        runs_like="conv2d",
    )


CONV_TRANSPOSE1D: Final = _define_transposed("conv_transpose1d", 1)
CONV_TRANSPOSE2D: Final = _define_transposed("conv_transpose2d", 2)


def _build_transposed(op: OpDef, rank: int, x: Any, weight: Any, bias: Any, groups: Any, **window: Any) -> Tensor:
    name = op.name
    attrs = window_attrs(name, rank, **window) | {"groups": as_lengths(name, "groups", groups, 1)[0]}
    for extra, s, d in zip(attrs["output_padding"], attrs["stride"], attrs["dilation"], strict=True):
        if extra >= max(s, d):
            raise ShapeError(f"{name}: output_padding {extra} must be below stride {s} or dilation {d}")
    w = make(name, weight)
    return batched(name, make(name, x), rank, lambda y: node(op, floats(name, y, w, optional=[bias]), attrs))


@builds(CONV_TRANSPOSE1D)
def conv_transpose1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """Transposed convolution over one axis, as ``torch.nn.functional.conv_transpose1d``; see `conv_transpose2d`.

    Shapes: x (batch, in, length) or (in, length), weight (in, out / groups, k).
    """
    window = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    return _build_transposed(CONV_TRANSPOSE1D, 1, x, weight, bias, groups, **window)


@builds(CONV_TRANSPOSE2D)
def conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The transpose of a convolution over two axes, as ``torch.nn.functional.conv_transpose2d``: each element of ``x``
    adds a multiple of the kernel to the result. Operands are promoted to one float dtype.

    Args:
        x: shape (batch, in, height, width), or without a batch.
        weight: shape (in, out / groups, kh, kw).
        bias: shape (out,), or ``None``.
        stride: steps between kernels in the result; here and below one integer or one for each axis.
        padding: elements that are cut off on both sides of the result.
        output_padding: how much longer the result is at its end; less than the larger of ``stride`` and ``dilation``.
        groups: the channels are divided into this many groups, and outputs depend on the inputs of their own group
            only.
        dilation: distance between the elements of a kernel.

    Returns:
        Shape (batch, out, ...) with lengths (n − 1) · stride − 2 · padding + dilation · (k − 1) + output_padding + 1.

    Raises:
        ShapeError: shapes that do not fit, an empty result, arguments that are no such integers.
        DTypeError: a quantized operand.
    """
    window = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    return _build_transposed(CONV_TRANSPOSE2D, 2, x, weight, bias, groups, **window)


# --- columns --------------------------------------------------------------------------------------------------------


def window_places(lengths: Shape, kernel_size: Shape, dilation: Shape, padding: Shape, stride: Shape) -> Shape:
    """How many windows there are along each axis of these lengths, padded on both sides."""
    padded = [n + 2 * p for n, p in zip(lengths, padding, strict=True)]
    return tuple(map(fitting, padded, kernel_size, stride, dilation))


def _im2col_infer(
    x: Tensor, *, kernel_size: Shape, dilation: Shape, padding: Shape, stride: Shape
) -> tuple[Shape, DType]:
    if x.ndim != len(kernel_size) + 2:
        raise misfit("im2col", f"(batch, channels) and {len(kernel_size)} more axes", x)
    places = window_places(x.shape[2:], kernel_size, dilation, padding, stride)
    if min(places) < 1:
        raise ShapeError(f"im2col: no window of {kernel_size} fits into {x.describe()} with padding {padding}")
    return (x.shape[0], x.shape[1] * prod(kernel_size), prod(places)), x.dtype


def _im2col(x: Array, *, kernel_size: Shape, dilation: Shape, padding: Shape, stride: Shape) -> Array:
    rank = len(kernel_size)
    views = windows_of(np.pad(x, ((0, 0), (0, 0), *[(p, p) for p in padding])), kernel_size, stride, dilation)
    order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    return views.transpose(order).reshape(x.shape[0], x.shape[1] * prod(kernel_size), -1)


IM2COL: Final = OpDef(
    "im2col",
    infer=_im2col_infer,
    reference=_im2col,
    formula="y[n, (c, k), i] = x[n, c, stride · i + dilation · k − padding]",
    exact=True,
    runs_like="copy",
)


@builds(IM2COL)
def im2col(x: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Every window as a column: ``torch.nn.functional.unfold``, over one to three axes.

    Args:
        x: shape (batch, channels, *spatial), one to three spatial axes; without a batch where ``kernel_size`` is a
            tuple, whose length is the number of spatial axes.
        kernel_size: of the windows; here and below one integer or one for each spatial axis.
        dilation: distance between the elements of a window.
        padding: zeros on both sides.
        stride: steps between windows.

    Returns:
        Shape (batch, channels · elements of a window, windows), the dtype of ``x``.

    Raises:
        ShapeError: no window fits, arguments that are no such integers, another number of axes.
        DTypeError: a quantized operand.
    """
    y = unquantized("im2col", x)
    rank = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else y.ndim - 2
    if not 1 <= rank <= 3:
        raise misfit("im2col", "one to three axes behind batch and channels", y)
    attrs = window_attrs("im2col", rank, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride)
    return batched("im2col", y, rank, lambda z: node(IM2COL, (z,), attrs))


def _col2im_infer(
    x: Tensor, *, size: Shape, kernel_size: Shape, dilation: Shape, padding: Shape, stride: Shape
) -> tuple[Shape, DType]:
    places = window_places(size, kernel_size, dilation, padding, stride)
    elements = prod(kernel_size)
    if min(places) < 1:
        raise ShapeError(f"col2im: no window of {kernel_size} fits into {size} with padding {padding}")
    if x.ndim != 3 or x.shape[1] % elements or x.shape[2] != prod(places):
        raise misfit("col2im", f"(batch, channels · {elements}, {prod(places)}), as {places} windows fit", x)
    return (x.shape[0], x.shape[1] // elements, *size), x.dtype


def _col2im(x: Array, *, size: Shape, kernel_size: Shape, dilation: Shape, padding: Shape, stride: Shape) -> Array:
    rank = len(size)
    places = window_places(size, kernel_size, dilation, padding, stride)
    taps = wide(x).reshape(x.shape[0], -1, *kernel_size, *places)
    views = taps.transpose(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    padded = tuple([n + 2 * p for n, p in zip(size, padding, strict=True)])
    return unpadded(sum_of_windows(views, padded, stride, dilation), size, padding)


COL2IM: Final = OpDef(
    "col2im",
    infer=_col2im_infer,
    reference=_col2im,
    flops=lambda out: out.srcs[0].size,
    formula="y[n, c, j] = Σ x[n, (c, k), i], over all i and k with stride · i + dilation · k − padding = j",
)


@builds(COL2IM)
def col2im(x: Any, size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Columns added up at the places of their windows: ``torch.nn.functional.fold`` over one to three axes, the
    gradient of `im2col`. Integers become f32.

    Args:
        x: shape (batch, channels · elements of a window, windows), or without a batch.
        size: lengths of the spatial axes of the result, one to three integers.
        kernel_size: of the windows; here and below one integer or one for each spatial axis.
        dilation: distance between the elements of a window.
        padding: elements on both sides that are left out of the result.
        stride: steps between windows.

    Returns:
        Shape (batch, channels, *size).

    Raises:
        ShapeError: no window fits, another number of windows than fit, arguments that are no such integers.
        DTypeError: a quantized operand.
    """
    rank = len(size) if isinstance(size, (tuple, list)) else 1
    if not 1 <= rank <= 3:
        raise ShapeError(f"col2im: size is one to three lengths, not {size!r}")
    attrs = window_attrs(
        "col2im", rank, size=size, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride
    )
    return batched("col2im", floating("col2im", x), 1, lambda y: node(COL2IM, (y,), attrs))
