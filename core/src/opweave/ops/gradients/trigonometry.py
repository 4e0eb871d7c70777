"""Gradients of trigonometric and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

from math import pi, sqrt

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of


@gradient_of("tan")
def _tan(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (ops.square(out) + 1.0)


@gradient_of("asin")
def _asin(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.rsqrt(1.0 - ops.square(x))


@gradient_of("acos")
def _acos(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return -grad * ops.rsqrt(1.0 - ops.square(x))


@gradient_of("atan")
def _atan(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad / (ops.square(x) + 1.0)


@gradient_of("sinh")
def _sinh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.cosh(x)


@gradient_of("cosh")
def _cosh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.sinh(x)


@gradient_of("asinh")
def _asinh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.rsqrt(ops.square(x) + 1.0)


@gradient_of("acosh")
def _acosh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.rsqrt(ops.square(x) - 1.0)


@gradient_of("atanh")
def _atanh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad / (1.0 - ops.square(x))


@gradient_of("erf")
def _erf(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (2 / sqrt(pi)) * ops.exp(-ops.square(x))
