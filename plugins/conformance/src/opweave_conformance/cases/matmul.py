"""Cases of products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave import ops
from opweave.graph.dtypes import DTYPES, DType
from opweave.graph.layout import Shape
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

PRODUCTS: Final[tuple[tuple[int, int, int], ...]] = (
    (1, 1, 1), (1, 64, 1), (5, 3, 7), (16, 16, 16), (17, 33, 65), (64, 128, 32), (1, 257, 9), (130, 2, 3),
)  # fmt: skip
BROADCAST_PRODUCTS: Final[tuple[tuple[Shape, Shape], ...]] = (
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((4, 3), (3,)),
    ((2, 4, 3), (2, 3, 5)),
    ((2, 4, 3), (3, 5)),
    ((4, 3), (2, 3, 5)),
    ((2, 1, 4, 3), (1, 3, 3, 5)),
    ((3, 5, 9), (3, 9, 17)),
    ((2, 2, 4, 33), (2, 2, 33, 65)),
)


def cases() -> Iterator[Case]:
    yield from _plain()
    for name, t in DTYPES.items():
        if t.is_quantized:
            yield from _quantized(name, t)


def _plain() -> Iterator[Case]:
    for dtype in (*FLOATS, "i32", "i64"):
        for m, k, n in PRODUCTS:
            yield case("matmul", Operand((m, k), dtype), Operand((k, n), dtype))
            x, w, b = Operand((m, k), dtype), Operand((n, k), dtype), Operand((n,), dtype)
            yield case("linear", x, w)
            yield case("linear", x, w, b)
        yield case("mul", Operand((5,), dtype), Operand((17,), dtype), build=ops.outer, tag="outer")
        for left, right in BROADCAST_PRODUCTS:
            yield case("matmul", Operand(left, dtype), Operand(right, dtype), tag="numpy")
        for shape in ((33,), (2, 5, 33), (2, 3, 4, 33)):
            yield case("linear", Operand(shape, dtype), Operand((7, 33), dtype), Operand((7,), dtype))
        for layout in LAYOUTS:
            a = Operand((9, 17), dtype, layout)
            yield case("matmul", a, Operand((17, 6), dtype))
            if layout != "transposed":  # that one is linear
                yield case("matmul", Operand((6, 9), dtype), a, tag="right")
            yield case("linear", a, Operand((6, 17), dtype))
            yield case("linear", Operand((6, 17), dtype), a, tag="right")
            yield case("matmul", Operand((2, 4, 3), dtype, layout), Operand((2, 3, 5), dtype))
            yield case("matmul", Operand((2, 4, 3), dtype), Operand((2, 3, 5), dtype, layout), tag="right")


def _quantized(name: str, t: DType) -> Iterator[Case]:
    for rows, blocks in ((1, 1), (5, 3), (33, 2)):
        w = Operand((rows, blocks * t.block), name)
        for m in (1, 4, 17):
            yield case("linear", Operand((m, blocks * t.block)), w)
        yield case("linear", Operand((3, blocks * t.block)), w, Operand((rows,)))
        for dtype in ("f64", "f16", "bf16"):
            x, bias = Operand((3, blocks * t.block), dtype), Operand((rows,), dtype)
            yield case("linear", x, w, bias)
        for layout in ("offset", "rows"):
            view = Operand((rows, blocks * t.block), name, layout)
            yield case("linear", Operand((2, blocks * t.block)), view)
        ids = Operand((4,), "i32", values="ids", high=rows)
        yield case("embedding", w, ids)
        yield case("embedding", w._replace(values="special"), ids)
        yield case("embedding", Operand((rows, blocks * t.block), name, "rows"), ids)
    for op, build in (("copy", ops.copy), ("contiguous", ops.contiguous)):
        yield case(op, Operand((5, 2 * t.block), name, "rows"), build=build)
