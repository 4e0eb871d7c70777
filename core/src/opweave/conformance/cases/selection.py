"""Cases of the operations that choose element by element."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, SIZES, STRIDED, Case, Layout, Operand, case, with_options
from opweave.conformance.cases.elementwise import elementwise
from opweave.graph.layout import Shape


def cases() -> Iterator[Case]:
    for name in ("minimum", "maximum"):
        function = getattr(ops, name)
        yield from elementwise(name, function, 2, (*FLOATS, *INTS, "bool"))
        for dtype in FLOATS:
            # A NaN on either side.
            special, normal = Operand((67,), dtype, values="special"), Operand((67,), dtype)
            yield case(name, function, special, normal, tag="left")
            yield case(name, function, normal, special, tag="right")
    yield from elementwise("clamp", with_options(ops.clamp, min=-0.3, max=0.7), 1, FLOATS, tag="both")
    yield from elementwise("clamp", with_options(ops.clamp, min=-0.3), 1, FLOATS, tag="min")
    yield from elementwise("clamp", with_options(ops.clamp, max=0.7), 1, FLOATS, tag="max")
    yield from elementwise("clamp", with_options(ops.clamp, min=9, max=50), 1, INTS, tag="both")
    for dtype in (*FLOATS, *INTS):
        yield case("clamp", with_options(ops.clamp, min=2, max=1), Operand((65,), dtype), tag="crossed")
    yield from elementwise("step", ops.step, 1, (*FLOATS, *INTS))
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
        yield case("where", ops.where, Operand((67,), "bool"), special, special)


def _where(shape: Shape, dtype: str, *layouts: Layout) -> Case:
    a, b, c = layouts or ("contiguous",) * 3
    return case("where", ops.where, Operand(shape, "bool", a), Operand(shape, dtype, b), Operand(shape, dtype, c))
