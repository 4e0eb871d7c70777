"""Trigonometric and hyperbolic functions beyond sine, cosine and tanh, their inverses, and the error function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import elementwise
from opweave.ops.operands import Array, builds, floating, wide

__all__ = ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "sinh", "tan"]


def _function(name: str, function: Callable[[Array], Any], formula: str) -> OpDef:
    return elementwise(name, lambda x: np.asarray(function(wide(x))), formula, slack=2.0, runs_like="exp")


def _built(op: OpDef, x: Any) -> Tensor:
    return node(op, (floating(op.name, x),), {})


TAN = _function("tan", np.tan, "tan x")


@builds(TAN)
def tan(x: Any) -> Tensor:
    """Tangent of an angle in radians, NaN of infinities; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return _built(TAN, x)


ASIN = _function("asin", np.arcsin, "arcsin x")


@builds(ASIN)
def asin(x: Any) -> Tensor:
    """The angle from -π/2 to π/2 whose sine is ``x``, NaN outside of -1 .. 1; integers become f32. Raises `DTypeError`
    for a quantized operand."""
    return _built(ASIN, x)


ACOS = _function("acos", np.arccos, "arccos x")


@builds(ACOS)
def acos(x: Any) -> Tensor:
    """The angle from 0 to π whose cosine is ``x``, NaN outside of -1 .. 1; integers become f32. Raises `DTypeError` for
    a quantized operand."""
    return _built(ACOS, x)


ATAN = _function("atan", np.arctan, "arctan x")


@builds(ATAN)
def atan(x: Any) -> Tensor:
    """The angle from -π/2 to π/2 whose tangent is ``x``; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return _built(ATAN, x)


SINH = _function("sinh", np.sinh, "(eˣ - e⁻ˣ) / 2")


@builds(SINH)
def sinh(x: Any) -> Tensor:
    """Hyperbolic sine; integers become f32. Raises `DTypeError` for a quantized operand."""
    return _built(SINH, x)


COSH = _function("cosh", np.cosh, "(eˣ + e⁻ˣ) / 2")


@builds(COSH)
def cosh(x: Any) -> Tensor:
    """Hyperbolic cosine; integers become f32. Raises `DTypeError` for a quantized operand."""
    return _built(COSH, x)


ASINH = _function("asinh", np.arcsinh, "ln(x + √(x² + 1))")


@builds(ASINH)
def asinh(x: Any) -> Tensor:
    """The number whose `sinh` is ``x``; integers become f32. Raises `DTypeError` for a quantized operand."""
    return _built(ASINH, x)


ACOSH = _function("acosh", np.arccosh, "ln(x + √(x² - 1))")


@builds(ACOSH)
def acosh(x: Any) -> Tensor:
    """The number from 0 on whose `cosh` is ``x``, NaN below 1; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return _built(ACOSH, x)


ATANH = _function("atanh", np.arctanh, "ln((1 + x) / (1 - x)) / 2")


@builds(ATANH)
def atanh(x: Any) -> Tensor:
    """The number whose `opweave.tanh` is ``x``: infinite at -1 and 1, NaN outside; integers become f32. Raises
    `DTypeError` for a quantized operand."""
    return _built(ATANH, x)


_ERF: Final = np.frompyfunc(math.erf, 1, 1)
ERF = _function("erf", lambda x: np.asarray(_ERF(x)).astype(x.dtype), "2/√π · ∫₀ˣ exp(-t²) dt")


@builds(ERF)
def erf(x: Any) -> Tensor:
    """The error function; integers become f32. Raises `DTypeError` for a quantized operand."""
    return _built(ERF, x)
