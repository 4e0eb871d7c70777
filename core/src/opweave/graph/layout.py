"""Layouts: shapes, strides, offsets, and the arithmetic of views.

All functions are pure functions of tuples. A window is ``(shape, strides, offset)``, strides and offset in bytes and
relative to the first byte of a dense row-major tensor. For quantized types the stride of the last axis is that from one
block to the next.
"""

from __future__ import annotations

from math import prod
from operator import index as as_index
from typing import Any, Final

import numpy as np

from opweave.errors import BoundsError, LayoutError, ShapeError
from opweave.graph.dtypes import DType, u8

__all__ = [
    "MAX_NDIM", "Key", "Shape", "Strides", "array_shape", "broadcast_shapes", "broadcast_strides", "check_shape",
    "dense_strides", "is_dense", "nbytes", "normalize_axes", "normalize_axis", "normalize_key", "reshape_strides",
    "resolve_reshape", "round_up", "slice_window", "span",
]  # fmt: skip

Shape = tuple[int, ...]
Strides = tuple[int, ...]
Key = tuple[int | tuple[int, int, int] | None, ...]
"""A normalised index: a number removes its axis, (start, stop, step) keeps it, ``None`` adds one of length 1."""

MAX_NDIM: Final = 8
"""The largest number of axes of a tensor."""
_ADDRESSES: Final = 1 << 63


def check_shape(shape: Any, dtype: DType) -> Shape:
    """``shape``, an integer or an iterable of integers, as a tuple of ints.

    Raises:
        ShapeError: more than 8 axes, a negative length, or not integers.
        LayoutError: the last axis does not consist of whole blocks of ``dtype``.
    """
    try:
        result = tuple(map(as_index, shape)) if isinstance(shape, (tuple, list)) else _lengths(shape)
    except TypeError:
        raise ShapeError(f"a shape is a tuple of integers, not {shape!r}") from None
    if len(result) > MAX_NDIM:
        raise ShapeError(f"shape {result} has {len(result)} axes; at most {MAX_NDIM} are possible")
    if result and min(result) < 0:
        raise ShapeError(f"shape {result} has a negative length")
    if dtype.block > 1 and (not result or result[-1] % dtype.block):
        raise LayoutError(f"shape {result}: the last axis of {dtype} must be a multiple of its block of {dtype.block}")
    return result


def _lengths(shape: Any) -> Shape:
    """A shape that is one integer, or an iterable of them; raises `TypeError` for other values."""
    try:
        return (as_index(shape),)
    except TypeError:
        return tuple(map(as_index, shape))


def nbytes(shape: Shape, dtype: DType) -> int:
    """Bytes of a dense tensor of this shape (in elements) and dtype."""
    return prod(shape) // dtype.block * dtype.itemsize


