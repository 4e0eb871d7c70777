"""Functions of arrays for `opweave.custom` in random graphs: scripts name them, and any shape and number type goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, Case, Operand, case

__all__ = ["cases", "count", "mixed", "turned"]

Array = np.ndarray[Any, Any]


def mixed(a: Array, b: Array) -> Array:
    """a + 2 b."""
    return a + b + b


def turned(a: Array) -> Array:
    """A view of its source, which is not to be stored over the source's own bytes."""
    return a.T


def count(a: Array) -> int:
    """How many elements are above 0."""
    return int((a > 0).sum())


def _mix(a: Tensor, b: Tensor) -> Tensor:
    return ops.custom(mixed, a, b, like=a)


def _turn(a: Tensor) -> Tensor:
    return ops.custom(turned, a, like=(a.shape[::-1], a.dtype))


def cases() -> list[Case]:
    """Nodes of `opweave.custom`, of which random graphs draw."""
    found = []
    for dtype in (*FLOATS, "i32"):
        x = Operand((3, 5), dtype)
        found += [case("custom", x, x, build=_mix), case("custom", x, build=_turn, tag="turned")]
    return [
        *found,
        case("custom", Operand((3, 5), "i32"), build=lambda a: ops.custom(count, a, like=((), "i32")), tag="count"),
    ]
