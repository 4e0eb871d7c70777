"""Scratch memory of a kernel: a number of bytes, or named arrays whose dtypes and shapes the kernel declares once.

The core adds up their sizes, plans the memory, and passes one operand for each array to the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from opweave.errors import OpweaveError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import Shape, Strides, dense_strides, nbytes, round_up

if TYPE_CHECKING:
    from opweave.graph.dtypes import DTypeLike

__all__ = ["ArrayLayout", "Arrays", "Scratch", "Workspace", "scratch_of"]

Arrays = Mapping[str, "tuple[DTypeLike, Sequence[int]]"]
"""name -> dtype and shape. The name is that of the kernel's keyword argument."""

Workspace = int | Arrays
"""What ``workspace=`` of a kernel returns for a step: bytes, or named arrays."""

ALIGNMENT: Final = 64
"""Each array begins at a multiple of this many bytes, the size of a cache line of most processors."""


class ArrayLayout(NamedTuple):
    """Where one of the named arrays lies: ``offset`` bytes into the scratch memory of its step, dense."""

    name: str
    offset: int
    dtype: DType
    shape: Shape
    strides: Strides


class Scratch(NamedTuple):
    """The scratch memory of a step.

    Attributes:
        size: bytes.
        arrays: where the named arrays lie in it; ``None`` if the kernel asks for bytes or for nothing.
    """

    size: int = 0
    arrays: tuple[ArrayLayout, ...] | None = None


def scratch_of(wanted: Workspace, op: str) -> Scratch:
    """The scratch memory for what ``workspace=`` of a kernel of ``op`` returned.

    Raises:
        TypeError: it is neither a number of bytes nor a mapping of names to dtypes and shapes.
    """
    if isinstance(wanted, (dict, Mapping)):  # asking `Mapping` takes longer than all the rest
        try:
            return _arranged(wanted)
        except (OpweaveError, TypeError, ValueError) as error:
            raise TypeError(
                f"workspace= of {op} must return name -> (dtype, shape), not {dict(wanted)!r}: {error}"
            ) from None
    if not isinstance(wanted, int) or wanted < 0:
        raise TypeError(f"workspace= of {op} must return a number of bytes or named arrays, not {wanted!r}")
    return Scratch(wanted)


def _arranged(wanted: Arrays) -> Scratch:
    """The named arrays one after the other; those without elements are left out."""
    layouts: list[ArrayLayout] = []
    at = 0
    for name, (kind, lengths) in wanted.items():
        dtype, shape = as_dtype(kind), tuple(lengths)
        if shape and min(shape) < 0:
            raise ValueError(f"negative length in {shape}")
        size = nbytes(shape, dtype)
        if size:
            layouts.append(ArrayLayout(name, at, dtype, shape, dense_strides(shape, dtype)))
            at += round_up(size, ALIGNMENT)
    return Scratch(at, tuple(layouts))
