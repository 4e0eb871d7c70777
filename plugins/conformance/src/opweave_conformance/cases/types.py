"""One small case for each dtype that an operation takes and its family's cases leave out: rare integers, bool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from opweave import ops
from opweave_conformance.case import Case, Operand, case

Array = np.ndarray[Any, Any]
SMALL = ("i16", "i8", "u8")
RARE = ("i64", *SMALL)


def cases() -> Iterator[Case]:
    ids, routes = Operand((3,), "i32", values="ids", high=4), Operand((3, 2), "i32", values="ids", high=4)
    for t in SMALL:
        yield case("matmul", Operand((3, 9), t), Operand((9, 5), t))
        yield case("linear", Operand((3, 9), t), Operand((5, 9), t), Operand((5,), t))
    for t in RARE:
        yield case("expert_linear", Operand((3, 9), t), Operand((4, 5, 9), t), routes)
        yield case("add_expert", Operand((3, 2, 5), t), Operand((4, 5), t), routes)
        yield case("index_add", ids, Operand((3, 5), t), n=4, tag="small")
        yield case("accumulate", Operand((3, 5), t, state=True), Operand((3, 5), t))
        yield case("add_region", Operand((3, 5), t), Operand((2, 4), t), offsets=(1, 0))
    for t in ("i32", *RARE):
        yield case("max_pool1d", Operand((2, 3, 9), t), kernel_size=3, tag="small")
    for t in (*RARE, "bool"):
        yield case("embedding", Operand((4, 5), t), ids)
        where = Operand((4, 3), "i32", values="ids", high=5)
        yield case("take_along_axis", Operand((4, 5), t), where)
        yield case("index_copy", Operand((4, 5), t, state=True), ids, Operand((3, 5), t))
        yield case("set_rows", Operand((4, 5), t), ids, Operand((3, 5), t))
        yield case("assign", Operand((3, 5), t, state=True), Operand((3, 5), t))
        yield case("set_region", Operand((3, 5), t), Operand((2, 4), t), offsets=(1, 0))
    for t in ("i64", "i16", "i8"):
        yield case("im2col", Operand((1, 2, 4, 5), t), kernel_size=2, tag="small")
        yield case("interpolate", Operand((1, 2, 4, 5), t), size=(7, 3), tag="small")
    for t in ("i32", "u8"):
        yield case("interpolate", Operand((1, 2, 5), t), size=7, tag="small")
    x = Operand((3, 17), "bool")
    for name in ("max", "min"):
        yield case(name, x, axis=1, tag="axis1")
    yield case("argmax", x, axis=1, tag="axis1")
    yield case("custom", x, build=lambda a: ops.custom(_backwards, a, like=a))


def _backwards(a: Array) -> Array:
    return a[::-1]
