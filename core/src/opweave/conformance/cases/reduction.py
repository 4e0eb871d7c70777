"""Cases of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, LAYOUTS, Case, Operand, case, with_options
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape

AXES: Final[tuple[tuple[Shape, tuple[int, ...] | None], ...]] = (
    ((1,), None),
    ((1025,), None),
    ((64,), (0,)),
    ((3, 5), None),
    ((3, 5), (0,)),
    ((3, 5), (1,)),
    ((4, 257), (1,)),
    ((257, 4), (0,)),
    ((2, 3, 33), (1,)),
    ((2, 3, 33), (0, 2)),
    ((2, 3, 4, 5), (1, 2)),
    ((2, 3, 4, 5), (0, 2)),
    ((300, 2, 9), (0, 2)),
)


def cases() -> Iterator[Case]:
    for name, dtypes in (
        ("sum", (*FLOATS, "i64")),
        ("mean", FLOATS),
        ("max", (*FLOATS, *INTS)),
        ("min", (*FLOATS, *INTS)),
        ("prod", (*FLOATS, "i64")),
        ("var", FLOATS),
    ):
        for dtype in dtypes:
            for shape, axes in AXES:
                tag = "all" if axes is None else "axes" + "".join(map(str, axes))
                yield case(name, with_options(getattr(ops, name), axis=axes), Operand(shape, dtype), tag=tag)
            for layout in LAYOUTS:
                for axis in (0, 1):
                    if name == "var" and layout == "broadcast" and axis == 0:
                        continue  # of equal elements: the rounding of their mean is all there is
                    build = with_options(getattr(ops, name), axis=axis)
                    yield case(name, build, Operand((5, 17), dtype, layout), tag=f"axes{axis}")
            # Long and with gaps: what kernels add up in stages, with something left over.
            build = with_options(getattr(ops, name), axis=None)
            yield case(name, build, Operand((301, 3), dtype, "sliced"), tag="all")
            if as_dtype(dtype).is_float:
                build = with_options(getattr(ops, name), axis=-1)
                yield case(name, build, Operand((9, 12), dtype, values="special"), tag="axes1")
    for correction in (0.0, 2.0):
        build = with_options(ops.var, axis=1, correction=correction)
        yield case("var", build, Operand((5, 17)), tag=f"correction{correction:g}")
    yield case("var", with_options(ops.var, axis=0), Operand((1, 3)), tag="of-one")
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape in ((), (1,), (1025,), (5, 17), (2, 3, 33)):
            x = Operand(shape, dtype, values="ties")
            yield case("count_equal", ops.count_equal, x, x)
        for layout in LAYOUTS:
            odd, even = Operand((5, 17), dtype, layout, "ties"), Operand((5, 17), dtype, values="ties")
            yield case("count_equal", ops.count_equal, odd, even)
    yield case("count_equal", lambda x: ops.count_equal(x, x), Operand((67,), values="special"))
    for dtype in (*FLOATS, *INTS):
        for shape, axis in (((1,), 0), ((1025,), 0), ((3, 5), 0), ((3, 5), 1), ((4, 257), 1), ((2, 3, 33), 1)):
            for values in ("normal", "ties"):
                build = with_options(ops.argmax, axis=axis)
                yield case("argmax", build, Operand(shape, dtype, values=values), tag=f"axis{axis}")
        for layout in LAYOUTS:
            yield case("argmax", with_options(ops.argmax, axis=1), Operand((5, 17), dtype, layout), tag="axis1")
        if as_dtype(dtype).is_float:
            special = Operand((9, 12), dtype, values="special")
            yield case("argmax", with_options(ops.argmax, axis=1), special, tag="axis1")
