"""Comparing element by element: results are bool.

Operands are promoted to one dtype and broadcast as views, as in arithmetic. NaN is unequal to everything, itself
included, and neither smaller nor larger. False is less than True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opweave.graph.dtypes import PLAIN, DType, bool_
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.operands import Array, pair
from opweave.ops.pointwise import Binary, binary, no_gradient, same

__all__ = ["equal", "greater", "greater_equal", "less", "less_equal", "not_equal"]


def _infer(a: Tensor, b: Tensor) -> tuple[Shape, DType]:
    return same(a, b)[0], bool_


def _comparison(formula: str, **facts: Any) -> Callable[[Callable[[Array, Array], Any]], Binary]:
    return binary(
        formula, infer=_infer, inplace=(), exact=True, dtypes=PLAIN, values="ties", gradient=no_gradient, **facts
    )


@_comparison("a < b", measured=("f32",))
def less(a: Array, b: Array) -> Any:
    """``a < b``, broadcast and promoted; bool. The operator ``<``.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand, or an integer that the dtype of the other operand does not hold.
    """
    return np.less(a, b)


@_comparison("a ≤ b", runs_like="less")
def less_equal(a: Array, b: Array) -> Any:
    """``a <= b``. The operator ``<=``. Otherwise as `less`."""
    return np.less_equal(a, b)


def greater(a: Any, b: Any) -> Tensor:
    """``a > b``, which is ``less(b, a)``. The operator ``>``. Otherwise as `less`."""
    x, y = pair("greater", a, b)
    return less(y, x)


def greater_equal(a: Any, b: Any) -> Tensor:
    """``a >= b``, which is ``less_equal(b, a)``. The operator ``>=``. Otherwise as `less`."""
    x, y = pair("greater_equal", a, b)
    return less_equal(y, x)


@_comparison("a = b", runs_like="less")
def equal(a: Array, b: Array) -> Any:
    """Where elements are equal; 0.0 and -0.0 are. Otherwise as `less`. (``==`` tells whether two names mean one tensor,
    for tensors are keys of dictionaries.)"""
    return np.equal(a, b)


@_comparison("a ≠ b", runs_like="less")
def not_equal(a: Array, b: Array) -> Any:
    """Where elements differ, and where either is NaN. Otherwise as `less`."""
    return np.not_equal(a, b)
