"""Cases of linear algebra."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case


def _solved(a: Tensor, b: Tensor, *, upper: bool = False, unitriangular: bool = False) -> Tensor:
    return ops.solve_triangular(a, b, upper=upper, unitriangular=unitriangular)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((1,), (3, 2), (9, 2), (2, 3, 16), (5, 128), (2, 1024)):
            yield case("hadamard_transform", Operand(shape, dtype), scale=shape[-1] ** -0.5)
        for layout in LAYOUTS:
            yield case("hadamard_transform", Operand((4, 8), dtype, layout))
        for n, columns in ((1, 1), (3, 2), (17, 5), (32, 40)):
            # Entries of the solution stay moderate where the diagonal outweighs its row.
            a, b = Operand((n, n), dtype, values="fraction"), Operand((n, columns), dtype)
            for upper, unit in product((False, True), repeat=2):
                if n < 10 or not unit:
                    tag = "-".join([*(["upper"] if upper else []), *(["unit"] if unit else [])])
                    yield case("solve_triangular", a, b, upper=upper, unitriangular=unit, tag=tag)
        for layout in LAYOUTS:
            a, b = Operand((4, 4), dtype, layout, "fraction"), Operand((4, 3), dtype, layout)
            yield case("solve_triangular", a, b, build=_solved)
        for lead, columns in (((2, 3), 5), ((9,), 1)):  # nine: one more than a group of work-items may have
            a, b = Operand((*lead, 4, 4), dtype, values="fraction"), Operand((*lead, 4, columns), dtype)
            yield case("solve_triangular", a, b, upper=True)
        for square in ((1, 1), (4, 4), (7, 4, 4), (2, 3, 16, 16)):
            yield case("sinkhorn", Operand(square, dtype), iterations=3)
        yield case("sinkhorn", Operand((4, 4), dtype), tag="as-usual")
        yield case("sinkhorn", Operand((4, 4), dtype), iterations=3, eps=0.125, tag="eps")
        for layout in LAYOUTS:
            yield case("sinkhorn", Operand((4, 4), dtype, layout), iterations=2)
