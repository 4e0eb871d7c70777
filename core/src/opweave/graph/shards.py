"""`Shards`: the parts of a read-only leaf that is split over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.tensor import Tensor

__all__ = ["Shards", "part_of", "parts_of"]


class Shards(NamedTuple):
    """The parts of a read-only leaf, each a leaf of its own.

    Attributes:
        axis: the axis along which the leaf was cut.
        cuts: the first index of each part along that axis, in elements, and last the length of the axis.
        parts: the leaves of the parts, in the order of the axis.
        devices: the name of the device of each part.
    """

    axis: int
    cuts: tuple[int, ...]
    parts: tuple[Tensor, ...]
    devices: tuple[str, ...]

    def values(self, whole: np.ndarray[Any, Any], part: int) -> np.ndarray[Any, Any]:
        """The values of a part as a dense array, given those of the whole leaf: a view of them where that is dense."""
        at = part_of(self.parts[part].dtype, self.axis, self.parts[part].ndim, *self.cuts[part : part + 2])
        return np.ascontiguousarray(whole[at])


def parts_of(whole: Tensor) -> tuple[Tensor, ...]:
    """The parts of a leaf, none where it is not in shards."""
    return () if whole.leaf is None or whole.leaf.shards is None else whole.leaf.shards.parts


def part_of(dtype: DType, axis: int, ndim: int, start: int, stop: int) -> tuple[slice, ...]:
    """The index that selects elements ``start`` to ``stop`` along ``axis`` of the array of a tensor's values. Where the
    dtype consists of blocks, the last axis of that array counts bytes, and the index does too."""
    if dtype.block > 1 and axis == ndim - 1:
        start, stop = dtype.row_bytes(start), dtype.row_bytes(stop)
    return (*[slice(None)] * axis, slice(start, stop))
