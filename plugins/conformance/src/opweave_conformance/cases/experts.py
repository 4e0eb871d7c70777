"""Cases of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave.graph.dtypes import DTYPES
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

SIZES: Final[tuple[tuple[int, int, int, int, int], ...]] = (
    (1, 1, 1, 1, 1), (1, 2, 4, 7, 33), (5, 2, 3, 16, 16), (17, 4, 8, 9, 64), (40, 1, 3, 65, 17),
)  # fmt: skip
"""Tokens, experts used by each, experts, outputs, inputs."""


def cases() -> Iterator[Case]:
    for dtype in (*FLOATS, "i32"):
        for tokens, used, experts, outputs, inputs in SIZES:
            w = Operand((experts, outputs, inputs), dtype)
            for index in ("i32", "i64"):
                ids = Operand((tokens, used), index, values="ids", high=experts)
                yield case("expert_linear", Operand((tokens, inputs), dtype), w, ids)
                yield case("expert_linear", Operand((tokens, used, inputs), dtype), w, ids)
                x, table = Operand((tokens, used, outputs), dtype), Operand((experts, outputs), dtype)
                yield case("add_expert", x, table, ids)
        ids, table = Operand((9, 2), "i32", values="ids", high=4), Operand((4, 17), dtype)
        flat, deep, w = Operand((9, 33), dtype), Operand((9, 2, 17), dtype), Operand((4, 17, 33), dtype)
        for layout in LAYOUTS:
            yield case("expert_linear", Operand((9, 33), dtype, layout), w, ids)
            yield case("expert_linear", flat, Operand((4, 17, 33), dtype, layout), ids, tag="w")
            laid = Operand((9, 2), "i32", layout, "ids", 4)
            yield case("expert_linear", flat, w, laid, tag="ids")
            yield case("add_expert", Operand((9, 2, 17), dtype, layout), table, ids)
            yield case("add_expert", deep, Operand((4, 17), dtype, layout), ids, tag="table")
            yield case("add_expert", deep, table, laid, tag="ids")
        yield case("add_expert", Operand((17,), dtype), table, Operand((), "i64", values="ids", high=4))
    for name, t in DTYPES.items():
        if t.is_quantized:
            x, w = Operand((6, 2 * t.block)), Operand((4, 5, 2 * t.block), name)
            ids = Operand((6, 2), "i32", values="ids", high=4)
            yield case("expert_linear", x, w, ids)
            yield case("expert_linear", x, Operand(w.shape, name, "rows"), ids)
            # As many outputs as make it worth while to multiply the integers of blocks.
            yield case("expert_linear", x, Operand((4, 19, 2 * t.block), name), ids)
            yield case("expert_linear", Operand((6, 2, 2 * t.block)), Operand((4, 16, 2 * t.block), name), ids)
