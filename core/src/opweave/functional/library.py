"""`ArrayLibrary`: the few functions of an array library that the core needs; windows are made of them."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opweave.contract.step import Arg
    from opweave.graph.layout import Shape

__all__ = ["ArrayLibrary"]


class ArrayLibrary:
    """What the core does with a library's arrays; the defaults suit arrays that have NumPy's methods.

    The functions from `reshape` on are also called by `opweave.functional.evaluate`, then with whatever stands for
    arrays while the library traces or builds a graph. Types without blocks have arrays of their dtype; an array of a
    quantized type is a ``uint8`` array whose last axis counts bytes.
    """

    def from_host(self, array: np.ndarray[Any, Any], borrowed: bool) -> Any:
        """An array of the library with the values of a NumPy array.

        ``borrowed``: the NumPy array stays unchanged as long as the result is read, which may show the same memory. If
        not, it may be changed when this returns.
        """
        raise NotImplementedError(f"{type(self).__name__} implements no from_host")

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The values as a NumPy array, which nobody writes: it may show the same memory."""
        return np.asarray(array)

    def adopt(self, array: Any) -> Any:
        """An array of the library over another library's dense array (``__dlpack__``) on the same device, which keeps
        it alive. Raises whatever the library raises where it cannot take it."""
        raise BufferError("this library takes no arrays by DLPack")

    def copy(self, array: Any) -> Any:
        """A new array with the same values."""
        return array.copy()

    def reshape(self, array: Any, shape: Shape) -> Any:
        return array.reshape(shape)

    def transpose(self, array: Any, axes: Sequence[int]) -> Any:
        return array.transpose(axes)

    def broadcast_to(self, array: Any, shape: Shape) -> Any:
        raise NotImplementedError(f"{type(self).__name__} implements no broadcast_to")

    def take(self, array: Any, index: Any) -> Any:
        """``array[index]``, for a tuple of slices, or for integers (a NumPy array) into an array of one axis."""
        return array[index]

    def updated(self, array: Any, index: Any, values: Any) -> Any:
        """A new array like ``array`` but for ``array[index]``, which is ``values``."""
        raise NotImplementedError(f"{type(self).__name__} implements no updated")

    # --- windows ----------------------------------------------------------------------------------------------------

    def window(self, whole: Any, arg: Arg) -> Any:
        """The window ``arg`` (offset, shape, strides) of a dense array."""
        shape, strides, offset = in_elements(arg)
        plan = window_plan(prod(whole.shape), offset, shape, strides)
        if plan is None:
            return self.take(self._reshaped(whole, (-1,)), positions(offset, shape, strides))
        found = self._reshaped(whole, plan.blocks)
        if any(piece != slice(0, length, 1) for piece, length in zip(plan.slices, plan.blocks, strict=True)):
            found = self.take(found, plan.slices)
        found = self._reshaped(found, plan.lengths)
        if plan.axes != tuple(range(len(plan.axes))):
            found = self.transpose(found, plan.axes)
        found = self._reshaped(found, plan.expanded)
        return found if plan.expanded == shape else self.broadcast_to(found, shape)

    def with_window(self, whole: Any, arg: Arg, values: Any) -> Any:
        """A new array like ``whole`` but for the window ``arg`` of it, which is ``values``. No element of the window is
        there twice."""
        shape, strides, offset = in_elements(arg)
        plan = window_plan(prod(whole.shape), offset, shape, strides)
        if plan is None:
            flat = self._reshaped(whole, (-1,))
            changed = self.updated(flat, positions(offset, shape, strides), values)
        else:
            turned = self._reshaped(values, tuple([plan.lengths[axis] for axis in plan.axes]))
            back = tuple(int(axis) for axis in np.argsort(plan.axes))
            if back != tuple(range(len(back))):
                turned = self.transpose(turned, back)
            pieces = tuple([len(range(*piece.indices(n))) for piece, n in zip(plan.slices, plan.blocks, strict=True)])
            changed = self.updated(self._reshaped(whole, plan.blocks), plan.slices, self._reshaped(turned, pieces))
        return self._reshaped(changed, tuple(whole.shape))

    def _reshaped(self, array: Any, shape: Shape) -> Any:
        return array if tuple(array.shape) == shape else self.reshape(array, shape)


class WindowPlan(NamedTuple):
    """A window as a few functions: reshape to ``blocks``, take the ``slices``, reshape to ``lengths``, transpose by
    ``axes``, reshape to ``expanded``, and broadcast to the window's shape."""

    blocks: Shape
    slices: tuple[slice, ...]
    lengths: Shape
    axes: tuple[int, ...]
    expanded: Shape


def in_elements(arg: Arg) -> tuple[Shape, Shape, int]:
    """Shape, strides and offset of an operand in elements of its array; in bytes for quantized types."""
    dtype = arg.dtype
    if dtype.block > 1:
        return (*arg.shape[:-1], dtype.row_bytes(arg.shape[-1])), (*arg.strides[:-1], 1), arg.offset
    size = dtype.itemsize
    return arg.shape, tuple([stride // size for stride in arg.strides]), arg.offset // size


def window_plan(size: int, offset: int, shape: Shape, strides: Shape) -> WindowPlan | None:
    """How to take a window out of ``size`` elements, or ``None`` where slices cannot show it (its rows overlap)."""
    # From the axis with the largest stride to that with the smallest, whatever their order in the window.
    order = sorted([a for a, n in enumerate(shape) if n > 1 and strides[a]], key=lambda a: -strides[a])
    blocks: list[int] = []
    index: list[slice] = []
    for i, axis in enumerate(order):
        inner = 1 + sum([(shape[a] - 1) * strides[a] for a in order[i + 1 :]])
        width = gcd(strides[axis], size)
        first, offset = divmod(offset, width)
        step = strides[axis] // width
        if offset + inner > width or step < 1:
            return None
        blocks.append(size // width)
        index.append(slice(first, first + (shape[axis] - 1) * step + 1, step))
        size = width
    blocks.append(size)
    index.append(slice(offset, offset + 1, 1))
    lengths = tuple([shape[a] for a in order])
    rank: Final = {axis: i for i, axis in enumerate(order)}
    axes = tuple([rank[a] for a in range(len(shape)) if a in rank])
    expanded = tuple([n if a in rank else 1 for a, n in enumerate(shape)])
    return WindowPlan(tuple(blocks), tuple(index), lengths, axes, expanded)


def positions(offset: int, shape: Shape, strides: Shape) -> np.ndarray[Any, Any]:
    """The position of every element of a window in the flat array, in the window's shape."""
    found = np.full(shape, offset, np.int64)
    for axis, stride in enumerate(strides):
        steps = np.arange(shape[axis]) * stride
        found += steps.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return found
