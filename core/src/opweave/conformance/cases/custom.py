"""Cases of `custom`: the arrays that the function gets, and how its result is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case
from opweave.graph.tensor import Tensor

Array = np.ndarray[Any, Any]


def _outer(a: Array, b: Array) -> Array:
    return np.outer(a, b)


def _mixed(a: Array, b: Array) -> Array:
    return a + b + b


def _turned(a: Array) -> Array:
    """A view of its source, which is not to be stored over the source's own bytes."""
    return a.T


def _count(a: Array) -> int:
    return int((a > 0).sum())


def _numbers() -> Array:
    return np.arange(12.0).reshape(3, 4)


def _greedy(a: Array) -> Array:
    """Clears its source where it can: sources are others' values, and not to be written."""
    try:
        a[...] = 0
    except ValueError:
        return a * 2
    return a


def _mix(a: Tensor, b: Tensor) -> Tensor:
    return ops.custom(_mixed, a, b, like=a)


def cases() -> Iterator[Case]:
    yield case("custom", lambda a, b: ops.custom(_outer, a, b, like=((3, 5), "f32")), Operand((3,)), Operand((5,)))
    for dtype in (*FLOATS, *INTS):
        yield case("custom", _mix, Operand((3, 5), dtype), Operand((3, 5), dtype))
    for layout in LAYOUTS:
        yield case("custom", _mix, Operand((5, 17), "f32", layout), Operand((5, 17)))
        yield case("custom", _mix, Operand((5, 17)), Operand((5, 17), "f32", layout), tag="right")
    yield case("custom", _mix, Operand((7, 9), values="special"), Operand((7, 9)))
    yield case("custom", lambda a: ops.custom(_turned, a, like=((5, 3), "f32")), Operand((3, 5)), tag="turned")
    yield case("custom", lambda a: ops.custom(_greedy, a, like=a), Operand((3, 5)), tag="greedy")
    yield case("custom", lambda a: ops.custom(_count, a, like=((), "i32")), Operand((3, 5)), tag="count")
    for like in ("f64", "f16", "bf16", "i32", "u8"):

        def convert(a: Tensor, b: Tensor, like: str = like) -> Tensor:
            return ops.custom(_mixed, a, b, like=(a.shape, like))

        x = Operand((16, 24), values="positive")
        yield case("custom", convert, x, x, tag=f"to-{like}")
        yield case("custom", lambda like=like: ops.custom(_numbers, like=((3, 4), like)), tag=f"{like}-numbers")
