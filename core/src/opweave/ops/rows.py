"""Replacing rows of a tensor by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.indexing import check_ids
from opweave.ops.movement import broadcast_to
from opweave.ops.operands import Array, as_ids, builds, cast, make, plain

__all__ = ["set_rows"]


def _infer(x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Shape, DType]:
    if not x.ndim or ids.ndim != 1 or rows.shape != (*ids.shape, *x.shape[1:]) or rows.dtype is not x.dtype:
        raise ShapeError(
            "set_rows: needs a tensor (n, ...), ids (m,) and rows (m, ...) of the tensor's dtype, not "
            f"{x.describe()}, {ids.describe()} and {rows.describe()}"
        )
    return x.shape, x.dtype


def _set_rows(x: Array, ids: Array, rows: Array) -> Array:
    check_ids("set_rows", ids, x.shape[0])
    out = np.array(x)
    out[ids] = rows
    return out


SET_ROWS = OpDef(
    "set_rows",
    infer=_infer,
    reference=_set_rows,
    inplace=(0,),
    indices=(1,),
    formula="y = x, but y[ids[i], ...] = rows[i, ...]",
    exact=True,
    runs_like="copy",
)


@builds(SET_ROWS)
def set_rows(x: Any, ids: Any, rows: Any) -> Tensor:
    """``x`` with some rows replaced; ``x`` itself stays as it is. For states there is `index_copy`.

    Args:
        x: shape (n, ...), any plain dtype.
        ids: i32 or i64, shape (m,), each 0 .. n - 1 (else `BoundsError` when the reference reads them). Where an index
            repeats, the last of its rows stays.
        rows: broadcasts to (m, ...) and takes the dtype of ``x``.

    Returns:
        The shape of ``x``.

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: ids of another dtype, quantized operands.
    """
    y, i = make("set_rows", x), as_ids("set_rows", "ids", ids)
    values = make("set_rows", rows, y)
    plain("set_rows", y, values)
    if y.ndim and i.ndim == 1:
        try:
            values = broadcast_to(values, (*i.shape, *y.shape[1:]))
        except ShapeError as error:
            raise ShapeError(f"set_rows: {error}; of {y.describe()}, {i.describe()} and {values.describe()}") from None
    return node(SET_ROWS, (y, i, cast(values, y.dtype)), {})
