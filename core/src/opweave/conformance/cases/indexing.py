"""Cases of reading and writing by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, LAYOUTS, Case, Operand, case, with_options
from opweave.graph.layout import Shape

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
                yield case("embedding", ops.embedding, Operand(shape, dtype), ids)
                if len(count) == 1:
                    state = Operand(shape, dtype, state=True)
                    yield case("index_copy", ops.index_copy, state, ids, Operand((*count, *shape[1:]), dtype))
        for layout in LAYOUTS:
            table = Operand((9, 16), dtype, layout)
            ids = Operand((4,), "i64", values="ids", high=9)
            yield case("embedding", ops.embedding, table, ids)
            laid = Operand((4,), "i64", "sliced", "ids", 9)
            yield case("embedding", ops.embedding, Operand((9, 16), dtype), laid, tag=layout)
            rows = Operand((4, 16), dtype, layout)
            yield case("index_copy", ops.index_copy, Operand((9, 16), dtype, state=True), ids, rows, tag="rows")
            whole = Operand((5, 17), dtype, state=True)
            yield case("assign", ops.assign, whole, Operand((5, 17), dtype, layout), tag="value")
            if layout != "broadcast":
                region = Operand((9, 16), dtype, layout, state=True)
                yield case("index_copy", ops.index_copy, region, ids, Operand((4, 16), dtype), tag="state")
                region = Operand((5, 17), dtype, layout, state=True)
                yield case("assign", ops.assign, region, Operand((5, 17), dtype), tag="region")
        for shape in ((1,), (), (65,), (2, 3, 4)):
            for name in ("assign", "accumulate"):
                yield case(name, getattr(ops, name), Operand(shape, dtype, state=True), Operand(shape, dtype))
        yield from _accumulated(dtype)
        yield from _taken(dtype)
        yield from _added(dtype)
        yield from _regions(dtype)


def _accumulated(dtype: str) -> Iterator[Case]:
    for layout in LAYOUTS:
        whole = Operand((5, 17), dtype, state=True)
        yield case("accumulate", ops.accumulate, whole, Operand((5, 17), dtype, layout), tag="value")
        if layout != "broadcast":
            region = Operand((5, 17), dtype, layout, state=True)
            yield case("accumulate", ops.accumulate, region, Operand((5, 17), dtype), tag="region")


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
            build = with_options(ops.take_along_axis, axis=axis)
            yield case("take_along_axis", build, Operand(shape, dtype), ids, tag=f"axis{axis}")
    for layout in LAYOUTS:
        for axis in (0, 1):
            build = with_options(ops.take_along_axis, axis=axis)
            plain, laid = Operand((17, 17), dtype), Operand((17, 17), dtype, layout)
            ids = Operand((17, 17), "i64", values="ids", high=17)
            yield case("take_along_axis", build, laid, ids, tag=f"axis{axis}")
            yield case("take_along_axis", build, plain, ids._replace(layout=layout), tag=f"axis{axis}")


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
            yield case("index_add", with_options(ops.index_add, n=n), ids, rows, tag=f"to{n}")
    for layout in LAYOUTS:
        build = with_options(ops.index_add, n=7)
        ids = Operand((4,), "i64", values="ids", high=7)
        yield case("index_add", build, ids, Operand((4, 16), dtype, layout), tag="rows")
        yield case("index_add", build, ids._replace(layout="sliced"), Operand((4, 16), dtype), tag=layout)
        many = Operand((5, 3), "i32", layout, "ids", 7)
        yield case("index_add", build, many, Operand((5, 3, 8), dtype, layout), tag="two-axes")


def _regions(dtype: str) -> Iterator[Case]:
    for name in ("set_region", "add_region"):
        function = getattr(ops, name)
        for shape, part, offsets in (
            ((1,), (1,), (0,)),
            ((64,), (7,), (57,)),
            ((5, 17), (5, 17), (0, 0)),
            ((5, 17), (2, 3), (1, 4)),
            ((2, 3, 8), (1, 3, 2), (1, 0, 6)),
        ):
            build = with_options(function, offsets=offsets)
            yield case(name, build, Operand(shape, dtype), Operand(part, dtype), tag="at" + "x".join(map(str, offsets)))
        build = with_options(function, offsets=(1, 4))
        for layout in LAYOUTS:
            yield case(name, build, Operand((9, 16), dtype, layout), Operand((4, 8), dtype), tag="into")
            yield case(name, build, Operand((9, 16), dtype), Operand((4, 8), dtype, layout), tag="of")
