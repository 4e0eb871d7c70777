"""Cases of the operations without sources."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave_conformance.case import FLOATS, INTS, SIZES, Case, case


def _full(shape: tuple[int, ...], value: float, dtype: str, tag: str) -> Case:
    return case("full", build=lambda: ops.full(shape, value, dtype), tag=f"{dtype}-{tag}")


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTS, "bool"):
        for shape in SIZES:
            yield _full(shape, 1 if dtype == "bool" else 3, dtype, "x".join(map(str, shape)) or "scalar")
        yield _full((7,), 0, dtype, "7-zero")
    for dtype in FLOATS:
        for name, value in (("tenth", 0.1), ("-zero", -0.0), ("inf", float("inf")), ("nan", float("nan"))):
            yield _full((5, 3), value, dtype, f"5x3{name}")
    for dtype in (*FLOATS, *INTS):
        for count in (1, 7, 64, 101):
            yield case("arange", build=lambda n=count, t=dtype: ops.arange(n, dtype=t), tag=f"{dtype}-{count}")
        yield case("arange", build=lambda t=dtype: ops.arange(100, 2, -3, t), tag=f"{dtype}-down")
    for dtype in FLOATS:
        yield case("arange", build=lambda t=dtype: ops.arange(-1.0, 1.0, 1 / 128, t), tag=f"{dtype}-fractions")
    for dtype in ("f32", "i32"):
        # More than any tile holds.
        yield case("arange", build=lambda t=dtype: ops.arange(5, 200_005, dtype=t), tag=f"{dtype}-200000")
