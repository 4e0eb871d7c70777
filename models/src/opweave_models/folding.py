"""Putting windows of images and lines together again, and positions relative to each other.

All of these are built from other operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor, constant
from opweave.ops.arrangement import pad
from opweave.ops.convolution import col2im
from opweave.ops.elementwise import add
from opweave.ops.indexing import embedding
from opweave.ops.movement import expand_dims, reshape, transpose
from opweave.ops.operands import composite, floating, floats, misfit, unquantized
from opweave.ops.windows import as_lengths

__all__ = ["add_relative_positions", "col2im1d", "relative_positions", "window_partition", "window_unpartition"]


def col2im1d(x: Any, kernel_size: int, stride: int = 1, padding: int = 0) -> Tensor:
    """Windows of a line added up where they overlap: what a transposed convolution does behind its product.

    `col2im` in one dimension, whose result is as long as the windows need; integers become f32.

    Args:
        x: shape (batch, channels · kernel_size, windows), the elements of a window in a row for each channel.
        kernel_size: elements of a window.
        stride: from window to window.
        padding: elements left out at both ends of the result.

    Returns:
        Shape (batch, channels, (windows − 1) · stride + kernel_size − 2 · padding).

    Raises:
        ShapeError: another number of axes, channels that are no multiple of ``kernel_size``, nothing left of the line.
        DTypeError: a quantized operand.
    """
    op = "col2im1d"
    (taps,), (step,) = as_lengths(op, "kernel_size", kernel_size, 1, 1), as_lengths(op, "stride", stride, 1, 1)
    (cut,) = as_lengths(op, "padding", padding, 1, 0)
    y = floating(op, x)
    if y.ndim != 3 or y.shape[1] % taps or not y.shape[2]:
        raise misfit(op, f"x (batch, channels · {taps}, windows)", y)
    length = (y.shape[2] - 1) * step + taps - 2 * cut
    if length < 1:
        raise ShapeError(f"{op}: padding {cut} leaves nothing of {y.shape[2]} windows of {taps} elements")
    return col2im(y, (length,), taps, 1, cut, step)


def window_partition(x: Any, size: int) -> Tensor:
    """Images cut into square windows, padded by zeros at the right and lower edge to a multiple of them.

    Liu et al., "Swin Transformer", 2021; Kirillov et al., "Segment Anything", 2023.

    Args:
        x: shape (batch, height, width, channels), any dtype but quantized ones.
        size: of the windows.

    Returns:
        Shape (batch · windows, size, size, channels), windows row by row.

    Raises:
        ShapeError: another number of axes, no such size.
        DTypeError: a quantized operand.
    """
    y = unquantized("window_partition", x)
    (n,) = as_lengths("window_partition", "size", size, 1, 1)
    if y.ndim != 4:
        raise misfit("window_partition", "x (batch, height, width, channels)", y)
    batch, height, width, channels = y.shape
    down, across = -(-height // n), -(-width // n)
    if (down * n, across * n) != (height, width):
        y = pad(y, [(0, 0), (0, down * n - height), (0, across * n - width), (0, 0)])
    y = transpose(reshape(y, (batch, down, n, across, n, channels)), (0, 1, 3, 2, 4, 5))
    return reshape(y, (batch * down * across, n, n, channels))


def window_unpartition(windows: Any, size: Any) -> Tensor:
    """The images that `window_partition` cut, without what it padded.

    Args:
        windows: shape (batch · windows, n, n, channels).
        size: height and width of the images.

    Returns:
        Shape (batch, height, width, channels).

    Raises:
        ShapeError: windows that are not square, or no whole number of images.
        DTypeError: a quantized operand.
    """
    y = unquantized("window_unpartition", windows)
    height, width = as_lengths("window_unpartition", "size", size, 2, 1)
    n = y.shape[1] if y.ndim == 4 else 0
    down, across = (-(-height // n), -(-width // n)) if n else (1, 1)
    if not n or y.shape[2] != n or y.shape[0] % (down * across):
        raise misfit("window_unpartition", f"windows (batch · {down * across}, n, n, channels)", y)
    y = reshape(y, (-1, down, across, n, n, y.shape[3]))
    y = reshape(transpose(y, (0, 1, 3, 2, 4, 5)), (-1, down * n, across * n, y.shape[5]))
    return y[:, :height, :width]


def relative_positions(table: Any, queries: int, keys: int) -> Tensor:
    """The row of a table for the distance of each query to each key.

    Args:
        table: shape (distances, size); row keys − 1 belongs to distance 0. At least queries + keys − 1 rows.
        queries, keys: how many positions there are.

    Returns:
        Shape (queries, keys, size): row q − k + keys − 1 for query q and key k.

    Raises:
        ShapeError: a table that is no matrix or has too few rows, numbers of positions that are no positive integers.
        DTypeError: a quantized table.
    """
    y = unquantized("relative_positions", table)
    (m,), (n,) = (as_lengths("relative_positions", "positions", count, 1, 1) for count in (queries, keys))
    if y.ndim != 2 or y.shape[0] < m + n - 1:
        raise misfit("relative_positions", f"a table (at least {m + n - 1}, size)", y)
    return embedding(y, constant(np.arange(m)[:, None] - np.arange(n) + n - 1))


def add_relative_positions(scores: Any, vertical: Any, horizontal: Any) -> Tensor:
    """Scores of attention over an image, with what the vertical and the horizontal distance add.

    Li et al., "MViTv2", 2021, equation 4. Operands are promoted to one float dtype.

    Args:
        scores: shape (batch, height · width, key_height · key_width).
        vertical: shape (batch, height, width, key_height).
        horizontal: shape (batch, height, width, key_width).

    Returns:
        The shape of ``scores``.

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized operand.
    """
    y, v, h = floats("add_relative_positions", scores, vertical, horizontal)
    fits = v.ndim == h.ndim == 4 and v.shape[:3] == h.shape[:3]
    if not fits or y.shape != (v.shape[0], v.shape[1] * v.shape[2], v.shape[3] * h.shape[3]):
        needs = ("scores (batch, height · width, key_height · key_width) and (batch, height, width, key_height) and "
                 "(…, key_width)")  # fmt: skip
        raise misfit("add_relative_positions", needs, y, v, h)
    return _with_distances(y, v, h)


@composite
def _with_distances(y: Tensor, v: Tensor, h: Tensor) -> Tensor:
    grid = reshape(y, (*v.shape, h.shape[3]))
    return reshape(add(add(grid, expand_dims(v, -1)), expand_dims(h, -2)), y.shape)
