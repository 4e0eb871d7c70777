"""`Value`: an array in the memory of a combination, wherever its members keep it; and `Values`, which handles them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.functional import ArrayLibrary
from opweave.leaf_memory import read_leaf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opweave.graph.layout import Shape
    from opweave.graph.tensor import Tensor

__all__ = ["Kept", "Value", "Values"]


class Kept:
    """A weight or state that members keep the array of a value in, as long as a value has it."""

    __slots__ = ("__weakref__", "leaf")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf: Final = leaf


class Value:
    """An array that only a step writes to which it was donated.

    Attributes:
        shape: of the array; of a quantized type the last axis counts bytes.
        weight: the memory that it came to is for weights, so that members keep it from its first use on.
        kept: where members keep it; ``None``: it is an array of the host.
    """

    __slots__ = ("_array", "kept", "shape", "weight")

    def __init__(self, array: np.ndarray[Any, Any], weight: bool = False) -> None:
        self._array: np.ndarray[Any, Any] | None = array
        self.kept: Kept | None = None
        self.weight: Final = weight
        self.shape: Shape = array.shape

    @classmethod
    def of(cls, kept: Kept, shape: Shape) -> Value:
        """The new value of a state after a run has written it."""
        made = object.__new__(cls)
        made._array, made.kept, made.shape = None, kept, shape
        made.weight = False  # type: ignore[misc]  # as __init__ does
        return made

    def to_host(self) -> np.ndarray[Any, Any]:
        """The array; callers must not write it."""
        if self._array is not None:
            return self._array
        assert self.kept is not None
        return read_leaf(self.kept.leaf)

    def keep(self, leaf: Tensor) -> Kept:
        """Let members keep it from here on, in a leaf that has its values."""
        self.kept, self._array = Kept(leaf), None
        return self.kept


class Values(ArrayLibrary):
    """What `opweave.functional` does with values.

    Args:
        weights: the memory is for weights.
    """

    def __init__(self, weights: bool) -> None:
        self.weights: Final = weights

    def from_host(self, array: np.ndarray[Any, Any], borrowed: bool) -> Value:
        return Value(array if borrowed else array.copy(), weight=self.weights and not borrowed)

    def to_host(self, array: Value) -> np.ndarray[Any, Any]:
        return array.to_host()

    def copy(self, array: Value) -> Value:
        return Value(array.to_host().copy())

    def reshape(self, array: Value, shape: Shape) -> Value:
        return array if array.shape == tuple(shape) else Value(array.to_host().reshape(shape), weight=array.weight)

    def take(self, array: Value, index: Any) -> Value:
        return Value(np.asarray(array.to_host()[index], order="C"))

    def transpose(self, array: Value, axes: Sequence[int]) -> Value:
        return Value(np.asarray(array.to_host().transpose(axes), order="C"))

    def broadcast_to(self, array: Value, shape: Shape) -> Value:
        return Value(np.asarray(np.broadcast_to(array.to_host(), shape), order="C"))
