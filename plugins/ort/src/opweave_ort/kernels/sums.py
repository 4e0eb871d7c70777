"""Sums and means of any length: ONNX Runtime adds up the elements of an axis in f32 one after the other."""

from __future__ import annotations

from math import prod
from typing import Final

from opweave.graph.dtypes import DType, f32, f64
from opweave.graph.layout import Shape
from opweave_ort.limits import limit
from opweave_ort.model import Model

__all__ = ["LONGEST", "reduced"]

LONGEST: Final = limit("longest_sum", 1 << 14, 4, 1 << 14, bounds=(1, 1 << 14))
"""How many elements are added up at once. Longer axes are cut into parts, which takes no more time; an axis that has no
divisor for it is added up in f64, which takes three times as long."""


def reduced(m: Model, kind: str, value: str, dtype: DType, shape: Shape, axes: tuple[int, ...]) -> str:
    """``ReduceSum`` or ``ReduceMean`` of a value over axes, which keep length 1."""
    if dtype is not f32 or prod([shape[axis] for axis in axes]) <= LONGEST.value:
        return _over(m, kind, value, *axes)
    for axis in reversed(axes):
        value = _along(m, kind, value, shape, axis)
        shape = (*shape[:axis], 1, *shape[axis + 1 :])
    return value


def _along(m: Model, kind: str, value: str, shape: Shape, axis: int) -> str:
    n, most = shape[axis], LONGEST.value
    if n <= most:
        return _over(m, kind, value, axis)
    part = next(d for d in range(most, 0, -1) if n % d == 0)
    if n // part > most:
        return m.cast(_over(m, kind, m.cast(value, f32, f64), axis), f64, f32)
    parts = m.reshape(value, (*shape[:axis], n // part, part, *shape[axis + 1 :]))
    value = _over(m, kind, _over(m, kind, parts, axis + 1), axis)
    return m.reshape(value, (*shape[:axis], 1, *shape[axis + 1 :]))


def _over(m: Model, kind: str, value: str, *axes: int) -> str:
    return m(kind, value, m.integers(*axes), keepdims=1, noop_with_empty_axes=1)
