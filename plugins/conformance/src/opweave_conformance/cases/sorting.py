"""Cases of orders and running sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case

LINES: Final[tuple[tuple[Shape, int], ...]] = (
    ((1,), 0), ((7,), 0), ((1025,), 0), ((3, 5), 0), ((3, 5), 1), ((4, 257), 1), ((2, 33, 3), 1), ((70, 64), 0),
)  # fmt: skip
ORDERS: Final = ("ascending", "descending")


def cases() -> Iterator[Case]:
    yield from _running_sums()
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape, axis in LINES:
            x = Operand(shape, dtype, values="ties")
            for descending in (False, True):
                tag = f"axis{axis}-{ORDERS[descending]}"
                yield case("argsort", x, axis=axis, descending=descending, tag=tag)
            for k in sorted({1, (shape[axis] + 1) // 2, shape[axis]}):
                yield case("top_k", x, build=where, k=k, axis=axis, tag=f"axis{axis}-k{k}")
        for layout in LAYOUTS:
            x = Operand((9, 17), dtype, layout)
            yield case("argsort", x, axis=1)
            yield case("top_k", x, build=where, k=4)
        yield from _alike(dtype)
    for dtype in FLOATS:
        x = Operand((9, 40), dtype, values="special")
        for descending in (False, True):
            yield case("argsort", x, descending=descending, tag=ORDERS[descending])
        yield case("top_k", x, build=where, k=20)
    for descending in (False, True):  # random f32 are distinct: their order is one
        yield case(
            "argsort", Operand((3, 129)), descending=descending, stable=False, tag=f"unstable-{ORDERS[descending]}"
        )


def _running_sums() -> Iterator[Case]:
    for dtype in (*FLOATS, "i64"):
        for shape, axis in LINES:
            yield case("cumsum", Operand(shape, dtype), axis=axis, tag=f"axis{axis}")
        for layout in LAYOUTS:
            for axis in (0, 1):
                yield case("cumsum", Operand((5, 17), dtype, layout), axis=axis, tag=f"axis{axis}")


def _alike(dtype: str) -> Iterator[Case]:
    """Equal elements, of which the one of the lower index comes first: few different ones with NaN and both zeros among
    them, and nothing but equal ones; in short rows and long ones, for which devices have other algorithms."""
    for shape in ((130,), (2, 4099)):
        x = Operand(shape, dtype, values="alike")
        for descending in (False, True):
            yield case("argsort", x, descending=descending, tag=ORDERS[descending])
        for k in (1, 9, shape[-1] // 2):
            yield case("top_k", x, build=where, k=k, tag=f"k{k}")
        yield case("argmax", x, axis=-1)
    same = Operand((1025, 2), dtype, "broadcast")
    for descending in (False, True):
        yield case("argsort", same, axis=0, descending=descending, tag=ORDERS[descending])
    yield case("top_k", same, build=where, k=300, axis=0)
    yield case("argmax", same, axis=0)


def where(x: Tensor, k: int, axis: int = -1) -> Tensor:
    return ops.top_k(x, k, axis)[1]
