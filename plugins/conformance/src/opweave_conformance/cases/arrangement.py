"""Cases of roll, flip, repeat, pad, triangles and the like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opweave import ops
from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, STRIDED, Case, Operand, case

PLAIN = (*FLOATS, *INTS, "bool")


def cases() -> Iterator[Case]:
    for dtype in PLAIN:
        yield from _repeated(dtype)
    yield from _orders()
    yield from _frames()
    yield from _matrices()


def _repeated(dtype: str) -> Iterator[Case]:
    """Repeating is packing a view that shows elements again and again."""
    for reps in ((3,), (2, 1), (2, 3)):
        tag = "tile" + "x".join(map(str, reps))
        yield case("contiguous", Operand((5, 17), dtype), build=ops.tile, reps=reps, tag=tag)
    for axis in (0, 1):
        for times in (2, 4, 9):
            options = {"repeats": times, "axis": axis}
            tag = f"repeat{times}-axis{axis}"
            yield case("contiguous", Operand((5, 17), dtype), build=ops.repeat, **options, tag=tag)


def _tried(
    op: str, shapes: tuple[Shape, ...], tag: str, strided: tuple[Shape, ...] = STRIDED, **options: Any
) -> Iterator[Case]:
    """Every dtype in every shape; a float and an integer in every layout; values that must come out as they are."""
    for dtype in PLAIN:
        for shape in shapes:
            yield case(op, Operand(shape, dtype), tag=tag, **options)
    for dtype in ("f32", "f16", "u8"):
        for shape in strided:
            for layout in LAYOUTS:
                yield case(op, Operand(shape, dtype, layout), tag=tag, **options)
    for dtype in FLOATS:
        yield case(op, Operand(strided[0], dtype, values="special"), tag=tag, **options)


def _orders() -> Iterator[Case]:
    matrices: tuple[Shape, ...] = ((1, 2), (3, 5), (64, 129))
    for axis, tag in ((None, "all"), (0, "first"), (-1, "last")):
        shapes = (*matrices, (2, 3, 4)) if axis == -1 else ((2, 1), *matrices[1:], (2, 3, 4))
        yield from _tried("flip", shapes, tag, axis=axis)
    yield from _tried("flip", ((2,), (7,), (1025,)), "vector", axis=0)
    shifts: tuple[tuple[Any, Any, str], ...] = ((1, -1, "last"), (-2, 0, "first"), ((1, -1), (0, 1), "both"))
    for shift, axis, tag in shifts:
        shapes = ((3, 5), (64, 129), (3, 3, 4))
        yield from _tried("roll", shapes, tag, ((5, 17), (3, 4, 8)), shift=shift, axis=axis)
    yield from _tried("roll", ((2,), (7,), (1025,)), "vector", shift=3, axis=0)


def _frames() -> Iterator[Case]:
    for mode in ("constant", "edge", "reflect", "wrap"):
        for widths, tag in (((1, 0), "before"), ((0, 2), "after"), ((2, 1), "around")):
            shapes = ((3,), (1025,), (3, 5), (3, 4, 5))
            yield from _tried("pad", shapes, f"{mode}-{tag}", ((5, 17), (3, 4, 8)), widths=widths, mode=mode)
        yield case("pad", Operand((3, 17)), widths=((0, 0), (16, 16)), mode=mode, tag=f"{mode}-widest")
    for dtype, value in (("f32", 0.1), ("bf16", 0.1), ("f32", float("-inf")), ("f16", -0.0), ("i8", -128), ("bool", 1)):
        yield case("pad", Operand((3, 5), dtype), widths=1, value=value, tag=f"value{value}")


def _matrices() -> Iterator[Case]:
    shapes: tuple[Shape, ...] = ((1, 1), (3, 5), (5, 3), (64, 64), (2, 3, 4, 4))
    for name in ("tril", "triu"):
        for k in (0, 1, -2, 100):
            yield from _tried(name, shapes, f"k{k}", ((5, 17), (2, 3, 8)), k=k)
    for offset in (0, 2, -3):
        yield from _tried("diag_embed", ((1,), (7,), (129,), (2, 3, 4)), f"offset{offset}", offset=offset)
