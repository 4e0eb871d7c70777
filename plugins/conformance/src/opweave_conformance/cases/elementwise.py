"""Cases of arithmetic and conversion beside those of `opweave_conformance.cases.pointwise`."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.graph.dtypes import PLAIN
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case


def cases() -> Iterator[Case]:
    for name in ("add", "sub", "mul"):
        function = getattr(ops, name)
        for dtype in FLOATS:
            yield case(name, Operand((65,), dtype), build=lambda x, f=function: f(x, x), tag="twice")
    yield from _powers()
    yield from _casts()


def _powers() -> Iterator[Case]:
    for dtype in INTS:
        # Few different numbers, so that 0, 1 and -1 meet negative exponents.
        yield case("pow", *[Operand((129,), dtype, values="ties")] * 2)
    for dtype in (*FLOATS, *INTS):
        yield case("pow", Operand((65,), dtype, values="positive"), Operand((), dtype), tag="one-exponent")
        yield case("pow", Operand((65,), dtype, values="positive"), build=lambda x: ops.pow(x, x), tag="twice")


def _casts() -> Iterator[Case]:
    plain = PLAIN.split()
    for source in plain:
        for target in plain:
            if source == target:
                continue
            for shape in ((1,), (129,), (3, 5)):
                yield case("cast", Operand(shape, source), dtype=target, tag=f"to-{target}")
            if source in ("f32", "f16", "i32"):
                for layout in LAYOUTS:
                    yield case("cast", Operand((5, 17), source, layout), dtype=target, tag=f"to-{target}")
