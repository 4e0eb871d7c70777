"""Gradients of trigonometric and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

from math import pi, sqrt

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of
from opweave.ops.operands import composite


@gradient_of("tan")
@composite
def _tan(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (ops.square(out) + 1.0)


@gradient_of("asin")
@composite
def _asin(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.rsqrt(1.0 - ops.square(x))


@gradient_of("acos")
@composite
def _acos(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return -grad * ops.rsqrt(1.0 - ops.square(x))


@gradient_of("atan")
@composite
def _atan(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad / (ops.square(x) + 1.0)


@gradient_of("sinh")
@composite
def _sinh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.cosh(x)


@gradient_of("cosh")
@composite
def _cosh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.sinh(x)


@gradient_of("asinh")
@composite
def _asinh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.rsqrt(ops.square(x) + 1.0)


@gradient_of("acosh")
@composite
def _acosh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.rsqrt(ops.square(x) - 1.0)


@gradient_of("atanh")
@composite
def _atanh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad / (1.0 - ops.square(x))


@gradient_of("erf")
@composite
def _erf(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (2 / sqrt(pi)) * ops.exp(-ops.square(x))
