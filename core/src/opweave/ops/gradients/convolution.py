"""Gradients of convolutions, pooling, also behind relu, and resampling.

The gradient of a convolution with respect to its input is a transposed convolution; that with respect to its weights is
a product with the columns of the input (`im2col`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any, Final

import numpy as np

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.activation import relu_backward
from opweave.ops.gradients.movement import spread
from opweave.ops.gradients.rules import gradient_of, zeros
from opweave.ops.interpolation import axis_taps, tap_kind
from opweave.ops.operands import composite, widened
from opweave.ops.pooling import AVG_POOL1D, AVG_POOL2D, MAX_POOL_BACKWARD, avg_pool_backward, max_pool_backward

Pads = Sequence[tuple[int, int]]

COLUMNS: Final = 1 << 16
"""Bytes of columns above which the gradient of weights is added up over parts of the batch."""

MOST_PARTS: Final = 8
"""Into so many parts the batch is divided at most."""

# --- convolutions ---------------------------------------------------------------------------------------------------


def _framed(x: Tensor, pads: Pads, value: float = 0) -> Tensor:
    """``x`` with its spatial axes padded by ``value``; where a number is negative, elements are cut off instead."""
    cut = [slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pads, x.shape[2:], strict=True)]
    inner = x[(slice(None), slice(None), *cut)]
    return ops.pad(inner, [(0, 0), (0, 0), *[(max(a, 0), max(b, 0)) for a, b in pads]], value=value)


def _turned(w: Tensor, groups: int) -> Tensor:
    """Weights (out, in / groups, ...) as (in, out / groups, ...), each window in reverse order."""
    outputs, inputs, *kernel = w.shape
    split = ops.swapaxes(ops.reshape(w, (groups, outputs // groups, inputs, *kernel)), 1, 2)
    return ops.flip(ops.reshape(split, (groups * inputs, outputs // groups, *kernel)), tuple(range(2, w.ndim)))


def transposed(
    grad: Tensor, w: Tensor, lengths: Shape, *, stride: Shape, padding: Shape, dilation: Shape, groups: int = 1
) -> Tensor:
    """The gradient of a convolution with weights ``w`` with respect to its input.

    Args:
        grad: the gradient of the result.
        lengths: of the spatial axes of the input.
        padding: zeros before the input along each axis; how many are behind it follows from the shapes.
    """
    kernel = w.shape[2:]
    reach = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(grad.shape[2:], stride, dilation, kernel, strict=True)]
    # What is cut off on both sides.
    cut = [max(min(p, r - p - n), 0) if n else 0 for p, r, n in zip(padding, reach, lengths, strict=True)]
    if len(lengths) < 3 and max(stride) > 1:
        operation: Callable[..., Tensor] = ops.conv_transpose1d if len(lengths) == 1 else ops.conv_transpose2d
        full = operation(grad, w, None, stride, tuple(cut), 0, groups, dilation)
    else:
        for axis, step in enumerate(stride, 2):
            grad = spread(grad, axis, step)
        around = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, cut, strict=True)]
        inside = min(around) >= 0  # else the frame is cut
        convolve = (ops.conv1d, ops.conv2d, ops.conv3d)[len(lengths) - 1]
        framed = grad if inside else _framed(grad, [(n, n) for n in around])
        full = convolve(framed, _turned(w, groups), None, 1, tuple(around) if inside else 0, dilation, groups)
    before = [c - p for c, p in zip(cut, padding, strict=True)]
    return _framed(full, [(a, n - m - a) for a, n, m in zip(before, lengths, full.shape[2:], strict=True)])


def _weights(
    x: Tensor, grad: Tensor, w: Tensor, *, stride: Shape, padding: Pads, dilation: Shape, groups: int
) -> Tensor:
    """The gradient of a convolution of ``x`` with respect to its weights ``w``. It is added up over parts of the batch,
    because the columns need memory for all elements of all windows."""
    batch, channels = x.shape[:2]
    inputs, places = channels // groups * prod(w.shape[2:]), prod(grad.shape[2:])
    size = batch * groups * inputs * places * x.dtype.itemsize
    parts = max(1, min(batch, MOST_PARTS, -(-size // COLUMNS)))
    edges = [batch * i // parts for i in range(parts + 1)]
    total = None
    for start, stop in pairwise(edges):
        framed = _framed(x[start:stop], padding)
        columns = ops.im2col(framed, w.shape[2:], dilation, (0,) * len(stride), stride)
        columns = ops.reshape(columns, (stop - start, groups, inputs, columns.shape[2]))
        rows = ops.reshape(grad[start:stop], (stop - start, groups, grad.shape[1] // groups, places))
        part = ops.sum(widened(ops.matmul(rows, ops.swapaxes(columns, -1, -2))), 0)
        total = part if total is None else total + part
    assert total is not None
    return ops.reshape(ops.cast(total, w.dtype), w.shape)


def _bias(grad: Tensor) -> Tensor:
    return ops.sum(grad, (0, *range(2, grad.ndim)))


@gradient_of("conv1d", "conv2d", "conv3d")
def _conv(grad: Tensor, out: Tensor, x: Tensor, w: Tensor, *bias: Tensor, padding: Pads, **attrs: Any) -> Any:
    dx = transposed(grad, w, x.shape[2:], padding=tuple([before for before, _ in padding]), **attrs)
    return dx, _weights(x, grad, w, padding=padding, **attrs), *[_bias(grad) for _ in bias]


@gradient_of("conv_transpose1d", "conv_transpose2d")
def _conv_transpose(
    grad: Tensor, out: Tensor, x: Tensor, w: Tensor, *bias: Tensor, padding: Shape, output_padding: Shape, **attrs: Any
) -> Any:
    # No element of x contributes to the elements that output_padding added at the end of the result.
    pads = [(p, p - extra) for p, extra in zip(padding, output_padding, strict=True)]
    framed = _framed(grad, pads)
    convolve = ops.conv1d if len(padding) == 1 else ops.conv2d
    dx = convolve(framed, w, None, attrs["stride"], 0, attrs["dilation"], attrs["groups"])
    return dx, _weights(grad, x, w, padding=pads, **attrs), *[_bias(grad) for _ in bias]


gradient_of("im2col")(
    lambda grad, out, x, **attrs: ops.col2im(grad, x.shape[2:], **attrs) if x.size else zeros(x.shape, x.dtype)
)
gradient_of("col2im")(lambda grad, out, x, *, size, **attrs: ops.im2col(grad, **attrs))


# --- pooling --------------------------------------------------------------------------------------------------------


@gradient_of("max_pool1d", "max_pool2d")
def _max_pool(grad: Tensor, out: Tensor, x: Tensor, **attrs: Any) -> Tensor:
    """Of equal largest elements of a window the first one gets the gradient, as in torch."""
    return max_pool_backward(grad, x, **attrs)


@gradient_of("relu")
def _relu(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    if grad.op is MAX_POOL_BACKWARD and grad.srcs[1] is out:
        # Only the largest element of a window gets a gradient, so relu_backward need only look at that element. Then
        # max_pool_backward is the last reader of ``out``, and its result may be written over it.
        pool = ops.max_pool1d if out.ndim == 3 else ops.max_pool2d
        return max_pool_backward(relu_backward(grad.srcs[0], pool(out, **grad.attrs)), out, **grad.attrs)
    return relu_backward(grad, out)


@gradient_of("max_pool_backward")
def _max_pool_backward(
    grad: Tensor,
    out: Tensor,
    given: Tensor,
    x: Tensor,
    *,
    kernel_size: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    **_: Any,
) -> tuple[Tensor, None]:
    """For each window the element of ``grad`` at the place of its first largest element."""
    lines, places = x.shape[0] * x.shape[1], given.shape[2:]
    reach = [(m - 1) * s + d * (k - 1) + 1 for m, s, d, k in zip(places, stride, dilation, kernel_size, strict=True)]
    pads = [(p, r - n - p) for p, r, n in zip(padding, reach, x.shape[2:], strict=True)]
    windows = ops.im2col(_framed(x, pads, -np.inf), kernel_size, dilation, (0,) * len(reach), stride)
    best = ops.argmax(ops.reshape(windows, (lines, prod(kernel_size), prod(places))), 1)
    steps = [prod(reach[a + 1 :]) for a in range(len(reach))]
    within = [sum(i * d * s for i, d, s in zip(at, dilation, steps, strict=True)) for at in _grid(kernel_size)]
    start = [sum(i * s * by for i, s, by in zip(at, stride, steps, strict=True)) for at in _grid(places)]
    ids = ops.embedding(constant(within, "i64"), best) + constant(start, "i64")
    rows = ops.reshape(_framed(grad, pads), (lines, prod(reach)))
    return ops.reshape(ops.take_along_axis(rows, ids, 1), given.shape), None


def _grid(shape: Shape) -> list[tuple[int, ...]]:
    return list(product(*map(range, shape)))


@gradient_of("avg_pool1d", "avg_pool2d")
def _avg_pool(grad: Tensor, out: Tensor, x: Tensor, **attrs: Any) -> Tensor:
    kernel = attrs["kernel_size"]
    covered = tuple([m * k for m, k in zip(out.shape[2:], kernel, strict=True)])
    if attrs["stride"] != kernel or any(attrs["padding"]) or x.shape[2:] != covered:
        return avg_pool_backward(grad, x.shape[2:], **attrs)
    # Each element belongs to exactly one window: the gradient of the window is repeated for its elements.
    share = grad * (1 / (attrs["divisor"] or prod(kernel)))
    for axis in range(len(kernel)):
        share = ops.expand_dims(share, 3 + 2 * axis)
    each = [n for m, k in zip(out.shape[2:], kernel, strict=True) for n in (m, k)]
    return ops.reshape(ops.broadcast_to(share, (*x.shape[:2], *each)), x.shape)


gradient_of("avg_pool_backward")(
    lambda grad, out, given, *, size, **attrs: node(AVG_POOL1D if len(size) == 1 else AVG_POOL2D, (grad,), attrs)
)


# --- resampling -----------------------------------------------------------------------------------------------------


@gradient_of("interpolate")
@composite
def _interpolate(
    grad: Tensor,
    out: Tensor,
    x: Tensor,
    *,
    size: Shape,
    scale_factor: tuple[float, ...] | None,
    mode: str,
    align_corners: bool,
) -> Tensor:
    """Each axis is a product with the matrix of its weights."""
    for axis, n in enumerate(size, 2):
        length = x.shape[axis]
        places, weights = axis_taps(
            length, n, scale_factor[axis - 2] if scale_factor else 0.0, tap_kind(mode), align_corners
        )
        matrix = np.zeros((n, length))
        np.add.at(matrix, (np.arange(n)[None], places), weights)
        grad = ops.swapaxes(ops.matmul(ops.swapaxes(grad, axis, -1), constant(matrix, grad.dtype)), axis, -1)
    return grad
