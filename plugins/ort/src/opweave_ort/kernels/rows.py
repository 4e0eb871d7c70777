"""Rows replaced by index."""

from __future__ import annotations

from opweave_ort.kernels.indexing import rows_written
from opweave_ort.kernels.table import PLAIN, emits
from opweave_ort.model import Model, Operand


@emits("set_rows", dtypes=PLAIN, moves=True)
def set_rows(m: Model, op: str, out: Operand, x: Operand, ids: Operand, rows: Operand) -> str:
    return rows_written(m, m.expanded(x), x.shape[0], ids, rows)
