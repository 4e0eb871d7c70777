"""Cases of the operations that choose element by element."""

from __future__ import annotations

from collections.abc import Iterator

from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, SIZES, STRIDED, Case, Layout, Operand, case
from opweave_conformance.cases.elementwise import elementwise, nan_on_either_side


def cases() -> Iterator[Case]:
    for name in ("minimum", "maximum"):
        yield from elementwise(name, 2, (*FLOATS, *INTS, "bool"))
        yield from nan_on_either_side(name)
    yield from elementwise("clamp", 1, FLOATS, tag="both", min=-0.3, max=0.7)
    yield from elementwise("clamp", 1, FLOATS, tag="min", min=-0.3)
    yield from elementwise("clamp", 1, FLOATS, tag="max", max=0.7)
    yield from elementwise("clamp", 1, INTS, tag="both", min=9, max=50)
    for dtype in (*FLOATS, *INTS):
        yield case("clamp", Operand((65,), dtype), min=2, max=1, tag="crossed")
    yield from elementwise("step", 1, (*FLOATS, *INTS))
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
