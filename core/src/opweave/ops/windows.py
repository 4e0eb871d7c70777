"""Windows that slide over the last axes: reading their arguments, counting them, and showing and adding up their
elements."""

from __future__ import annotations

from collections.abc import Callable
from operator import index as as_index
from typing import Any, Final

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.movement import reshape
from opweave.ops.operands import Array

__all__ = ["as_lengths", "batched", "fitting", "overlap", "sum_of_windows", "unpadded", "window_attrs", "windows_of"]

_ADDRESSES: Final = 1 << 63


def as_lengths(op: str, what: str, value: Any, rank: int, least: int = 1) -> tuple[int, ...]:
    """``value``, one integer or one for each of ``rank`` axes, as a tuple.

    Raises:
        ShapeError: not integers, another number of them, one below ``least`` or beyond 64 bits.
    """
    try:
        numbers = tuple(map(as_index, value)) if isinstance(value, (tuple, list)) else (as_index(value),) * rank
    except TypeError:
        numbers = ()
    if len(numbers) != rank or min(numbers) < least or max(numbers) >= _ADDRESSES:
        raise ShapeError(f"{op}: {what} is an integer of at least {least}, or {rank} of them, not {value!r}")
    return numbers


def window_attrs(op: str, rank: int, **values: Any) -> dict[str, Any]:
    """Each value by its name as `as_lengths` gives it; only paddings may be 0."""
    return {k: as_lengths(op, k, v, rank, 0 if k.endswith("padding") else 1) for k, v in values.items()}


def fitting(length: int, kernel: int, stride: int, dilation: int) -> int:
    """How many windows fit into ``length`` (padding included) elements; 0 or less if none does."""
    return (length - dilation * (kernel - 1) - 1) // stride + 1


def overlap(count: int, length: int, stride: int, shift: int) -> tuple[slice, slice]:
    """The numbers i from 0 to ``count`` - 1 for which i · stride + shift is an index of an axis of ``length``, and
    these indices, both as slices."""
    first = max(0, -(shift // stride))
    last = min(count, (length - 1 - shift) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + shift
    return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)


def windows_of(x: Array, kernel: Shape, stride: Shape, dilation: Shape) -> Array:
    """Every window of the last axes, as a view: (..., *places, *kernel)."""
    rank = len(kernel)
    extent = tuple([d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)])
    views: Array = np.lib.stride_tricks.sliding_window_view(x, extent, tuple(range(-rank, 0)))
    picked: Any = (..., *[slice(None, None, step) for step in (*stride, *dilation)])
    result: Array = views[picked]
    return result


def sum_of_windows(views: Array, lengths: Shape, stride: Shape, dilation: Shape) -> Array:
    """The transpose of `windows_of`: every window of ``views`` (..., *places, *kernel) added up at its place, shape
    (..., *lengths)."""
    rank = len(lengths)
    places, kernel = views.shape[-2 * rank : -rank], views.shape[-rank:]
    total = np.zeros((*views.shape[: -2 * rank], *lengths), views.dtype)
    for tap in np.ndindex(*kernel):
        axes = zip(tap, places, stride, dilation, strict=True)
        target: Any = (..., *[slice(i * d, i * d + (m - 1) * s + 1, s) for i, m, s, d in axes])
        total[target] += views[(..., *tap)]
    return total


def unpadded(x: Array, lengths: Shape, padding: Shape) -> Array:
    """``lengths`` elements of each of the last axes, from index ``padding`` on, as a view."""
    inner: Any = (..., *[slice(p, p + n) for n, p in zip(lengths, padding, strict=True)])
    result: Array = x[inner]
    return result


def batched(op: str, x: Tensor, rank: int, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """``apply`` on ``x`` of shape (batch, channels, *spatial); without a batch it gets one, which is dropped again.

    Raises:
        ShapeError: another number of axes.
    """
    if x.ndim == rank + 2:
        return apply(x)
    if x.ndim != rank + 1:
        raise ShapeError(f"{op}: needs (batch, channels) or (channels,) and {rank} more axes, not {x.describe()}")
    y = apply(reshape(x, (1, *x.shape)))
    return reshape(y, y.shape[1:])
