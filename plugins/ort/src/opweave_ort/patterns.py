"""Which models one session serves: those of one skeleton (`skeleton_of`), with lengths and constants that its `Pattern`
allows.

The first model of a skeleton gets a session for exactly its shapes. When a model of other sizes comes, lengths that
differ become symbolic, and constants that differ, which are shapes and masks, become inputs: the session is opened
again for all sizes, and the copies of weights that it had packed before are freed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from opweave_ort.model import Model

__all__ = ["Pattern", "skeleton_of"]

Array = np.ndarray[Any, Any]
Lengths = tuple[int | str, ...]


def skeleton_of(model: Model) -> Hashable:
    """Equal for models that differ in lengths of axes and values of constants only."""
    return (
        tuple([(v.name, v.dtype, len(v.shape)) for v in (*model.inputs, *model.outputs)]),
        tuple(model.weights),
        tuple([(name, array.dtype.str, array.ndim) for name, array in model.constants.items()]),
        tuple([node.key for node in model.nodes]),
    )


class Pattern(NamedTuple):
    """The models of a skeleton that a session serves.

    Attributes:
        lengths: name of each input, output and constant -> its shape; a length that may vary is a name.
        constants: those that all of these models have; others are inputs of the session.
    """

    lengths: Mapping[str, Lengths]
    constants: Mapping[str, Array]

    @classmethod
    def of(cls, model: Model) -> Pattern:
        """The pattern that only this model fits."""
        return cls(_shapes(model), model.constants)

    @property
    def symbols(self) -> set[str]:
        """The lengths that may vary."""
        return {n for shape in self.lengths.values() for n in shape if isinstance(n, str)}

    def fits(self, model: Model) -> bool:
        """Whether a model of the skeleton is one of these."""
        sizes: dict[str, int] = {}
        for name, shape in _shapes(model).items():
            for ours, length in zip(self.lengths[name], shape, strict=True):
                if (sizes.setdefault(ours, length) if isinstance(ours, str) else ours) != length:
                    return False
        return all(_same(array, model.constants[name]) for name, array in self.constants.items())

    def widened(self, model: Model) -> Pattern:
        """The pattern of these models and another one of the skeleton."""
        names: dict[tuple[int | str, int], str] = {}

        def common(ours: int | str, length: int) -> int | str:
            return ours if ours == length else names.setdefault((ours, length), f"n{len(names)}")

        lengths = {
            name: tuple([common(*pair) for pair in zip(self.lengths[name], shape, strict=True)])
            for name, shape in _shapes(model).items()
        }
        same = {name: a for name, a in self.constants.items() if _same(a, model.constants[name])}
        return Pattern(lengths, same)


def _same(a: Array, b: Array) -> bool:
    """Whether two constants of one type are equal, NaN and -0 included."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    shapes = {value.name: value.shape for value in (*model.inputs, *model.outputs)}
    return shapes | {name: array.shape for name, array in model.constants.items()}
