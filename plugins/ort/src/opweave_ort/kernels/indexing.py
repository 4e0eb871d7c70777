"""Reading, writing and adding up by index, replacing regions of a tensor, and writing into states.

Emitters of operations in `WRITES_OVER` get the present content of the region first; the results of all that write are
bound to its memory. ONNX Runtime's scatter operators then write rows where they are, and copy nothing else.
"""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np

from opweave.graph.dtypes import i64
from opweave_ort.kernels.direct import spread
from opweave_ort.kernels.table import NUMBERS, PLAIN, emits
from opweave_ort.model import Model, Operand

__all__ = ["WRITES_OVER", "checked", "rows_written"]

WRITES_OVER: Final = frozenset({"index_copy", "accumulate"})
"""Operations whose result contains elements of the region that they write into."""


def checked(m: Model, ids: Operand, n: int) -> str:
    """The indices, negative ones replaced by ``n``: operators would count those from the end, and raise for ``n``."""
    value = m.expanded(ids)
    return m("Where", m("Less", value, m.constant(0, ids.dtype)), m.constant(n, ids.dtype), value)


@emits("embedding", dtypes=PLAIN, moves=True)
def embedding(m: Model, op: str, out: Operand, table: Operand, ids: Operand) -> str:
    return m("Gather", m.expanded(table), checked(m, ids, table.shape[0]), axis=0)


@emits("take_along_axis", dtypes=PLAIN, moves=True)
def take_along_axis(m: Model, op: str, out: Operand, x: Operand, ids: Operand, *, axis: int) -> str:
    return m("GatherElements", m.expanded(x), checked(m, ids, x.shape[axis]), axis=axis)


@emits("index_add", dtypes="f64 f32 f16 bf16 i64 i32")
def index_add(m: Model, op: str, out: Operand, ids: Operand, rows: Operand, *, n: int) -> str:
    zeros = m("Expand", m.constant(0, out.dtype), m.integers(*out.shape))
    count, rest = prod(ids.shape), out.shape[1:]
    at = m.reshape(checked(m, ids, n), (count, *[1] * len(rest)))
    values = m.reshape(m.expanded(rows), (count, *rest))
    # ScatterND would add rows of one index at the same time from several threads.
    return m("ScatterElements", zeros, m("Expand", at, m.integers(count, *rest)), values, axis=0, reduction="add")


def _region(m: Model, x: Operand, value: Operand, offsets: tuple[int, ...]) -> tuple[str, str]:
    """The value in the shape of the tensor, with zeros around it, and a mask of where it is."""
    widths = [*offsets, *[n - at - k for n, at, k in zip(x.shape, offsets, value.shape, strict=True)]]
    inside = np.zeros(x.shape, np.bool_)
    inside[tuple([slice(at, at + k) for at, k in zip(offsets, value.shape, strict=True)])] = True
    spread = m.expanded(value)
    if offsets:  # ONNX Runtime's Pad refuses a tensor without axes
        spread = m("Pad", spread, m.integers(*widths), m.constant(0, x.dtype), mode="constant")
    return spread, m.constant(inside)


@emits("set_region", dtypes=NUMBERS)
def set_region(m: Model, op: str, out: Operand, x: Operand, value: Operand, *, offsets: tuple[int, ...]) -> str:
    spread, inside = _region(m, x, value, offsets)
    return m("Where", inside, spread, m.expanded(x))


@emits("add_region", dtypes=NUMBERS)
def add_region(m: Model, op: str, out: Operand, x: Operand, value: Operand, *, offsets: tuple[int, ...]) -> str:
    spread, inside = _region(m, x, value, offsets)
    value_of = m.expanded(x)
    return m("Where", inside, m("Add", value_of, spread), value_of)


# --- writing --------------------------------------------------------------------------------------------------------


@emits("index_copy", dtypes=PLAIN, moves=True)
def index_copy(m: Model, op: str, out: Operand, state: Operand, ids: Operand, rows: Operand) -> str:
    return rows_written(m, state.name, state.shape[0], ids, rows)


def rows_written(m: Model, table: str, n: int, ids: Operand, rows: Operand) -> str:
    """A table of ``n`` rows in which some are replaced; of equal indices the last one counts."""
    count = ids.shape[0]
    at, values = checked(m, ids, n), m.expanded(rows)
    where = m.reshape(m.cast(at, ids.dtype, i64), (count, 1))
    if count > 1:
        # Threads that write rows of one index at the same time write equal ones.
        numbers = m.constant(np.arange(count))
        winner = m("ScatterND", m.constant(np.zeros(n, np.int64)), where, numbers)
        values = m("Gather", values, m("Gather", winner, at, axis=0), axis=0)
    return m("ScatterND", table, where, values)


@emits("assign", dtypes=PLAIN, moves=True)
def assign(m: Model, op: str, out: Operand, value: Operand) -> str:
    return m.expanded(value)


@emits("accumulate", dtypes=NUMBERS)
def accumulate(m: Model, op: str, out: Operand, state: Operand, value: Operand) -> str:
    return m("Add", *spread(m, out, state, value))
