"""Choosing element by element: the smaller or larger of two, one of two by a condition, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import FLOATS, INTEGERS, NUMBERS, PLAIN, DType, bool_, f32, i32
from opweave.graph.layout import Shape, broadcast_shapes
from opweave.graph.opdef import Example, OpDef, build
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import (
    Array,
    Number,
    as_number,
    broadcast_to,
    builds,
    cast,
    explain,
    is_number,
    make,
    pair,
    unquantized,
)
from opweave.ops.pointwise import binary, elementwise, no_gradient, same, unary
from opweave.ops.samples import ROWS, measured, operand

__all__ = ["clamp", "maximum", "minimum", "step", "where"]

# --- by a condition -------------------------------------------------------------------------------------------------


def _where_infer(condition: Tensor, a: Tensor, b: Tensor) -> tuple[Shape, DType]:
    if condition.dtype is not bool_ or condition.shape != a.shape:
        raise ShapeError(f"the condition is bool and of the others' shape: {condition.describe()} and {a.describe()}")
    return same(a, b)


def _where_gradient(grad: Tensor, out: Tensor, condition: Tensor, a: Tensor, b: Tensor) -> tuple[None, Tensor, Tensor]:
    return None, where(condition, grad, 0.0), where(condition, 0.0, grad)


WHERE = OpDef(
    "where",
    infer=_where_infer,
    reference=lambda condition, a, b: np.where(condition, a, b),
    inplace=(1, 2),
    pointwise=True,
    formula="a where the condition holds, else b",
    gradient=_where_gradient,
    sources=3,
    exact=True,
    samples=measured(lambda: [build("where", operand(*s, dtype="bool"), operand(*s), operand(*s)) for s in ROWS]),
)


@builds(WHERE)
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """The elements of ``a`` where ``condition`` holds and those of ``b`` elsewhere; NumPy's ``where``.

    Args:
        condition: bool; of other types everything but zero holds.
        a, b: promoted; all three broadcast.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand.
    """
    c = unquantized("where", condition)
    c = cast(c, bool_)
    x, y = pair("where", a, b)
    try:
        shape = broadcast_shapes(c.shape, x.shape)
    except ShapeError as error:
        raise explain(error, "where", c, x) from None
    return node(WHERE, (broadcast_to(c, shape), broadcast_to(x, shape), broadcast_to(y, shape)), {})


# --- by size --------------------------------------------------------------------------------------------------------


def countable(op: str, value: Any) -> Tensor:
    """The operand of a function on numbers: bool becomes i32."""
    x = unquantized(op, value)
    return cast(x, i32) if x.dtype is bool_ else x


@unary("1 if x > 0, else 0", operand=countable, exact=True, dtypes=NUMBERS, gradient=no_gradient)
def step(x: Array) -> Any:
    """1 where ``x`` is above zero, else 0, also for NaN; of the dtype of ``x``, bool becomes i32.

    Raises:
        DTypeError: a quantized operand.
    """
    return np.greater(x, 0)


def clamp_gradient(grad: Tensor, out: Tensor, x: Tensor, *, min: float, max: float) -> Tensor:
    """The gradient of `clamp`: that of the inside for an element on a bound."""
    if min > -np.inf:
        grad = where(step(min - x), 0.0, grad)
    return where(step(x - max), 0.0, grad) if max < np.inf else grad


CLAMP = elementwise(
    "clamp",
    lambda x, *, min, max: np.minimum(np.maximum(x, min), max),
    "min(max(x, least), largest)",
    flops=2,
    exact=True,
    gradient=clamp_gradient,
    examples=(
        Example(FLOATS, tag="both", attrs={"min": -0.3, "max": 0.7}),
        Example(FLOATS, tag="min", attrs={"min": -0.3}),
        Example(FLOATS, tag="max", attrs={"max": 0.7}),
        Example(INTEGERS, tag="both", attrs={"min": 9, "max": 50}),
    ),
)


@builds(CLAMP)
def clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """``x`` between two bounds; NaN stays NaN. Where the bounds cross, ``max`` holds, as in NumPy and torch.

    Args:
        x: any numbers. Integers stay integers between integer bounds, and become f32 where one is a float.
        min, max: numbers, or tensors that broadcast with ``x`` (then made of `maximum` and `minimum`); ``None``: none.

    Raises:
        ShapeError: tensors that do not broadcast.
        DTypeError: a quantized or bool operand, a bound that is no number or NaN, or an integer that the
            dtype does not hold.
    """
    y: Tensor = unquantized("clamp", x)
    if y.dtype is bool_:
        raise DTypeError(f"clamp: bool has no bounds; cast first; the operand is {y.describe()}")
    bounds = [b for b in (min, max) if b is not None]
    if not all(map(is_number, bounds)):
        y = y if min is None else maximum(y, min)
        return y if max is None else minimum(y, max)
    if not bounds:
        return y
    if any(b != b for b in bounds):
        raise DTypeError(f"clamp: NaN bounds nothing; the operand is {y.describe()}")
    if y.dtype.is_integer and all(isinstance(b, int) for b in bounds):
        for b in bounds:
            make("clamp", b, y)  # which refuses what does not fit
        limits = np.iinfo(y.dtype.numpy)
        least: Number = limits.min if min is None else int(min)
        largest: Number = limits.max if max is None else int(max)
    else:
        y = y if y.dtype.is_float else cast(y, f32)
        least = as_number("clamp", "min", -np.inf if min is None else min)
        largest = as_number("clamp", "max", np.inf if max is None else max)
    return node(CLAMP, (y,), {"min": least, "max": largest})


def _weighed(grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the operand that is chosen: of ``first`` where that is 1, of ``second`` where that is 1; where
    operands are equal, half of it for each."""
    half = grad * 0.5
    return where(first, grad, where(second, 0.0, half)), where(second, grad, where(first, 0.0, half))


@binary(
    "min(a, b)",
    number=lambda x, number: clamp(x, max=number),
    exact=True,
    dtypes=PLAIN,
    gradient=lambda grad, out, a, b: _weighed(grad, step(b - a), step(a - b)),
)
def minimum(a: Array, b: Array) -> Any:
    """The smaller of two elements, broadcast and promoted; NaN where either is NaN. False is less than True.

    A float tensor and a bare number become `clamp`.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand.
    """
    return np.minimum(a, b)


@binary(
    "max(a, b)",
    number=lambda x, number: clamp(x, min=number),
    exact=True,
    dtypes=PLAIN,
    gradient=lambda grad, out, a, b: _weighed(grad, step(a - b), step(b - a)),
)
def maximum(a: Array, b: Array) -> Any:
    """The larger of two elements, broadcast and promoted; NaN where either is NaN. Otherwise as `minimum`."""
    return np.maximum(a, b)
