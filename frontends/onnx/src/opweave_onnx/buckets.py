"""`Buckets`: a few lengths of dynamic axes, to which inputs are padded, so that few programs serve all lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np

from opweave.errors import ShapeError, UnknownNameError
from opweave_onnx.graphs import Graph, Value

__all__ = ["Buckets"]


class Buckets:
    """Pads and cuts.

    Attributes:
        lengths: name of an axis -> lengths, ascending.
    """

    def __init__(self, lengths: Mapping[str, Sequence[int]], graph: Graph) -> None:
        """Check the names and lengths.

        Raises:
            UnknownNameError: no input has such an axis.
            ShapeError: lengths that are none; an output of which the file does not say where the axis is.
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
        self.lengths: Final = {name: sorted(given) for name, given in lengths.items()}

    def combinations(self) -> Iterator[dict[str, int]]:
        """Every combination of lengths."""
        for chosen in product(*self.lengths.values()):
            yield dict(zip(self.lengths, chosen, strict=True))

    def pad(self, feeds: Mapping[str, Any], inputs: Sequence[Value], lengths: Mapping[str, int]) -> dict[str, Any]:
        """The feeds, padded with zeros to the next lengths."""
        result = dict(feeds)
        for value in inputs:
            missing = [
                self._next(axis, lengths) - lengths[axis] if axis in self.lengths else 0 for axis in value.shape or ()
            ]
            if any(missing):
                result[value.name] = np.pad(feeds[value.name], [(0, n) for n in missing])
        return result

    def cut(self, results: Mapping[str, Any], outputs: Sequence[Value], lengths: Mapping[str, int]) -> dict[str, Any]:
        """The results, without what comes of padding."""
        found = {}
        for value in outputs:
            window = [slice(lengths[axis]) if axis in self.lengths else slice(None) for axis in value.shape or ()]
            found[value.name] = np.ascontiguousarray(results[value.name][tuple(window)])
        return found

    def _next(self, axis: Any, lengths: Mapping[str, int]) -> int:
        n = lengths[axis]
        return next((length for length in self.lengths[axis] if length >= n), n)
