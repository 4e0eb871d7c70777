"""Comparing element by element: results are bool.

Operands are promoted to one dtype and broadcast as views, as in arithmetic. NaN is unequal to everything, itself
included, and neither smaller nor larger. False is less than True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opweave.graph.dtypes import DType, bool_
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import same
from opweave.ops.operands import Array, builds, pair, wide
from opweave.ops.samples import over_rows

__all__ = ["equal", "greater", "greater_equal", "less", "less_equal", "not_equal"]


def _infer(a: Tensor, b: Tensor) -> tuple[Shape, DType]:
    return same(a, b)[0], bool_


def _define(name: str, reference: Callable[[Array, Array], Array], formula: str, **facts: Any) -> OpDef:
    return OpDef(name, infer=_infer, reference=reference, pointwise=True, formula=formula, exact=True, **facts)


LESS = _define("less", lambda a, b: np.less(wide(a), wide(b)), "a < b", samples=over_rows("less", operands=2))


@builds(LESS)
def less(a: Any, b: Any) -> Tensor:
    """``a < b``, broadcast and promoted; bool. The operator ``<``.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand, or an integer that the dtype of the other operand does not hold.
    """
    return node(LESS, pair("less", a, b), {})


LESS_EQUAL = _define("less_equal", lambda a, b: np.less_equal(wide(a), wide(b)), "a ≤ b", runs_like="less")


@builds(LESS_EQUAL)
def less_equal(a: Any, b: Any) -> Tensor:
    """``a <= b``. The operator ``<=``. Otherwise as `less`."""
    return node(LESS_EQUAL, pair("less_equal", a, b), {})


def greater(a: Any, b: Any) -> Tensor:
    """``a > b``, which is ``less(b, a)``. The operator ``>``. Otherwise as `less`."""
    x, y = pair("greater", a, b)
    return node(LESS, (y, x), {})


def greater_equal(a: Any, b: Any) -> Tensor:
    """``a >= b``, which is ``less_equal(b, a)``. The operator ``>=``. Otherwise as `less`."""
    x, y = pair("greater_equal", a, b)
    return node(LESS_EQUAL, (y, x), {})


EQUAL = _define("equal", lambda a, b: np.equal(wide(a), wide(b)), "a = b", runs_like="less")


@builds(EQUAL)
def equal(a: Any, b: Any) -> Tensor:
    """Where elements are equal; 0.0 and -0.0 are. Otherwise as `less`. (``==`` tells whether two names mean one tensor,
    for tensors are keys of dictionaries.)"""
    return node(EQUAL, pair("equal", a, b), {})


NOT_EQUAL = _define("not_equal", lambda a, b: np.not_equal(wide(a), wide(b)), "a ≠ b", runs_like="less")


@builds(NOT_EQUAL)
def not_equal(a: Any, b: Any) -> Tensor:
    """Where elements differ, and where either is NaN. Otherwise as `less`."""
    return node(NOT_EQUAL, pair("not_equal", a, b), {})
