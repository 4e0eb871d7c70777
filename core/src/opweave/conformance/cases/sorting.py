"""Cases of orders and running sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor

LINES: Final[tuple[tuple[Shape, int], ...]] = (
    ((1,), 0), ((7,), 0), ((1025,), 0), ((3, 5), 0), ((3, 5), 1), ((4, 257), 1), ((2, 33, 3), 1), ((70, 64), 0),
)  # fmt: skip
ORDERS: Final = ("ascending", "descending")


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, "i64"):
        for shape, axis in LINES:
            yield case("cumsum", Operand(shape, dtype), axis=axis, tag=f"axis{axis}")
        for layout in LAYOUTS:
            for axis in (0, 1):
                yield case("cumsum", Operand((5, 17), dtype, layout), axis=axis, tag=f"axis{axis}")
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape, axis in LINES:
            x = Operand(shape, dtype, values="ties")
            for descending in (False, True):
                tag = f"axis{axis}-{ORDERS[descending]}"
                yield case("argsort", x, axis=axis, descending=descending, stable=True, tag=tag)
            for k in sorted({1, (shape[axis] + 1) // 2, shape[axis]}):
                yield case("top_k", x, build=_where, k=k, axis=axis, tag=f"axis{axis}-k{k}")
        for layout in LAYOUTS:
            x = Operand((9, 17), dtype, layout)
            yield case("argsort", x, axis=1, stable=True)
            yield case("top_k", x, build=_where, k=4)
    for dtype in FLOATS:
        x = Operand((9, 40), dtype, values="special")
        for descending in (False, True):
            yield case("argsort", x, descending=descending, stable=True, tag=ORDERS[descending])
        yield case("top_k", x, build=_where, k=20)
    for descending in (False, True):  # random f32 are distinct: their order is one
        yield case("argsort", Operand((3, 129)), descending=descending, tag=f"unstable-{ORDERS[descending]}")


def _where(x: Tensor, k: int, axis: int = -1) -> Tensor:
    return ops.top_k(x, k, axis)[1]
