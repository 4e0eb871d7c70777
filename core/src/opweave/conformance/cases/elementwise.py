"""Cases of arithmetic, elementary functions and conversion; `elementwise` serves other families too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, SIZES, STRIDED, Case, Operand, Values, case
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave.graph.tensor import Tensor


def elementwise(
    op: str,
    build: Callable[..., Tensor],
    sources: int,
    dtypes: Iterable[str],
    values: Values = "normal",
    tag: str = "",
) -> Iterator[Case]:
    """One dtype and one shape, over all sizes, and over all layouts: of all operands at once, and of each alone."""
    for dtype in dtypes:
        for shape in SIZES:
            yield case(op, build, *[Operand(shape, dtype, values=values)] * sources, tag=tag)
        for shape in STRIDED:
            for layout in LAYOUTS:
                odd = Operand(shape, dtype, layout, values)
                even = Operand(shape, dtype, values=values)
                yield case(op, build, *[odd] * sources, tag=tag)
                if sources == 2:
                    yield case(op, build, odd, even, tag=tag)
                    yield case(op, build, even, odd, tag=tag)
        if as_dtype(dtype).is_float:
            yield case(op, build, *[Operand((67,), dtype, values="special")] * sources, tag=tag)


def cases() -> Iterator[Case]:
    for name in ("add", "sub", "mul"):
        function = getattr(ops, name)
        yield from elementwise(name, function, 2, (*FLOATS, *INTS))
        for dtype in FLOATS:
            yield case(name, lambda x, f=function: f(x, x), Operand((65,), dtype), tag="twice")
    yield from elementwise("div", ops.div, 2, FLOATS, "positive")
    for name in ("neg", "abs", "sign", "square"):
        yield from elementwise(name, getattr(ops, name), 1, (*FLOATS, *INTS))
    for name in ("exp", "expm1", "tanh", "sin", "cos"):
        yield from elementwise(name, getattr(ops, name), 1, FLOATS)
    for name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal"):
        yield from elementwise(name, getattr(ops, name), 1, FLOATS, "positive")
    yield from elementwise("scale", lambda x: ops.scale(x, -1.5, 0.25), 1, FLOATS)
    yield from elementwise("scale", lambda x: ops.scale(x, 3.0), 1, FLOATS, tag="nobias")
    yield from elementwise("copy", ops.copy, 1, (*FLOATS, *INTS, "bool"))
    yield from _powers()
    yield from _casts()


def _powers() -> Iterator[Case]:
    yield from elementwise("pow", ops.pow, 2, FLOATS, "positive")
    yield from elementwise("pow", ops.pow, 2, INTS)
    for dtype in INTS:
        # Few different numbers, so that 0, 1 and -1 meet negative exponents.
        yield case("pow", ops.pow, *[Operand((129,), dtype, values="ties")] * 2)
    for dtype in (*FLOATS, *INTS):
        yield case("pow", ops.pow, Operand((65,), dtype, values="positive"), Operand((), dtype), tag="one-exponent")
        yield case("pow", lambda x: ops.pow(x, x), Operand((65,), dtype, values="positive"), tag="twice")


def _casts() -> Iterator[Case]:
    plain = [t.name for t in DTYPES.values() if not t.is_quantized]
    for source in plain:
        for target in plain:
            if source == target:
                continue
            for shape in ((1,), (129,), (3, 5)):
                yield case("cast", lambda x, t=target: ops.cast(x, t), Operand(shape, source), tag=f"to-{target}")
            if source in ("f32", "f16", "i32"):
                for layout in LAYOUTS:
                    yield case(
                        "cast", lambda x, t=target: ops.cast(x, t), Operand((5, 17), source, layout), tag=f"to-{target}"
                    )
