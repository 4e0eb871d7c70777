"""Cases of rounding to whole numbers."""

from __future__ import annotations

from collections.abc import Iterator

from opweave_conformance.case import FLOATS, Case, Operand, case
from opweave_conformance.cases.elementwise import elementwise


def cases() -> Iterator[Case]:
    for name in ("floor", "ceil", "round", "trunc"):
        yield from elementwise(name, 1, FLOATS)
        for dtype in FLOATS:
            yield case(name, Operand((129,), dtype, values="halves"))
