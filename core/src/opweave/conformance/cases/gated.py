"""Cases of the gated units: two operands, and one that holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, LAYOUTS, Case, Operand, case, with_options
from opweave.conformance.cases.elementwise import elementwise
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor

FUSED: Final[tuple[Shape, ...]] = ((2,), (14,), (128,), (3, 10), (16, 256), (2, 3, 66))


def cases() -> Iterator[Case]:
    yield from _unit("reglu", ops.reglu)
    for form in ("none", "tanh", "quick"):
        yield from _unit("geglu", with_options(ops.geglu, approximate=form), form)
    yield from _unit("swiglu", ops.swiglu)
    yield from _unit("swiglu_oai", ops.swiglu_oai)
    yield from _unit("swiglu_oai", with_options(ops.swiglu_oai, alpha=0.5, limit=0.75), "clamped")


def _unit(op: str, build: Callable[..., Tensor], tag: str = "") -> Iterator[Case]:
    yield from elementwise(op, build, 2, FLOATS, tag=tag)
    for dtype in FLOATS:
        for shape in FUSED:
            yield case(op, build, Operand(shape, dtype), tag=tag)
        for layout in LAYOUTS:
            yield case(op, build, Operand((5, 34), dtype, layout), tag=tag)
