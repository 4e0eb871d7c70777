"""Cases of the activation functions."""

from __future__ import annotations

from collections.abc import Iterator

from opweave.ops.activation import gelu_tanh_backward, relu_backward, silu_backward
from opweave_conformance.case import FLOATS, INTS, Case, Operand, case
from opweave_conformance.cases.elementwise import elementwise


def cases() -> Iterator[Case]:
    yield from elementwise("relu", 1, (*FLOATS, *INTS))
    for name in ("sigmoid", "hardsigmoid", "gelu", "gelu_tanh", "gelu_quick", "silu", "hardswish", "softplus"):
        yield from elementwise(name, 1, FLOATS)
    for slope in (0.01, -0.5, 1.5):
        yield from elementwise("leaky_relu", 1, FLOATS, tag=f"slope{slope}", negative_slope=slope)
    for alpha in (1.0, 0.3):
        yield from elementwise("elu", 1, FLOATS, tag=f"alpha{alpha}", alpha=alpha)
    yield from elementwise("xielu", 1, FLOATS, alpha_p=0.7, alpha_n=1.25, beta=0.25)
    for dtype in FLOATS:
        yield case("xielu", Operand((65,), dtype))
        yield case("xielu", Operand((65,), dtype), eps=-0.5, tag="eps")
    for build in (relu_backward, silu_backward, gelu_tanh_backward):
        yield from elementwise(build.__name__, 2, FLOATS, build=build)