def round_up(n: int, to: int) -> int:
    """The smallest multiple of ``to`` that is not below ``n``."""
    return -(-n // to) * to


def array_shape(shape: Shape, dtype: DType) -> Shape:
    """The shape of the host array for a tensor. Of quantized tensors its last axis counts bytes (``uint8``)."""
    return (*shape[:-1], dtype.row_bytes(shape[-1])) if dtype.block > 1 else shape


def dense_strides(shape: Shape, dtype: DType) -> Strides:
    """Row-major strides in bytes; raises `ShapeError` if the tensor exceeds the 63-bit range of byte offsets."""
    step = dtype.itemsize
    lengths = shape
    strides = []
    if dtype.block > 1:
        strides.append(step)
        step *= shape[-1] // dtype.block
        shape = shape[:-1]
    for length in reversed(shape):
        strides.append(step)
        step *= length
    if not step:  # of an empty tensor NumPy and drivers check the lengths that are not 0
        step = prod([n for n in lengths if n]) * dtype.itemsize
    if step >= _ADDRESSES:
        raise ShapeError(f"shape {lengths} of {dtype} has more bytes than the address space")
    strides.reverse()
    return tuple(strides)


def is_dense(shape: Shape, strides: Strides, dtype: DType) -> bool:
    """Whether the elements lie row-major without gaps. Axes of length 1 may have any stride."""
    step = dtype.itemsize
    axis = len(shape) - 1
    if dtype.block > 1:
        if strides[axis] != step and shape[axis] > dtype.block:
            return False
        step *= shape[axis] // dtype.block
        axis -= 1
    while axis >= 0:
        length = shape[axis]
        if length != 1:
            if strides[axis] != step:
                return length == 0 or 0 in shape
            step *= length
        axis -= 1
    return True


def span(shape: Shape, strides: Strides, dtype: DType) -> int:
    """Bytes from the start of the first to the end of the last element, for non-negative strides; 0 if there are no
    elements."""
    if 0 in shape:
        return 0
    end = dtype.itemsize
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = length // dtype.block if dtype.block > 1 and axis == len(shape) - 1 else length
        end += (steps - 1) * stride
    return end


def normalize_axis(axis: int, ndim: int) -> int:
    """``axis`` as a non-negative index; raises `BoundsError` outside of ``-ndim .. ndim - 1``."""
    axis = as_index(axis)
    if not -ndim <= axis < ndim:
        raise BoundsError(f"axis {axis} is out of range for {ndim} axes")
    return axis % ndim


def normalize_axes(axes: int | tuple[int, ...] | list[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes as sorted non-negative indices; ``None`` means all.

    Raises:
        BoundsError: an axis is outside of ``-ndim .. ndim - 1``.
        ShapeError: an axis is named twice.
    """
    if axes is None:
        return tuple(range(ndim))
    if not isinstance(axes, (tuple, list)):
        axes = (axes,)
    result = sorted(normalize_axis(a, ndim) for a in axes)
    if len(set(result)) != len(result):
        raise ShapeError(f"axes {tuple(axes)} name an axis twice")
    return tuple(result)


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The common shape by NumPy's broadcasting rule; raises `ShapeError` if there is none."""
    first = shapes[0]
    if all(s == first for s in shapes):
        return first
    ndim = max(map(len, shapes))
    result = []
    for axis in range(-ndim, 0):
        lengths = {s[axis] for s in shapes if len(s) >= -axis} - {1}
        if len(lengths) > 1:
            raise ShapeError(f"shapes {' and '.join(map(str, shapes))} do not broadcast: axis {axis} differs")
        result.append(lengths.pop() if lengths else 1)
    return tuple(result)


def broadcast_strides(shape: Shape, strides: Strides, to: Shape) -> Strides:
    """Strides of a window of ``shape`` broadcast to ``to``, with 0 along repeated axes; raises `ShapeError` if
    ``shape`` does not broadcast to it."""
    lead = len(to) - len(shape)
    if lead < 0 or any(have not in (1, want) for have, want in zip(shape, to[lead:], strict=True)):
        raise ShapeError(f"shape {shape} does not broadcast to {to}")
    return (0,) * lead + tuple(
        0 if have == 1 and want != 1 else stride for have, want, stride in zip(shape, to[lead:], strides, strict=True)
    )


def resolve_reshape(shape: Shape, to: Any) -> Shape:
    """The target shape of a reshape, in which at most one length may be -1; raises `ShapeError` if it does not fit."""
    target = (as_index(to),) if not isinstance(to, (tuple, list)) else tuple(map(as_index, to))
    size, known = prod(shape), prod(n for n in target if n != -1)
    if target.count(-1) > 1 or any(n < -1 for n in target):
        raise ShapeError(f"cannot reshape {shape} to {target}: one length may be -1, none below")
    if -1 in target and known and size % known == 0:
        target = tuple(size // known if n == -1 else n for n in target)
    if prod(target) != size or -1 in target:
        raise ShapeError(f"cannot reshape {shape} to {target}: {size} elements do not fit")
    return target


def reshape_strides(shape: Shape, strides: Strides, to: Shape, dtype: DType) -> Strides | None:
    """Strides of shape ``to`` for the same elements as ``(shape, strides)``, or ``None`` if they have to be copied.

    Old and new axes are compared in the smallest groups with equal numbers of elements; the old axes of a group must
    be contiguous with each other.
    """
    if dtype.block > 1:
        if not to or not shape or shape[-1] != to[-1]:
            if is_dense(shape, strides, dtype) and to and to[-1] % dtype.block == 0:
                return dense_strides(to, dtype)
            return None
        lead = reshape_strides(shape[:-1], strides[:-1], to[:-1], u8)
        return None if lead is None else (*lead, strides[-1])
    if 0 in shape or is_dense(shape, strides, dtype):
        return dense_strides(to, dtype)
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    result: list[int] = []
    i = 0
    j = 0
    while j < len(to):
        if to[j] == 1:
            result.append(old[i - 1][1] if i else dtype.itemsize)
            j += 1
            continue
        have, want = old[i][0], to[j]
        i_end, j_end = i + 1, j + 1
        while have != want:
            if have < want:
                have *= old[i_end][0]
                i_end += 1
            else:
                want *= to[j_end]
                j_end += 1
        for k in range(i, i_end - 1):
            if old[k][1] != old[k + 1][0] * old[k + 1][1]:
                return None
        step = old[i_end - 1][1]
        group = []
        for n in reversed(to[j:j_end]):
            group.append(step)
            step *= n
        result += reversed(group)
        i, j = i_end, j_end
    return tuple(result)


def normalize_key(key: Any, shape: Shape) -> Key:
    """``key`` of NumPy's basic indexing (integers, slices, ``None``, ``...``) with one part for each axis of ``shape``,
    and ``None`` for each new axis. Keys that select the same window give equal results.

    Raises:
        BoundsError: an integer outside of its axis, more parts than axes, or more than one ``...``.
        LayoutError: a step of 0 or a negative one, or an index that is none of the above.
    """
    keys = key if isinstance(key, tuple) else (key,)
    used = sum(k is not None and k is not Ellipsis for k in keys)
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1 or used > len(shape):
        raise BoundsError(f"index {key!r} has too many parts for shape {shape}")
    at = dots[0] if dots else len(keys)
    filled = (*keys[:at], *[slice(None)] * (len(shape) - used), *keys[at + 1 :])
    parts: list[int | tuple[int, int, int] | None] = []
    axis = 0
    for k in filled:
        if k is None:
            parts.append(None)
            continue
        length = shape[axis]
        if isinstance(k, slice):
            parts.append(_normalize_slice(k, length))
        elif isinstance(k, (bool, np.bool_)):
            raise LayoutError("a bool selects by value, which no view can; take rows with embedding()")
        else:
            try:
                i = as_index(k)
            except TypeError:
                raise LayoutError(
                    f"cannot index with {type(k).__name__}; take rows with embedding(), cut windows with slices"
                ) from None
            if not -length <= i < length:
                raise BoundsError(f"index {i} is out of range for axis {axis} of length {length}")
            parts.append(i % length)
        axis += 1
    return tuple(parts)


def _normalize_slice(k: slice, length: int) -> tuple[int, int, int]:
    try:
        start, stop, step = k.indices(length)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"{k}: {error}") from None
    if step < 0:
        raise LayoutError(f"{k} has a negative step, and views only run forward")
    count = max(0, -(-(stop - start) // step))
    if not count:
        return 0, 0, 1
    # Equal windows get equal keys, so that they are one node.
    return (start, start + (count - 1) * step + 1, step) if count > 1 else (start, start + 1, 1)


def slice_window(shape: Shape, strides: Strides, offset: int, key: Key, dtype: DType) -> tuple[Shape, Strides, int]:
    """The window that ``key``, as `normalize_key` gives it, selects.

    Raises:
        LayoutError: a part that cuts a quantized block, or a new axis behind blocks.
    """
    out_shape: list[int] = []
    out_strides: list[int] = []
    axis = 0
    for part in key:
        if part is None:
            out_shape.append(1)
            out_strides.append(dtype.itemsize if axis == len(shape) else strides[axis] * shape[axis])
            continue
        stride = strides[axis]
        block = dtype.block if axis == len(shape) - 1 else 1
        axis += 1
        if isinstance(part, int):
            if block > 1:
                raise LayoutError(f"index {part} of the last axis of {shape} cuts a block of {block} {dtype} elements")
            offset += part * stride
            continue
        start, stop, step = part
        count = len(range(start, stop, step))
        if block > 1 and (start % block or count % block or (step != 1 and count)):
            raise LayoutError(
                f"slice {slice(*part)} of the last axis of {shape} cuts a block of {block} {dtype} elements"
            )
        offset += start // block * stride if count else 0
        out_shape.append(count)
        out_strides.append(stride * step)
    if dtype.block > 1 and key and key[-1] is None:
        raise LayoutError(f"a new last axis would cut the blocks of {dtype}")
    return tuple(out_shape), tuple(out_strides), offset
