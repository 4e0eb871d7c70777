"""`Gathering`: the arrays of the devices put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Gathering"]

Array = np.ndarray[Any, Any]


class Gathering:
    """A call that puts arrays together along the axis in which their shapes differ from that of ``out``, or copies a
    single one of its shape."""

    __slots__ = ("_pieces",)

    def __init__(self, out: Array, parts: Sequence[Array]) -> None:
        axis = next((a for a, n in enumerate(out.shape) if n != parts[0].shape[a]), None)
        if axis is None:
            self._pieces = [(out, part) for part in parts]
            return
        pieces, start = [], 0
        for part in parts:
            stop = start + part.shape[axis]
            pieces.append((out[(slice(None),) * axis + (slice(start, stop),)], part))
            start = stop
        self._pieces = pieces

    def __call__(self) -> None:
        for place, part in self._pieces:
            np.copyto(place, part)
