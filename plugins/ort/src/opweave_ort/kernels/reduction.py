"""Reductions over axes, counting, sorting and cumulative sums."""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np

from opweave.graph.dtypes import bool_, f32, f64, i32, i64
from opweave_ort.kernels.sums import reduced
from opweave_ort.kernels.table import INTEGERS, NUMBERS, PLAIN, emits
from opweave_ort.model import Model, Operand

_REDUCTIONS: Final = {
    "sum": "ReduceSum", "prod": "ReduceProd", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin",
}  # fmt: skip


def _reduce(m: Model, kind: str, value: str, axes: tuple[int, ...]) -> str:
    return m(kind, value, m.integers(*axes), keepdims=0, noop_with_empty_axes=1)


@emits("mean", "prod", "sum")
def reduce(m: Model, op: str, out: Operand, x: Operand, *, axes: tuple[int, ...]) -> str:
    if op == "prod":
        return _reduce(m, _REDUCTIONS[op], m.expanded(x), axes)
    return m.reshape(reduced(m, _REDUCTIONS[op], m.expanded(x), x.dtype, x.shape, axes), out.shape)


@emits("sum", dtypes=INTEGERS)
def sum_of_integers(m: Model, op: str, out: Operand, x: Operand, *, axes: tuple[int, ...]) -> str:
    """A product with ones: ONNX Runtime's ReduceSum adds up integers in f64, its MatMul in their own type."""
    value, kept = m.expanded(x), [axis for axis in range(len(x.shape)) if axis not in axes]
    order, count = [*kept, *axes], prod([x.shape[axis] for axis in axes])
    if not count:
        return m("Expand", m.constant(0, out.dtype), m.integers(*out.shape))
    if order != sorted(order):
        value = m("Transpose", value, perm=order)
    ones = m("Expand", m.constant(1, out.dtype), m.integers(count, 1))
    return m.reshape(m("MatMul", m.reshape(value, (prod(out.shape), count)), ones), out.shape)


@emits("max", "min", dtypes=NUMBERS)
def extreme(m: Model, op: str, out: Operand, x: Operand, *, axes: tuple[int, ...]) -> str:
    value = m.expanded(x)
    result = _reduce(m, _REDUCTIONS[op], value, axes)
    if x.dtype.is_integer:
        return result
    wrong = _reduce(m, "ReduceMax", _is_nan(m, value), axes)
    return m("Where", m.cast(wrong, i32, bool_), m.constant(np.nan, x.dtype), result)


def _is_nan(m: Model, value: str) -> str:
    """i32 numbers, 1 where an element is NaN and else 0: ONNX Runtime's maximum may drop NaN, but not these."""
    return m.cast(m("IsNaN", value), bool_, i32)


@emits("var")
def var(m: Model, op: str, out: Operand, x: Operand, *, axes: tuple[int, ...], correction: float) -> str:
    value = m.expanded(x)
    centered = m("Sub", value, reduced(m, "ReduceMean", value, x.dtype, x.shape, axes))
    total = m.reshape(reduced(m, "ReduceSum", m("Mul", centered, centered), x.dtype, x.shape, axes), out.shape)
    count = max(prod([x.shape[a] for a in axes]) - correction, 0.0)
    return m("Div", total, m.constant(count, x.dtype))


@emits("argmax", dtypes=NUMBERS)
def argmax(m: Model, op: str, out: Operand, x: Operand, *, axis: int) -> str:
    value = m.expanded(x)
    result = m("ArgMax", value, axis=axis, keepdims=0)
    if x.dtype.is_integer:
        return result
    wrong = _is_nan(m, value)
    first = m("ArgMax", wrong, axis=axis, keepdims=0)
    return m("Where", m.cast(_reduce(m, "ReduceMax", wrong, (axis,)), i32, bool_), first, result)


@emits("count_equal", dtypes=PLAIN)
def count_equal(m: Model, op: str, out: Operand, a: Operand, b: Operand) -> str:
    same = m.cast(m("Equal", m.expanded(a), m.expanded(b)), bool_, i64)
    return m("ReduceSum", same, keepdims=0)


@emits("cumsum", dtypes=NUMBERS)
def cumsum(m: Model, op: str, out: Operand, x: Operand, *, axis: int) -> str:
    # In f64, because rounding errors of f32 add up along the axis.
    wide = f64 if x.dtype is f32 else x.dtype
    return m.cast(m("CumSum", m.cast(m.expanded(x), x.dtype, wide), m.constant(axis, i64)), wide, x.dtype)


_ORDERED: Final = "f32 f16 bf16 i64 i32 i16 i8 u8"


def _keys(m: Model, x: Operand) -> str:
    """Values in the order of the elements, with NaN the largest, for ``TopK``, which does not define where NaN goes."""
    value = m.expanded(x)
    if x.dtype.is_integer:
        return value
    wide = m("Min", m.cast(value, f32, f64), m.constant(1e300, f64))  # below infinity, which stands for NaN
    return m("Where", m("IsNaN", value), m.constant(np.inf, f64), wide)


@emits("top_k", dtypes=_ORDERED)
def top_k(m: Model, op: str, out: Operand, x: Operand, *, k: int, axis: int) -> str:
    return m.several(2, "TopK", _keys(m, x), m.integers(k), axis=axis, largest=1, sorted=1)[1]


@emits("argsort", dtypes=_ORDERED)
def argsort(m: Model, op: str, out: Operand, x: Operand, *, axis: int, descending: bool, stable: bool) -> str:
    count = m.integers(x.shape[axis])
    return m.several(2, "TopK", _keys(m, x), count, axis=axis, largest=int(descending), sorted=1)[1]
