"""Rounding of floats to whole numbers, in their own dtype. Integers and bools are returned as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opweave.ops.operands import Array, unquantized
from opweave.ops.pointwise import Unary, no_gradient, unary

__all__ = ["ceil", "floor", "round", "trunc"]


def _rounding(formula: str) -> Callable[[Callable[[Array], Any]], Unary]:
    return unary(formula, operand=unquantized, only_floats=True, exact=True, gradient=no_gradient)


@_rounding("⌊x⌋")
def floor(x: Array) -> Any:
    """The largest whole number that is not above ``x``, as NumPy's ``floor``.

    Raises:
        DTypeError: a quantized operand.
    """
    return np.floor(x)


@_rounding("⌈x⌉")
def ceil(x: Array) -> Any:
    """The smallest whole number that is not below ``x``, as NumPy's ``ceil``. Raises `DTypeError` for a quantized
    operand."""
    return np.ceil(x)


@_rounding("the nearest whole number, the even one of two")
def round(x: Array) -> Any:
    """The nearest whole number; of two equally near ones the even one, as NumPy and torch do it. Raises `DTypeError`
    for a quantized operand."""
    return np.rint(x)


@_rounding("x without its fraction")
def trunc(x: Array) -> Any:
    """``x`` without its fraction: the nearest whole number towards zero. Raises `DTypeError` for a quantized
    operand."""
    return np.trunc(x)
