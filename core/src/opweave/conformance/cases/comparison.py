"""Cases of comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave.conformance.case import FLOATS, INTS, Case, Operand, case
from opweave.conformance.cases.elementwise import elementwise

COMPARISONS: Final = ("less", "less_equal", "equal", "not_equal")


def cases() -> Iterator[Case]:
    for name in COMPARISONS:
        # Few different values, so that many are equal.
        yield from elementwise(name, 2, (*FLOATS, *INTS, "bool"), "ties")
        for dtype in FLOATS:
            # A NaN on either side.
            special, normal = Operand((67,), dtype, values="special"), Operand((67,), dtype)
            yield case(name, special, normal, tag="left")
            yield case(name, normal, special, tag="right")
