"""Cases of the activation functions."""

from __future__ import annotations

from collections.abc import Iterator

from opweave import ops
from opweave.conformance.case import FLOATS, INTS, Case, with_options
from opweave.conformance.cases.elementwise import elementwise


def cases() -> Iterator[Case]:
    yield from elementwise("relu", ops.relu, 1, (*FLOATS, *INTS))
    for name in ("sigmoid", "hardsigmoid", "gelu", "gelu_tanh", "gelu_quick", "silu", "hardswish", "softplus"):
        yield from elementwise(name, getattr(ops, name), 1, FLOATS)
    for slope in (0.01, -0.5, 1.5):
        yield from elementwise(
            "leaky_relu", with_options(ops.leaky_relu, negative_slope=slope), 1, FLOATS, tag=f"slope{slope}"
        )
    for alpha in (1.0, 0.3):
        yield from elementwise("elu", with_options(ops.elu, alpha=alpha), 1, FLOATS, tag=f"alpha{alpha}")
