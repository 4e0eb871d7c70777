"""Cases of rounding of halves."""

from __future__ import annotations

from collections.abc import Iterator

from opweave_conformance.case import FLOATS, Case, Operand, case


def cases() -> Iterator[Case]:
    for name in ("floor", "ceil", "round", "trunc"):
        for dtype in FLOATS:
            yield case(name, Operand((129,), dtype, values="halves"))
