"""Cases of comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, Case, Operand, case
from opweave.conformance.cases.elementwise import elementwise

COMPARISONS: Final = ("less", "less_equal", "equal", "not_equal")


def cases() -> Iterator[Case]:
    for name in COMPARISONS:
        function = getattr(ops, name)
        yield from elementwise(name, function, 2, (*FLOATS, *INTS, "bool"))
        for dtype in (*FLOATS, *INTS):
            # Few different values, so that many are equal.
            yield case(name, function, *[Operand((129,), dtype, values="ties")] * 2)
        for dtype in FLOATS:
            # A NaN on either side.
            special, normal = Operand((67,), dtype, values="special"), Operand((67,), dtype)
            yield case(name, function, special, normal, tag="left")
            yield case(name, function, normal, special, tag="right")
