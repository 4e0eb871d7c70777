"""Fewest axes for a walk over several operands: axes that every operand steps through evenly become one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from opweave.contract import Arg

__all__ = ["MAX_AXES", "Axes", "coalesce", "element_offset", "element_strides", "padded"]

MAX_AXES = 8
"""The most axes that a kernel takes; also opweave's limit."""

Axes = tuple[int, ...]


def element_strides(arg: Arg) -> Axes:
    """Strides in elements."""
    return tuple(s // arg.dtype.itemsize for s in arg.strides)


def element_offset(arg: Arg) -> int:
    """Place of the first element in its buffer, in elements."""
    return arg.offset // arg.dtype.itemsize


def coalesce(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[Axes, list[Axes]]:
    """The same walk with the fewest axes, **innermost first**.

    Args:
        shape: lengths, outermost first.
        strides: of each operand, in elements, outermost first; 0 where it is repeated.

    Returns:
        Lengths, and each operand's strides; at least one axis (of length 1 for a single element).
    """
    lengths: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in reversed(range(len(shape))):
        length = shape[axis]
        if length == 1:
            continue
        if lengths and all(own[axis] == step[-1] * lengths[-1] for own, step in zip(strides, steps, strict=True)):
            lengths[-1] *= length
            continue
        lengths.append(length)
        for own, step in zip(strides, steps, strict=True):
            step.append(own[axis])
    if not lengths:
        return (1,), [(1,) for _ in strides]
    return tuple(lengths), [tuple(step) for step in steps]


def padded(values: Sequence[int], fill: int, length: int = MAX_AXES) -> Axes:
    """``values`` lengthened to ``length`` with ``fill``."""
    return (*values, *(fill,) * (length - len(values)))


def rest(shape: Sequence[int], skip: int) -> int:
    """Elements of the axes from ``skip`` on."""
    return prod(shape[skip:])
