"""Choosing element by element: the smaller or larger of two, one of two by a condition, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType, bool_, f32, i32
from opweave.graph.layout import Shape, broadcast_shapes
from opweave.graph.opdef import OpDef, build
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import elementwise, same
from opweave.ops.operands import (
    Array,
    Number,
    as_number,
    broadcast_to,
    builds,
    cast,
    explain,
    float_and_number,
    is_number,
    make,
    pair,
    unquantized,
    wide,
)
from opweave.ops.samples import ROWS, measured, operand

__all__ = ["clamp", "maximum", "minimum", "step", "where"]

# --- by size --------------------------------------------------------------------------------------------------------

MINIMUM = elementwise("minimum", lambda a, b: np.minimum(wide(a), wide(b)), "min(a, b)", sources=2, exact=True)


@builds(MINIMUM)
def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of two elements, broadcast and promoted; NaN where either is NaN. False is less than True.

    A float tensor and a bare number become `clamp`.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand.
    """
    if (met := float_and_number(a, b)) is not None:
        return clamp(met[0], max=met[1])
    return node(MINIMUM, pair("minimum", a, b), {})


MAXIMUM = elementwise("maximum", lambda a, b: np.maximum(wide(a), wide(b)), "max(a, b)", sources=2, exact=True)


@builds(MAXIMUM)
def maximum(a: Any, b: Any) -> Tensor:
    """The larger of two elements, broadcast and promoted; NaN where either is NaN. Otherwise as `minimum`."""
    if (met := float_and_number(a, b)) is not None:
        return clamp(met[0], min=met[1])
    return node(MAXIMUM, pair("maximum", a, b), {})


def _clamp(x: Array, *, min: Number, max: Number) -> Array:
    return np.asarray(np.minimum(np.maximum(wide(x), min), max))


CLAMP = elementwise("clamp", _clamp, "min(max(x, least), largest)", flops=2, exact=True)


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


STEP = elementwise("step", lambda x: np.greater(wide(x), 0), "1 if x > 0, else 0", exact=True)


@builds(STEP)
def step(x: Any) -> Tensor:
    """1 where ``x`` is above zero, else 0, also for NaN; of the dtype of ``x``, bool becomes i32.

    Raises:
        DTypeError: a quantized operand.
    """
    x = unquantized("step", x)
    return node(STEP, (cast(x, i32) if x.dtype is bool_ else x,), {})


# --- by a condition -------------------------------------------------------------------------------------------------


def _where_infer(condition: Tensor, a: Tensor, b: Tensor) -> tuple[Shape, DType]:
    if condition.dtype is not bool_ or condition.shape != a.shape:
        raise ShapeError(f"the condition is bool and of the others' shape: {condition.describe()} and {a.describe()}")
    return same(a, b)


WHERE = OpDef(
    "where",
    infer=_where_infer,
    reference=lambda condition, a, b: np.where(condition, a, b),
    inplace=(1, 2),
    pointwise=True,
    formula="a where the condition holds, else b",
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
