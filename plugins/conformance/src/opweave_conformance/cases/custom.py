"""Cases of `custom`: the arrays that the function gets, and how its result is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case

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
    """Clears its source where it can. Sources are read-only: they are values of other nodes."""
    try:
        a[...] = 0
    except ValueError:
        return a * 2
    return a


def _mix(a: Tensor, b: Tensor) -> Tensor:
    return ops.custom(_mixed, a, b, like=a)


def cases() -> Iterator[Case]:
    yield case(
        "custom", Operand((3,)), Operand((5,)), build=lambda a, b: ops.custom(_outer, a, b, like=((3, 5), "f32"))
    )
    for dtype in (*FLOATS, *INTS):
        yield case("custom", Operand((3, 5), dtype), Operand((3, 5), dtype), build=_mix)
    for layout in LAYOUTS:
        yield case("custom", Operand((5, 17), "f32", layout), Operand((5, 17)), build=_mix)
        yield case("custom", Operand((5, 17)), Operand((5, 17), "f32", layout), build=_mix, tag="right")
    yield case("custom", Operand((7, 9), values="special"), Operand((7, 9)), build=_mix)
    yield case("custom", Operand((3, 5)), build=lambda a: ops.custom(_turned, a, like=((5, 3), "f32")), tag="turned")
    yield case("custom", Operand((3, 5)), build=lambda a: ops.custom(_greedy, a, like=a), tag="greedy")
    yield case("custom", Operand((3, 5)), build=lambda a: ops.custom(_count, a, like=((), "i32")), tag="count")
    for like in ("f64", "f16", "bf16", "i32", "u8"):

        def convert(a: Tensor, b: Tensor, like: str = like) -> Tensor:
            return ops.custom(_mixed, a, b, like=(a.shape, like))

        x = Operand((16, 24), values="positive")
        yield case("custom", x, x, build=convert, tag=f"to-{like}")
        yield case("custom", build=lambda like=like: ops.custom(_numbers, like=((3, 4), like)), tag=f"{like}-numbers")
