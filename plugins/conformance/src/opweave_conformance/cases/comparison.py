"""Cases of comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave_conformance.case import FLOATS, INTS, Case
from opweave_conformance.cases.elementwise import elementwise, nan_on_either_side

COMPARISONS: Final = ("less", "less_equal", "equal", "not_equal")


def cases() -> Iterator[Case]:
    for name in COMPARISONS:
        # Few different values, so that many are equal.
        yield from elementwise(name, 2, (*FLOATS, *INTS, "bool"), "ties")
        yield from nan_on_either_side(name)
