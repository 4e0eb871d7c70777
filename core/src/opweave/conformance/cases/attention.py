"""Cases of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from opweave.conformance.case import FLOATS, LAYOUTS, Case, Operand, case
from opweave.graph.layout import Shape

SHAPES: Final[tuple[tuple[Shape, int, int, int], ...]] = (
    ((1, 1, 1, 1), 1, 1, 1),
    ((1, 2, 3, 4), 2, 3, 4),
    ((2, 4, 5, 8), 2, 7, 6),
    ((1, 8, 1, 16), 2, 65, 16),
    ((1, 3, 17, 33), 1, 17, 5),
    ((1, 2, 300, 8), 2, 600, 8),
    ((1, 1, 70, 4), 1, 2100, 3),
)
"""Queries (batch, heads, tokens, size), and how many groups, keys and elements of a value."""


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for q, groups, keys, out in SHAPES:
            batch, heads, tokens, size = q
            operands = [
                Operand(q, dtype),
                Operand((batch, groups, keys, size), dtype),
                Operand((batch, groups, keys, out), dtype),
            ]
            sinks = Operand((heads,), dtype)
            options: dict[str, dict[str, Any]] = {"": {}, "scaled": {"scale": 0.7}, "capped": {"soft_cap": 2.0}}
            if keys >= tokens:
                options["causal"] = {"causal": True}
            for tag, given in options.items():
                yield case("attention", *operands, **given, tag=tag)
            yield case("attention", *operands, sinks=sinks, tag="sinks")
            for shape in dict.fromkeys(((tokens, keys), (batch, 1, tokens, keys), (batch, heads, tokens, keys))):
                mask = Operand(shape, dtype, values="mask")
                yield case("attention", *operands, mask)
            yield case("attention", *operands, Operand((tokens, keys), dtype), max_bias=8.0, tag="alibi")
            mask = Operand((tokens, keys), dtype, values="mask")
            given = {"scale": 0.3, "soft_cap": 5.0, "max_bias": 8.0}
            yield case("attention", *operands, mask, sinks=sinks, **given, tag="all")
        for layout in LAYOUTS:
            q_, k_, v_ = (Operand((2, n, 5, 6), dtype, layout) for n in (4, 2, 2))
            dense = [Operand((2, n, 5, 6), dtype) for n in (4, 2, 2)]
            yield case("attention", q_, k_, v_, causal=True)
            yield case("attention", dense[0], k_, v_, tag="keys")
            mask = Operand((2, 4, 5, 5), dtype, layout, "mask" if layout != "transposed" else "normal")
            yield case("attention", *dense, mask, tag="mask")
            sinks = Operand((4,), dtype, layout if layout in ("offset", "sliced") else "contiguous")
            yield case("attention", q_, *dense[1:], sinks=sinks, tag="sinks")
        special = [Operand((1, 2, 6, 4), dtype, values="special"), *[Operand((1, 2, 9, 4), dtype)] * 2]
        yield case("attention", *special)
