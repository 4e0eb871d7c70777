"""Rounding of floats to whole numbers, in their own dtype. Integers and bools are returned as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import elementwise
from opweave.ops.operands import builds, unquantized, wide

__all__ = ["ceil", "floor", "round", "trunc"]


def _whole(op: OpDef, value: Any) -> Tensor:
    x = unquantized(op.name, value)
    return node(op, (x,), {}) if x.dtype.is_float else x


FLOOR = elementwise("floor", lambda x: np.floor(wide(x)), "⌊x⌋", exact=True)


@builds(FLOOR)
def floor(x: Any) -> Tensor:
    """The largest whole number that is not above ``x``, as NumPy's ``floor``.

    Raises:
        DTypeError: a quantized operand.
    """
    return _whole(FLOOR, x)


CEIL = elementwise("ceil", lambda x: np.ceil(wide(x)), "⌈x⌉", exact=True)


@builds(CEIL)
def ceil(x: Any) -> Tensor:
    """The smallest whole number that is not below ``x``, as NumPy's ``ceil``. Raises `DTypeError` for a quantized
    operand."""
    return _whole(CEIL, x)


ROUND = elementwise("round", lambda x: np.rint(wide(x)), "the nearest whole number, the even one of two", exact=True)


@builds(ROUND)
def round(x: Any) -> Tensor:
    """The nearest whole number; of two equally near ones the even one, as NumPy and torch do it. Raises `DTypeError`
    for a quantized operand."""
    return _whole(ROUND, x)


TRUNC = elementwise("trunc", lambda x: np.trunc(wide(x)), "x without its fraction", exact=True)


@builds(TRUNC)
def trunc(x: Any) -> Tensor:
    """``x`` without its fraction: the nearest whole number towards zero. Raises `DTypeError` for a quantized
    operand."""
    return _whole(TRUNC, x)
