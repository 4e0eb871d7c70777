"""Cases of the operations that move elements."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape in ((5, 17), (2, 3, 8), (2, 3, 4, 5)):
            for layout in ("rows", "sliced", "transposed", "broadcast"):
                yield case("contiguous", ops.contiguous, Operand(shape, dtype, layout))
        for axis, shapes in ((0, ((3, 5), (1, 5), (4, 5))), (1, ((3, 5), (3, 1))), (1, ((2, 3, 4), (2, 5, 4)))):
            yield case(
                "concat", lambda *xs, a=axis: ops.concat(xs, a), *[Operand(s, dtype) for s in shapes], tag=f"axis{axis}"
            )
        yield case("concat", lambda *xs: ops.concat(xs), Operand((1,), dtype), Operand((7,), dtype))
    for layout in LAYOUTS:
        yield case(
            "concat", lambda *xs: ops.concat(xs, -1), Operand((5, 17), "f32", layout), Operand((5, 3)), tag="last"
        )
