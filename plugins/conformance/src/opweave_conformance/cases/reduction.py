"""Cases of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case

AXES: Final[tuple[tuple[Shape, tuple[int, ...] | None], ...]] = (
    ((1,), None),
    ((1025,), None),
    ((64,), (0,)),
    ((3, 5), None),
    ((3, 5), (0,)),
    ((3, 5), (1,)),
    ((4, 257), (1,)),
    ((257, 4), (0,)),
    ((2, 3, 33), (1,)),
    ((2, 3, 33), (0, 2)),
    ((2, 3, 4, 5), (1, 2)),
    ((2, 3, 4, 5), (0, 2)),
    ((300, 2, 9), (0, 2)),
)
WHOLE_RANGE: Final = AXES[1:2] + AXES[6:12]
"""Shapes and axes in which integers of the whole range of their type are reduced: libraries choose by these."""


TYPES: Final = {
    "sum": (*FLOATS, "i64"), "mean": FLOATS, "max": (*FLOATS, *INTS), "min": (*FLOATS, *INTS),
    "prod": (*FLOATS, "i64"), "var": FLOATS,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for name, dtypes in TYPES.items():
        for dtype in dtypes:
            yield from _reduction(name, dtype)
    for correction in (0.0, 2.0):
        yield case("var", Operand((5, 17)), axis=1, correction=correction, tag=f"correction{correction:g}")
    yield case("var", Operand((1, 3)), axis=0, tag="of-one")
    yield from _count_equal()
    yield from _argmax()


def _reduction(name: str, dtype: str) -> Iterator[Case]:
    for shape, axes in AXES:
        yield case(name, Operand(shape, dtype), axis=axes, tag=_tag(axes))
    for layout in LAYOUTS:
        for axis in (0, 1):
            if name == "var" and layout == "broadcast" and axis == 0:
                continue  # of equal elements the variance is only the rounding of their mean
            yield case(name, Operand((5, 17), dtype, layout), axis=axis, tag=f"axes{axis}")
    if as_dtype(dtype).is_integer:
        for shape, axes in WHOLE_RANGE:
            yield case(name, Operand(shape, dtype, values="ends"), axis=axes, tag=_tag(axes))
    # Long and with gaps: what kernels add up in stages, with something left over.
    yield case(name, Operand((301, 3), dtype, "sliced"), axis=None, tag="all")
    if as_dtype(dtype).is_float:
        yield case(name, Operand((9, 12), dtype, values="special"), axis=-1, tag="axes1")


def _tag(axes: tuple[int, ...] | None) -> str:
    return "all" if axes is None else "axes" + "".join(map(str, axes))


def _count_equal() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape in ((), (1,), (1025,), (5, 17), (2, 3, 33)):
            x = Operand(shape, dtype, values="ties")
            yield case("count_equal", x, x)
        for layout in LAYOUTS:
            odd, even = Operand((5, 17), dtype, layout, "ties"), Operand((5, 17), dtype, values="ties")
            yield case("count_equal", odd, even)
    yield case("count_equal", Operand((67,), values="special"), build=lambda x: ops.count_equal(x, x))


def _argmax() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTS):
        for shape, axis in (((1,), 0), ((1025,), 0), ((3, 5), 0), ((3, 5), 1), ((4, 257), 1), ((2, 3, 33), 1)):
            for values in ("normal", "ties"):
                yield case("argmax", Operand(shape, dtype, values=values), axis=axis, tag=f"axis{axis}")
        for layout in LAYOUTS:
            yield case("argmax", Operand((5, 17), dtype, layout), axis=1, tag="axis1")
        if as_dtype(dtype).is_float:
            special = Operand((9, 12), dtype, values="special")
            yield case("argmax", special, axis=1, tag="axis1")
