"""Fewest axes for a walk over several operands: axes that every operand steps through evenly become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave.contract import Arg

__all__ = [
    "MAX_AXES", "Axes", "coalesce", "element_offset", "element_strides", "nested", "optional_strides", "padded",
    "padded_strides",
]  # fmt: skip

MAX_AXES = 8
"""The most axes that a kernel takes; also opweave's limit."""

Axes = tuple[int, ...]


def element_strides(arg: Arg) -> Axes:
    """Strides in elements."""
    return tuple(s // arg.dtype.itemsize for s in arg.strides)


def optional_strides(arg: Arg | None, axes: int) -> Axes:
    """Strides in elements; zeros along ``axes`` axes for an operand that is left out."""
    return (0,) * axes if arg is None else element_strides(arg)


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


def nested(shape: Sequence[int], strides: Sequence[Sequence[int]], vector: int) -> tuple[Axes, list[Axes]]:
    """The same elements with the fewest axes in an order that suits vectors, **innermost first**; any order will do.

    The innermost axis is long, and steps from one element to the next in as many operands as possible; the second is
    the longest of the others.

    Args:
        shape, strides: as for `coalesce`; the last operand is the output.
        vector: elements that are computed at once.

    Returns:
        As `coalesce`, but at least two axes.
    """
    axes = sorted(range(len(shape)), key=lambda axis: -abs(strides[-1][axis]))
    lengths, steps = coalesce([shape[a] for a in axes], [[own[a] for a in axes] for own in strides])
    if len(lengths) > 1:
        inner = max(range(len(lengths)), key=lambda axis: _worth(lengths[axis], [own[axis] for own in steps], vector))
        second = max((axis for axis in range(len(lengths)) if axis != inner), key=lengths.__getitem__)
        order = [inner, second, *(axis for axis in range(len(lengths)) if axis not in (inner, second))]
        return tuple([lengths[a] for a in order]), [tuple([own[a] for a in order]) for own in steps]
    return (*lengths, 1), [(*own, 0) for own in steps]


def _worth(length: int, steps: Sequence[int], vector: int) -> int:
    """How well an axis is walked by vectors: whole ones, and those that are loaded at once."""
    return min(length, 4 * vector) * (1 + 3 * sum(step in (0, 1) for step in steps))


def padded(values: Sequence[int], fill: int, length: int = MAX_AXES) -> Axes:
    """``values`` lengthened to ``length`` with ``fill``."""
    return (*values, *(fill,) * (length - len(values)))


def padded_strides(strides: Iterable[Sequence[int]]) -> list[int]:
    """The strides of several operands in a row, each lengthened to `MAX_AXES` with zeros."""
    return [step for own in strides for step in padded(own, 0)]
