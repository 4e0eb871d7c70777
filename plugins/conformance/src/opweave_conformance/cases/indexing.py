"""Cases of reading and writing by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

TABLES: Final[tuple[tuple[Shape, Shape], ...]] = (
    ((1, 1), (1,)),
    ((7, 5), (3,)),
    ((64, 33), (64,)),
    ((9,), (4,)),
    ((9, 2, 3), (4,)),
    ((9, 8), ()),
    ((9, 8), (2, 3)),
)


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, "i32"):
        for index in ("i32", "i64"):
            for shape, count in TABLES:
                ids = Operand(count, index, values="ids", high=shape[0])
                yield case("embedding", Operand(shape, dtype), ids)
                if len(count) == 1:
                    state = Operand(shape, dtype, state=True)
                    yield case("index_copy", state, ids, Operand((*count, *shape[1:]), dtype))
                    yield case("set_rows", Operand(shape, dtype), ids, Operand((*count, *shape[1:]), dtype))
        for layout in LAYOUTS:
            table = Operand((9, 16), dtype, layout)
            ids = Operand((4,), "i64", values="ids", high=9)
            yield case("embedding", table, ids)
            laid = Operand((4,), "i64", "sliced", "ids", 9)
            yield case("embedding", Operand((9, 16), dtype), laid, tag=layout)
            rows = Operand((4, 16), dtype, layout)
            yield case("index_copy", Operand((9, 16), dtype, state=True), ids, rows, tag="rows")
            yield case("set_rows", Operand((9, 16), dtype), ids, rows, tag="rows")
            yield case("set_rows", table, ids, Operand((4, 16), dtype), tag="tensor")
            if layout != "broadcast":
                region = Operand((9, 16), dtype, layout, state=True)
                yield case("index_copy", region, ids, Operand((4, 16), dtype), tag="state")
        yield from _written(dtype)
        yield from _taken(dtype)
        yield from _added(dtype)
        yield from _regions(dtype)


def _written(dtype: str) -> Iterator[Case]:
    for name in ("assign", "accumulate"):
        for shape in ((1,), (), (65,), (2, 3, 4)):
            yield case(name, Operand(shape, dtype, state=True), Operand(shape, dtype))
        for layout in LAYOUTS:
            whole, value = Operand((5, 17), dtype, state=True), Operand((5, 17), dtype)
            yield case(name, whole, value._replace(layout=layout), tag="value")
            if layout != "broadcast":
                yield case(name, whole._replace(layout=layout), value, tag="region")


def _taken(dtype: str) -> Iterator[Case]:
    for index in ("i32", "i64"):
        for shape, count, axis in (
            ((1,), (1,), 0),
            ((9,), (20,), 0),
            ((4, 9), (4, 3), 1),
            ((9, 33), (4, 33), 0),
            ((2, 9, 5), (2, 3, 5), 1),
            ((2, 3, 257), (2, 3, 64), 2),
            ((70_000, 3), (70_000, 2), 1),
        ):
            ids = Operand(count, index, values="ids", high=shape[axis])
            yield case("take_along_axis", Operand(shape, dtype), ids, axis=axis, tag=f"axis{axis}")
    for layout in LAYOUTS:
        for axis in (0, 1):
            plain, laid = Operand((17, 17), dtype), Operand((17, 17), dtype, layout)
            ids = Operand((17, 17), "i64", values="ids", high=17)
            yield case("take_along_axis", laid, ids, axis=axis, tag=f"axis{axis}")
            yield case("take_along_axis", plain, ids._replace(layout=layout), axis=axis, tag=f"axis{axis}")


def _added(dtype: str) -> Iterator[Case]:
    for index in ("i32", "i64"):
        for count, rest, n in (
            ((1,), (1,), 1),
            ((12,), (), 5),
            ((12,), (5,), 5),
            ((3,), (33,), 64),
            ((4,), (2, 3), 9),
            ((2, 3), (8,), 9),
            ((), (8,), 3),
            ((70_000,), (3,), 30_000),
        ):
            ids, rows = Operand(count, index, values="ids", high=n), Operand((*count, *rest), dtype)
            yield case("index_add", ids, rows, n=n, tag=f"to{n}")
    for layout in LAYOUTS:
        ids = Operand((4,), "i64", values="ids", high=7)
        yield case("index_add", ids, Operand((4, 16), dtype, layout), n=7, tag="rows")
        yield case("index_add", ids._replace(layout="sliced"), Operand((4, 16), dtype), n=7, tag=layout)
        many = Operand((5, 3), "i32", layout, "ids", 7)
        yield case("index_add", many, Operand((5, 3, 8), dtype, layout), n=7, tag="two-axes")


def _regions(dtype: str) -> Iterator[Case]:
    for name in ("set_region", "add_region"):
        for shape, part, offsets in (
            ((1,), (1,), (0,)),
            ((64,), (7,), (57,)),
            ((5, 17), (5, 17), (0, 0)),
            ((5, 17), (2, 3), (1, 4)),
            ((2, 3, 8), (1, 3, 2), (1, 0, 6)),
        ):
            tag = "at" + "x".join(map(str, offsets))
            yield case(name, Operand(shape, dtype), Operand(part, dtype), offsets=offsets, tag=tag)
        for layout in LAYOUTS:
            whole, rows, at = Operand((9, 16), dtype), Operand((4, 8), dtype), (1, 4)
            yield case(name, whole._replace(layout=layout), rows, offsets=at, tag="into")
            yield case(name, whole, rows._replace(layout=layout), offsets=at, tag="of")
