"""Creating tensors: nodes without sources."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from opweave.errors import DTypeError, OpweaveError, ShapeError
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, bool_, f32, i64
from opweave.graph.layout import check_shape
from opweave.graph.opdef import OpDef, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, Number, as_fill, builds, is_number

__all__ = ["arange", "full"]


def _plain_dtype(op: str, dtype: DTypeLike) -> DType:
    result = as_dtype(dtype)
    if result.is_quantized:
        raise DTypeError(f"{op}: a node cannot produce {result}; take a plain dtype")
    return result


FULL = OpDef(
    "full",
    infer=lambda *, shape, value, dtype: (shape, dtype),
    reference=lambda *, shape, value, dtype: np.full(shape, value, dtype.numpy),
    formula="value",
    exact=True,
)


@builds(FULL)
def full(shape: Any, value: Number, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor of one number, in memory of its own; NumPy's ``full``.

    ``ow.constant(value).broadcast_to(shape)`` has the same elements in memory of one of them.

    Args:
        shape: lengths of up to 8 axes.
        value: the number.
        dtype: any plain one; by default bool for bools, i64 for integers, f32 for other numbers.

    Raises:
        ShapeError: no shape.
        DTypeError: no number, one that ``dtype`` does not hold, or a quantized dtype.
        UnknownNameError: no such dtype.
    """
    if dtype is None:
        # Integers that are no Python number, as an array without axes, have __index__ too.
        dtype = bool_ if isinstance(value, (bool, np.bool_)) else i64 if hasattr(value, "__index__") else f32
    made = _plain_dtype("full", dtype)
    try:
        target = check_shape(shape, made)
    except OpweaveError as error:
        raise type(error)(f"full: {error}") from None
    return node(FULL, (), {"shape": target, "value": as_fill("full", value, made), "dtype": made})


def _arange(*, start: Number, step: Number, count: int, dtype: DType) -> Array:
    places = np.arange(count, dtype=np.float64 if dtype.is_float else np.int64)
    return np.add(np.multiply(places, step), start)


ARANGE = OpDef(
    "arange",
    infer=lambda *, start, step, count, dtype: ((count,), dtype),
    reference=_arange,
    flops=flops_per_element(2),
    formula="y[i] = start + i · step",
)


@builds(ARANGE)
def arange(start: Number, stop: Number | None = None, step: Number = 1, dtype: DTypeLike | None = None) -> Tensor:
    """Evenly spaced numbers from ``start`` up to but without ``stop``, as NumPy's ``arange``.

    The attributes are ``start``, ``step``, ``count`` and ``dtype``; elements are computed in f64 (floats) or i64.

    Args:
        start: the first number; given alone, it is ``stop`` and the first number is 0.
        stop: where they end.
        step: from one to the next; may be negative.
        dtype: by default i64 where all numbers are integers, else f32.

    Returns:
        Shape (max(0, ceil((stop - start) / step)),).

    Raises:
        ShapeError: a step of 0, or 2^63 numbers or more.
        DTypeError: something that is no number, numbers that ``dtype`` does not hold, bool or a quantized dtype.
        UnknownNameError: no such dtype.
    """
    if stop is None:
        start, stop = 0, start
    for number in (start, stop, step):
        if not is_number(number) or isinstance(number, bool) or number != number or abs(number) == float("inf"):
            raise DTypeError(f"arange: takes finite Python numbers, not {number!r:.60}")
    if not step:
        raise ShapeError("arange: the step is 0")
    whole = all(isinstance(number, int) for number in (start, stop, step))
    made = _plain_dtype("arange", (i64 if whole else f32) if dtype is None else dtype)
    if made is bool_:
        raise DTypeError("arange: bool has no arithmetic; take an integer dtype")
    count = max(0, -((start - stop) // step) if whole else ceil((stop - start) / step))
    if count >= 1 << 63:
        raise ShapeError(f"arange: {count} elements have more bytes than the address space")
    first, by = as_fill("arange", start, made), as_fill("arange", step, i64 if made.is_integer else made)
    if count and made.is_integer:
        as_fill("arange", first + (count - 1) * by, made)
    return node(ARANGE, (), {"start": first, "step": by, "count": int(count), "dtype": made})
