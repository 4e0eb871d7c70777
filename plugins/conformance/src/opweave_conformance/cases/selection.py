"""Cases of the operations that choose and compare element by element, beside those of
`opweave_conformance.cases.pointwise`."""

from __future__ import annotations

from collections.abc import Iterator

from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, SIZES, STRIDED, Case, Layout, Operand, case


def cases() -> Iterator[Case]:
    for name in ("minimum", "maximum", "less", "less_equal", "equal", "not_equal"):
        for dtype in FLOATS:
            special, normal = Operand((67,), dtype, values="special"), Operand((67,), dtype)
            yield case(name, special, normal, tag="left")
            yield case(name, normal, special, tag="right")
    for dtype in (*FLOATS, *INTS):
        yield case("clamp", Operand((65,), dtype), min=2, max=1, tag="crossed")
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape in SIZES:
            yield _where(shape, dtype)
        for shape in STRIDED:
            for layout in LAYOUTS:
                yield _where(shape, dtype, layout, layout, layout)
                for odd in range(3):
                    yield _where(shape, dtype, *[layout if i == odd else "contiguous" for i in range(3)])
    for dtype in FLOATS:
        special = Operand((67,), dtype, values="special")
        yield case("where", Operand((67,), "bool"), special, special)


def _where(shape: Shape, dtype: str, *layouts: Layout) -> Case:
    a, b, c = layouts or ("contiguous",) * 3
    return case("where", Operand(shape, "bool", a), Operand(shape, dtype, b), Operand(shape, dtype, c))
