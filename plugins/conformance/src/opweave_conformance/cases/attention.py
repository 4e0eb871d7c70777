"""Cases of attention."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.attention_gradient import attention_backward
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

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

FEW: Final[tuple[tuple[Shape, int, int, int], ...]] = (((1, 4, 1, 64), 4, 300, 16), ((2, 6, 2, 32), 2, 530, 48))
"""The same of a token, or two, over a cache, in whole vectors."""

MANY: Final = 100
"""Queries of all heads."""


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for q, groups, keys, out in SHAPES:
            batch, heads, tokens, size = q
            operands = [
                Operand(q, dtype),
                Operand((batch, groups, keys, size), dtype),
                Operand((batch, groups, keys, out), dtype),
            ]
            result = (*q[:3], out)
            sinks = Operand((heads,), dtype)
            options: dict[str, dict[str, Any]] = {"": {}, "scaled": {"scale": 0.7}, "capped": {"soft_cap": 2.0}}
            if keys >= tokens:
                options["causal"] = {"causal": True}
            for tag, given in options.items():
                yield from _both(result, *operands, **given, tag=tag)
            yield from _both(result, *operands, sinks=sinks, tag="sinks")
            for shape in dict.fromkeys(((tokens, keys), (batch, 1, tokens, keys), (batch, heads, tokens, keys))):
                yield from _both(result, *operands, Operand(shape, dtype, values="mask"))
            hidden = Operand((tokens, keys), dtype, values="hidden")
            yield case("attention", *operands, hidden, tag="hidden")
            yield case("attention", *operands, hidden, sinks=sinks, tag="hidden-sinks")
            yield from _both(result, *operands, Operand((tokens, keys), dtype), max_bias=8.0, tag="alibi")
            mask = Operand((tokens, keys), dtype, values="mask")
            given = {"scale": 0.3, "soft_cap": 5.0, "max_bias": 8.0}
            yield from _both(result, *operands, mask, sinks=sinks, **given, tag="all")
        for q, groups, keys, out in FEW:
            cache = [Operand((q[0], groups, keys, n), dtype) for n in (q[3], out)]
            yield case("attention", Operand(q, dtype), *cache, soft_cap=2.0, tag="few")
            for shape in ((q[2], keys), (q[0], 1, q[2], keys), (*q[:3], keys)):
                yield case("attention", Operand(q, dtype), *cache, Operand(shape, dtype, values="hidden"), tag="few")
        for layout in LAYOUTS:
            q_, k_, v_ = (Operand((2, n, 5, 6), dtype, layout) for n in (4, 2, 2))
            dense = [Operand((2, n, 5, 6), dtype) for n in (4, 2, 2)]
            result = (2, 4, 5, 6)
            yield from _both(result, q_, k_, v_, causal=True)
            yield from _both(result, dense[0], k_, v_, tag="keys")
            mask = Operand((2, 4, 5, 5), dtype, layout, "mask" if layout != "transposed" else "normal")
            yield from _both(result, *dense, mask, tag="mask")
            sinks = Operand((4,), dtype, layout if layout in ("offset", "sliced") else "contiguous")
            yield from _both(result, q_, *dense[1:], sinks=sinks, tag="sinks")
            yield case("attention_backward", q_, *dense, build=_gradient, tag="given")
            few = [Operand((2, n, tokens, 16), dtype, layout) for n, tokens in ((4, 1), (2, 40), (2, 40))]
            yield case("attention", *few, Operand((2, 4, 1, 40), dtype, layout, "mask"), tag="few")
        special = [Operand((1, 2, 6, 4), dtype, values="special"), *[Operand((1, 2, 9, 4), dtype)] * 2]
        yield case("attention", *special)


def _both(result: Shape, *operands: Operand, **given: Any) -> Iterator[Case]:
    """Attention, and its gradient for one of shape ``result``: of fewer than `MANY` queries in f32 with any options,
    else only with none and with all of them."""
    yield case("attention", *operands, **given)
    if (operands[0].dtype == "f32" and prod(result[:3]) < MANY) or given.get("tag") in ("", "all"):
        yield case("attention_backward", Operand(result, operands[0].dtype), *operands, build=_gradient, **given)


def _gradient(grad: Tensor, *operands: Tensor, **given: Any) -> Tensor:
    made = ops.attention(*operands, **given)
    return attention_backward(grad, *made.srcs, **made.attrs)
