"""Cases of the gated units whose one operand holds value and gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave.graph.layout import Shape
from opweave.graph.opdef import OPS
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

FUSED: Final[tuple[Shape, ...]] = ((2,), (14,), (128,), (3, 10), (16, 256), (2, 3, 66))


def cases() -> Iterator[Case]:
    for op in ("reglu", "geglu", "swiglu", "swiglu_oai"):
        for example in OPS[op].examples:
            for dtype in FLOATS:
                for shape in FUSED:
                    yield case(op, Operand(shape, dtype), tag=example.tag, **example.attrs)
                for layout in LAYOUTS:
                    yield case(op, Operand((5, 34), dtype, layout), tag=example.tag, **example.attrs)
