"""Cases of arithmetic, elementary functions and conversion; `elementwise` serves other families too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from opweave import ops
from opweave.graph.dtypes import PLAIN, as_dtype
from opweave_conformance.case import FLOATS, INTS, LAYOUTS, SIZES, STRIDED, Case, Operand, Values, case


def elementwise(
    op: str, sources: int, dtypes: Iterable[str], values: Values = "normal", **given: Any
) -> Iterator[Case]:
    """Every dtype in all sizes, and in all layouts: of all operands at once, and of each alone.

    Args:
        given: further arguments of `case`.
    """
    for dtype in dtypes:
        for shape in SIZES:
            yield case(op, *[Operand(shape, dtype, values=values)] * sources, **given)
        for shape in STRIDED:
            for layout in LAYOUTS:
                odd = Operand(shape, dtype, layout, values)
                even = Operand(shape, dtype, values=values)
                yield case(op, *[odd] * sources, **given)
                if sources == 2:
                    yield case(op, odd, even, **given)
                    yield case(op, even, odd, **given)
        if as_dtype(dtype).is_float:
            yield case(op, *[Operand((67,), dtype, values="special")] * sources, **given)


def nan_on_either_side(op: str) -> Iterator[Case]:
    for dtype in FLOATS:
        special, normal = Operand((67,), dtype, values="special"), Operand((67,), dtype)
        yield case(op, special, normal, tag="left")
        yield case(op, normal, special, tag="right")


def cases() -> Iterator[Case]:
    for name in ("add", "sub", "mul"):
        yield from elementwise(name, 2, (*FLOATS, *INTS))
        function = getattr(ops, name)
        for dtype in FLOATS:
            yield case(name, Operand((65,), dtype), build=lambda x, f=function: f(x, x), tag="twice")
    yield from elementwise("div", 2, FLOATS, "positive")
    for name in ("neg", "abs", "sign", "square"):
        yield from elementwise(name, 1, (*FLOATS, *INTS))
    for name in ("exp", "expm1", "tanh", "sin", "cos"):
        yield from elementwise(name, 1, FLOATS)
    for name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal"):
        yield from elementwise(name, 1, FLOATS, "positive")
    yield from elementwise("scale", 1, FLOATS, scale=-1.5, bias=0.25)
    yield from elementwise("scale", 1, FLOATS, scale=3.0, tag="nobias")
    yield from elementwise("copy", 1, (*FLOATS, *INTS, "bool"))
    yield from _powers()
    yield from _casts()


def _powers() -> Iterator[Case]:
    yield from elementwise("pow", 2, FLOATS, "positive")
    yield from elementwise("pow", 2, INTS)
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
