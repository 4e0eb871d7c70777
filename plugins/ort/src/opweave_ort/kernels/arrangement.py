"""Elements in another order, padding, triangles and diagonals; tensors without sources (``full``, ``arange``)."""

from __future__ import annotations

import numpy as np

from opweave.graph.dtypes import DType, f64, i64
from opweave_ort.kernels.table import NUMBERS, PLAIN, emits
from opweave_ort.model import Model, Operand

_LAST = np.iinfo(np.int64).min


@emits("flip", dtypes=PLAIN, moves=True)
def flip(m: Model, op: str, out: Operand, x: Operand, *, axes: tuple[int, ...]) -> str:
    count = len(axes)
    return m("Slice", m.expanded(x), m.integers(*[-1] * count), m.integers(*[_LAST] * count), m.integers(*axes),
             m.integers(*[-1] * count))  # fmt: skip


@emits("roll", dtypes=PLAIN, moves=True)
def roll(m: Model, op: str, out: Operand, x: Operand, *, shifts: tuple[int, ...]) -> str:
    value = m.expanded(x)
    for axis, (shift, n) in enumerate(zip(shifts, x.shape, strict=True)):
        if n and shift % n:
            at = m.integers(n - shift % n)
            head = m("Slice", value, m.integers(0), at, m.integers(axis))
            tail = m("Slice", value, at, m.integers(n), m.integers(axis))
            value = m("Concat", tail, head, axis=axis)
    return value


@emits("pad", dtypes=PLAIN)
def pad(
    m: Model, op: str, out: Operand, x: Operand, *, widths: tuple[tuple[int, int], ...], mode: str, value: float
) -> str:
    pads = m.integers(*[before for before, _ in widths], *[after for _, after in widths])
    fill = [m.constant(value, x.dtype)] if mode == "constant" else []
    return m("Pad", m.expanded(x), pads, *fill, mode=mode)


@emits("tril", "triu", dtypes=PLAIN)
def triangle(m: Model, op: str, out: Operand, x: Operand, *, k: int) -> str:
    return m("Trilu", m.expanded(x), m.constant(np.int64(k)), upper=int(op == "triu"))


@emits("full", dtypes=PLAIN)
def full(m: Model, op: str, out: Operand, *, shape: tuple[int, ...], value: float, dtype: DType) -> str:
    return m("Expand", m.constant(value, out.dtype), m.integers(*shape)) if shape else m.constant(value, out.dtype)


@emits("arange", dtypes=PLAIN)
def arange(m: Model, op: str, out: Operand, *, start: float, step: float, count: int, dtype: DType) -> str:
    wide = f64 if dtype.is_float else i64
    places = m.cast(m("Range", *[m.constant(n, i64) for n in (0, count, 1)]), i64, wide)
    values = m("Add", m("Mul", places, m.constant(step, wide)), m.constant(start, wide))
    return m.cast(m.cast(values, wide, dtype), dtype, out.dtype)


@emits("diag_embed", dtypes=NUMBERS)
def diag_embed(m: Model, op: str, out: Operand, x: Operand, *, offset: int) -> str:
    n = out.shape[-1]
    rows = np.zeros((n, n), np.bool_)
    length = x.shape[-1]
    first = (max(-offset, 0), max(offset, 0))
    rows[first[0] + np.arange(length), first[1] + np.arange(length)] = True
    at = np.clip(np.arange(n) - first[1], 0, length - 1)
    spread = m("Unsqueeze", m("Gather", m.expanded(x), m.constant(at), axis=-1), m.integers(-2))
    return m("Where", m.constant(rows), spread, m.constant(0, x.dtype))
