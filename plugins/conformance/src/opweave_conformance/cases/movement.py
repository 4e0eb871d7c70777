"""Cases of the operations that move elements."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape in ((5, 17), (2, 3, 8), (2, 3, 4, 5)):
            for layout in ("rows", "sliced", "transposed", "broadcast"):
                yield case("contiguous", Operand(shape, dtype, layout))
        for shape in ((71, 35), (2, 19, 37)):  # on both sides of whole registers and blocks
            yield case("contiguous", Operand(shape, dtype, "transposed"))
        for axis, shapes in ((0, ((3, 5), (1, 5), (4, 5))), (1, ((3, 5), (3, 1))), (1, ((2, 3, 4), (2, 5, 4)))):
            yield case("concat", *[Operand(s, dtype) for s in shapes], build=_concat, axis=axis, tag=f"axis{axis}")
        yield case("concat", Operand((1,), dtype), Operand((7,), dtype), build=_concat)
    for layout in LAYOUTS:
        yield case("concat", Operand((5, 17), "f32", layout), Operand((5, 3)), build=_concat, axis=-1, tag="last")


def _concat(*xs: Tensor, axis: int = 0) -> Tensor:
    return ops.concat(xs, axis)
