"""Cases of state-space models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Final

from opweave import ops
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

LINES: Final[tuple[tuple[Shape, int], ...]] = (
    ((1, 1, 1), 1), ((2, 3, 9), 4), ((1, 5, 2), 4), ((2, 64, 33), 3), ((1, 600, 257), 4)
)  # fmt: skip
SCANS: Final[tuple[tuple[Shape, int, int], ...]] = (
    ((1, 1, 1), 1, 1), ((2, 6, 5), 4, 2), ((1, 8, 33), 16, 1), ((1, 600, 70), 16, 1), ((2, 4, 1), 3, 4)
)  # fmt: skip
"""Input (batch, channels, tokens), numbers of the state, groups."""


def _scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, **given: Any) -> Tensor:
    result = ops.selective_scan(u, delta, a, b, c, **given)
    node: Tensor = result[0].root if given["return_last_state"] else result
    return node


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape, k in LINES:
            x, w, b = Operand(shape, dtype), Operand((shape[1], k), dtype), Operand(shape[1:2], dtype)
            yield case("causal_conv1d", x, w)
            yield case("causal_conv1d", x, w, b)
            if k > 1:
                state = Operand((*shape[:2], k - 1), dtype)
                yield case("causal_conv1d", x, w, initial_states=state, tag="state")
                yield case("causal_conv1d", x, w, b, initial_states=state, tag="state")
        for layout in LAYOUTS:
            x, w = Operand((3, 4, 5), dtype, layout), Operand((4, 3), dtype, layout)
            state = Operand((3, 4, 2), dtype, layout)
            yield case("causal_conv1d", x, w, initial_states=state, tag="state")
        for shape, n, groups in SCANS:
            yield from _scans(shape, n, groups, dtype)
        for layout in LAYOUTS:
            u, mixed = Operand((2, 4, 5), dtype, layout), Operand((2, 2, 3, 5), dtype, layout)
            step, rate = Operand((2, 4, 5), dtype, layout), Operand((4, 3), dtype, layout, "negative")
            yield case("selective_scan", u, step, rate, mixed, mixed, delta_softplus=True)


def _scans(shape: Shape, n: int, groups: int, dtype: str) -> Iterator[Case]:
    batch, channels, tokens = shape
    mixed = Operand((batch, groups, n, tokens), dtype)
    for skip, state, softplus, last in product((False, True), repeat=4):
        u, delta = Operand(shape, dtype), Operand(shape, dtype, values="positive")
        rate = Operand((channels, n), dtype, values="negative")
        given: dict[str, Any] = {"D": Operand((channels,), dtype)} if skip else {}
        if state:
            given["state"] = Operand((batch, channels, n), dtype)
        named = zip(("D", "state", "softplus", "last"), (skip, state, softplus, last), strict=True)
        given |= {"delta_softplus": softplus, "return_last_state": last}
        tag = "-".join(name for name, on in named if on)
        yield case("selective_scan", u, delta, rate, mixed, mixed, build=_scan, **given, tag=tag)
