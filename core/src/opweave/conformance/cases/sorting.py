"""Cases of orders and running sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case, with_options
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor

LINES: Final[tuple[tuple[Shape, int], ...]] = (
    ((1,), 0), ((7,), 0), ((1025,), 0), ((3, 5), 0), ((3, 5), 1), ((4, 257), 1), ((2, 33, 3), 1), ((70, 64), 0),
)  # fmt: skip


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, "i64"):
        for shape, axis in LINES:
            yield case("cumsum", with_options(ops.cumsum, axis=axis), Operand(shape, dtype), tag=f"axis{axis}")
        for layout in LAYOUTS:
            for axis in (0, 1):
                build = with_options(ops.cumsum, axis=axis)
                yield case("cumsum", build, Operand((5, 17), dtype, layout), tag=f"axis{axis}")
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape, axis in LINES:
            x = Operand(shape, dtype, values="ties")
            for descending in (False, True):
                build = with_options(ops.argsort, axis=axis, descending=descending, stable=True)
                yield case("argsort", build, x, tag=f"axis{axis}-{'descending' if descending else 'ascending'}")
            for k in sorted({1, (shape[axis] + 1) // 2, shape[axis]}):
                yield case("top_k", _where(k, axis), x, tag=f"axis{axis}-k{k}")
        for layout in LAYOUTS:
            x = Operand((9, 17), dtype, layout)
            yield case("argsort", with_options(ops.argsort, axis=1, stable=True), x)
            yield case("top_k", _where(4, 1), x)
    for dtype in FLOATS:
        x = Operand((9, 40), dtype, values="special")
        for descending in (False, True):
            build = with_options(ops.argsort, descending=descending, stable=True)
            yield case("argsort", build, x, tag="descending" if descending else "ascending")
        yield case("top_k", _where(20, 1), x)
    for descending in (False, True):  # random f32 are distinct: their order is one
        build = with_options(ops.argsort, descending=descending)
        yield case("argsort", build, Operand((3, 129)), tag=f"unstable-{'descending' if descending else 'ascending'}")


def _where(k: int, axis: int) -> Callable[[Tensor], Tensor]:
    return lambda x: ops.top_k(x, k, axis)[1]
