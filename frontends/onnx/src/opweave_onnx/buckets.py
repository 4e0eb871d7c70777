"""`Buckets`: lengths of dynamic axes to which inputs are padded, so that a few programs run inputs of all lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from opweave.errors import ShapeError, UnknownNameError
from opweave_onnx.graphs import Graph, Value

__all__ = ["Buckets"]


class Buckets:
    """Pads inputs to the lengths of buckets, and slices the results back.

    Attributes:
        lengths: name of a dynamic axis -> its lengths, ascending.
    """

    def __init__(self, lengths: Mapping[str, Sequence[int]], graph: Graph, max_programs: int) -> None:
        """Check the names and lengths.

        Raises:
            UnknownNameError: no input has such an axis.
            ShapeError: lengths that are no positive integers; an output whose axes the file does not declare; more
                combinations of lengths than ``max_programs``.
        """
        names = {axis for value in graph.inputs for axis in value.shape or () if isinstance(axis, str)}
        for name, given in lengths.items():
            if name not in names:
                raise UnknownNameError("dynamic axis", str(name), names)
            if not given or not all(isinstance(n, int) and n > 0 for n in given):
                raise ShapeError(f"buckets of the axis {name!r} are positive integers, not {given!r}")
        for value in graph.outputs if lengths else ():
            if value.shape is None or None in value.shape:
                raise ShapeError(f"the file does not say the axes of the output {value.name!r}; it cannot be cut")
        self.lengths: Final = {name: sorted(set(given)) for name, given in lengths.items()}
        count = prod([len(given) for given in self.lengths.values()])
        if lengths and count > max_programs:
            raise ShapeError(
                f"the buckets have {count} combinations, and {max_programs} programs are kept (max_programs)"
            )

    def combinations(self, least: Mapping[str, int] | None = None) -> list[dict[str, int]]:
        """All combinations of lengths in which no length is below that in ``least``, sorted by the product of
        lengths."""
        given = least or {}
        rows = [[n for n in lengths if n >= given.get(axis, 0)] for axis, lengths in self.lengths.items()]
        return [dict(zip(self.lengths, chosen, strict=True)) for chosen in sorted(product(*rows), key=prod)]

    def next(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """For each axis the smallest length to which it can be padded; a length above all of them stays as it is."""
        return {
            axis: next((n for n in known if n >= lengths[axis]), lengths[axis]) for axis, known in self.lengths.items()
        }

    def shaped(self, feeds: Mapping[str, Any], inputs: Sequence[Value], to: Mapping[str, int]) -> dict[str, Any]:
        """Zeros of the shapes that the feeds have once they are padded to the lengths ``to``; broadcast, so that they
        take no memory."""
        result = dict(feeds)
        for value in inputs:
            if value.shape is not None:
                shape = [to.get(str(axis), n) for axis, n in zip(value.shape, feeds[value.name].shape, strict=True)]
                result[value.name] = np.broadcast_to(np.zeros((), feeds[value.name].dtype), shape)
        return result

    def pad(self, feeds: Mapping[str, Any], inputs: Sequence[Value], to: Mapping[str, int]) -> dict[str, Any]:
        """The feeds, padded with zeros to the lengths ``to``."""
        result = dict(feeds)
        for value in inputs:
            if value.shape is not None:
                given = feeds[value.name]
                missing = [to.get(str(axis), n) - n for axis, n in zip(value.shape, given.shape, strict=True)]
                if any(missing):
                    result[value.name] = np.pad(given, [(0, n) for n in missing])
        return result

    def cut(self, results: Mapping[str, Any], outputs: Sequence[Value], lengths: Mapping[str, int]) -> dict[str, Any]:
        """The results without the elements behind the given lengths, which come from padding."""
        found = {}
        for value in outputs:
            window = [slice(lengths[axis]) if axis in self.lengths else slice(None) for axis in value.shape or ()]
            found[value.name] = np.ascontiguousarray(results[value.name][tuple(window)])
        return found
