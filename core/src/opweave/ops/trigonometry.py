"""Trigonometric and hyperbolic functions beyond sine, cosine and tanh, their inverses, and the error function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.graph import opdef
from opweave.graph.tensor import Tensor
from opweave.ops.elementwise import exp, rsqrt, square
from opweave.ops.operands import Array
from opweave.ops.pointwise import Unary, composed, unary

__all__ = ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "sinh", "tan"]


def _function(
    formula: str, gradient: Callable[[Tensor, Tensor, Tensor], Tensor], values: str = "normal"
) -> Callable[[Callable[[Array], Any]], Unary]:
    return unary(formula, slack=2.0, runs_like="exp", values=values, gradient=composed(gradient))


@_function("tan x", lambda grad, out, x: grad * (square(out) + 1.0), "fraction")
def tan(x: Array) -> Any:
    """Tangent of an angle in radians, NaN of infinities; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return np.tan(x)


@_function("arcsin x", lambda grad, out, x: grad * rsqrt(1.0 - square(x)), "fraction")
def asin(x: Array) -> Any:
    """The angle from -π/2 to π/2 whose sine is ``x``, NaN outside of -1 .. 1; integers become f32. Raises `DTypeError`
    for a quantized operand."""
    return np.arcsin(x)


@_function("arccos x", lambda grad, out, x: -grad * rsqrt(1.0 - square(x)), "fraction")
def acos(x: Array) -> Any:
    """The angle from 0 to π whose cosine is ``x``, NaN outside of -1 .. 1; integers become f32. Raises `DTypeError` for
    a quantized operand."""
    return np.arccos(x)


@_function("arctan x", lambda grad, out, x: grad / (square(x) + 1.0))
def atan(x: Array) -> Any:
    """The angle from -π/2 to π/2 whose tangent is ``x``; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return np.arctan(x)


@_function("(eˣ - e⁻ˣ) / 2", lambda grad, out, x: grad * opdef.build("cosh", x))
def sinh(x: Array) -> Any:
    """Hyperbolic sine; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.sinh(x)


@_function("(eˣ + e⁻ˣ) / 2", lambda grad, out, x: grad * sinh(x))
def cosh(x: Array) -> Any:
    """Hyperbolic cosine; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.cosh(x)


@_function("ln(x + √(x² + 1))", lambda grad, out, x: grad * rsqrt(square(x) + 1.0))
def asinh(x: Array) -> Any:
    """The number whose `sinh` is ``x``; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.arcsinh(x)


@_function("ln(x + √(x² - 1))", lambda grad, out, x: grad * rsqrt(square(x) - 1.0), "large")
def acosh(x: Array) -> Any:
    """The number from 0 on whose `cosh` is ``x``, NaN below 1; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return np.arccosh(x)


@_function("ln((1 + x) / (1 - x)) / 2", lambda grad, out, x: grad / (1.0 - square(x)), "fraction")
def atanh(x: Array) -> Any:
    """The number whose `opweave.tanh` is ``x``: infinite at -1 and 1, NaN outside; integers become f32. Raises
    `DTypeError` for a quantized operand."""
    return np.arctanh(x)


_ERF: Final = np.frompyfunc(math.erf, 1, 1)


@_function("2/√π · ∫₀ˣ exp(-t²) dt", lambda grad, out, x: grad * (2 / math.sqrt(math.pi)) * exp(-square(x)))
def erf(x: Array) -> Any:
    """The error function; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.asarray(_ERF(x)).astype(x.dtype)
