"""Cases of roll, flip, repeat, pad, triangles and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, STRIDED, Case, Operand, Values, case, with_options
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor

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
        yield case("contiguous", with_options(ops.tile, reps=reps), Operand((5, 17), dtype), tag=tag)
    for axis in (0, 1):
        for times in (2, 4, 9):
            options = {"repeats": times, "axis": axis}
            tag = f"repeat{times}-axis{axis}"
            yield case("contiguous", with_options(ops.repeat, **options), Operand((5, 17), dtype), tag=tag)


def _tried(
    op: str, build: Callable[..., Tensor], shapes: tuple[Shape, ...], tag: str, strided: tuple[Shape, ...] = STRIDED
) -> Iterator[Case]:
    """Every dtype in every shape; a float and an integer in every layout; values that must come out as they are."""
    for dtype in PLAIN:
        for shape in shapes:
            yield case(op, build, Operand(shape, dtype), tag=tag)
    for dtype in ("f32", "f16", "u8"):
        for shape in strided:
            for layout in LAYOUTS:
                yield case(op, build, Operand(shape, dtype, layout), tag=tag)
    special: Values = "special"
    for dtype in FLOATS:
        yield case(op, build, Operand(strided[0], dtype, values=special), tag=tag)


def _orders() -> Iterator[Case]:
    matrices: tuple[Shape, ...] = ((1, 2), (3, 5), (64, 129))
    for axis, tag in ((None, "all"), (0, "first"), (-1, "last")):
        shapes = (*matrices, (2, 3, 4)) if axis == -1 else ((2, 1), *matrices[1:], (2, 3, 4))
        yield from _tried("flip", with_options(ops.flip, axis=axis), shapes, tag)
    yield from _tried("flip", with_options(ops.flip, axis=0), ((2,), (7,), (1025,)), "vector")
    shifts: tuple[tuple[Any, Any, str], ...] = ((1, -1, "last"), (-2, 0, "first"), ((1, -1), (0, 1), "both"))
    for shift, axis, tag in shifts:
        build = with_options(ops.roll, shift=shift, axis=axis)
        yield from _tried("roll", build, ((3, 5), (64, 129), (3, 3, 4)), tag, ((5, 17), (3, 4, 8)))
    yield from _tried("roll", with_options(ops.roll, shift=3, axis=0), ((2,), (7,), (1025,)), "vector")


def _frames() -> Iterator[Case]:
    for mode in ("constant", "edge", "reflect", "wrap"):
        for widths, tag in (((1, 0), "before"), ((0, 2), "after"), ((2, 1), "around")):
            build = with_options(ops.pad, widths=widths, mode=mode)
            yield from _tried("pad", build, ((3,), (1025,), (3, 5), (3, 4, 5)), f"{mode}-{tag}", ((5, 17), (3, 4, 8)))
        widest = with_options(ops.pad, widths=((0, 0), (16, 16)), mode=mode)
        yield case("pad", widest, Operand((3, 17)), tag=f"{mode}-widest")
    for dtype, value in (("f32", 0.1), ("bf16", 0.1), ("f32", float("-inf")), ("f16", -0.0), ("i8", -128), ("bool", 1)):
        build = with_options(ops.pad, widths=1, value=value)
        yield case("pad", build, Operand((3, 5), dtype), tag=f"value{value}")


def _matrices() -> Iterator[Case]:
    shapes: tuple[Shape, ...] = ((1, 1), (3, 5), (5, 3), (64, 64), (2, 3, 4, 4))
    for name in ("tril", "triu"):
        for k in (0, 1, -2, 100):
            yield from _tried(name, with_options(getattr(ops, name), k=k), shapes, f"k{k}", ((5, 17), (2, 3, 8)))
    for offset in (0, 2, -3):
        build = with_options(ops.diag_embed, offset=offset)
        yield from _tried("diag_embed", build, ((1,), (7,), (129,), (2, 3, 4)), f"offset{offset}")
