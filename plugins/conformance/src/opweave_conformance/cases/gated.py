"""Cases of the gated units: two operands, and one that holds both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case
from opweave_conformance.cases.elementwise import elementwise

FUSED: Final[tuple[Shape, ...]] = ((2,), (14,), (128,), (3, 10), (16, 256), (2, 3, 66))


def cases() -> Iterator[Case]:
    yield from _unit("reglu")
    for form in ("none", "tanh", "quick"):
        yield from _unit("geglu", approximate=form, tag=form)
    yield from _unit("swiglu")
    yield from _unit("swiglu_oai")
    yield from _unit("swiglu_oai", alpha=0.5, limit=0.75, tag="clamped")


def _unit(op: str, **given: Any) -> Iterator[Case]:
    yield from elementwise(op, 2, FLOATS, **given)
    for dtype in FLOATS:
        for shape in FUSED:
            yield case(op, Operand(shape, dtype), **given)
        for layout in LAYOUTS:
            yield case(op, Operand((5, 34), dtype, layout), **given)
