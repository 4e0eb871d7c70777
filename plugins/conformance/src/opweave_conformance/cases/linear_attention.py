"""Cases of linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Final

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

SIZES: Final[tuple[tuple[int, int, int, int, int], ...]] = (
    (1, 1, 1, 1, 1), (2, 3, 5, 4, 7), (1, 9, 2, 3, 2), (1, 2, 33, 16, 16), (1, 4, 1, 64, 64), (1, 2, 70, 33, 20)
)  # fmt: skip
"""Batch, heads, tokens, size of keys, size of values."""


def _build(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    result = ops.linear_attention(q, k, v, **given)
    node: Tensor = result[0].root if given.get("return_last_state") else result
    return node


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for sizes in SIZES:
            yield from _gated(sizes, dtype)
        for layout in LAYOUTS:
            q, v = Operand((2, 3, 4, 5), dtype, layout), Operand((2, 3, 4, 6), dtype, layout)
            w, h = Operand((2, 3, 4, 5), dtype, layout, "fraction"), Operand((2, 3, 5, 6), dtype, layout)
            yield case("linear_attention", q, q, v, build=_build, decay=w, state=h, tag="decay-state")


def _gated(sizes: tuple[int, int, int, int, int], dtype: str) -> Iterator[Case]:
    batch, heads, tokens, size, width = sizes
    q, v = Operand((batch, heads, tokens, size), dtype), Operand((batch, heads, tokens, width), dtype)
    shrinking = Operand((batch, heads, tokens, size), dtype, values="fraction")
    gates: dict[str, dict[str, Any]] = {
        "plain": {},
        "decay": {"decay": shrinking},
        "scalar": {"decay": Operand((batch, heads, tokens, 1), dtype, values="fraction")},
        "bonus": {"decay": shrinking, "bonus": Operand((heads, size), dtype)},
    }
    if tokens * size < 100:  # states grow with each token
        gates["update"] = {"decay": shrinking, "removal": q, "insertion": q}
    results = product((False, True), repeat=2) if tokens == 5 else ((False, False), (True, True))
    for (name, given), (state, last) in product(gates.items(), results):
        more: dict[str, Any] = {"state": Operand((batch, heads, size, width), dtype)} if state else {}
        tag = "-".join([name, *(["state"] if state else []), *(["last"] if last else [])])
        yield case("linear_attention", q, q, v, build=_build, **given, **more, return_last_state=last, tag=tag)
