"""Cases of trigonometric and hyperbolic functions."""

from __future__ import annotations

from collections.abc import Iterator

from opweave_conformance.case import FLOATS, Case
from opweave_conformance.cases.elementwise import elementwise


def cases() -> Iterator[Case]:
    for name in ("atan", "sinh", "cosh", "asinh", "erf"):
        yield from elementwise(name, 1, FLOATS)
    for name in ("tan", "asin", "acos", "atanh"):
        yield from elementwise(name, 1, FLOATS, "fraction")
    yield from elementwise("acosh", 1, FLOATS, "large")
