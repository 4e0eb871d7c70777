"""Cases of the activation functions beside those of `opweave_conformance.cases.pointwise`."""

from __future__ import annotations

from collections.abc import Iterator

from opweave_conformance.case import FLOATS, Case, Operand, case


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield case("xielu", Operand((65,), dtype))
        yield case("xielu", Operand((65,), dtype), eps=-0.5, tag="eps")
