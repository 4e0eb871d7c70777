"""Replacing rows of a tensor by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.indexing import check_ids, check_rows, spread
from opweave.ops.operands import Array, as_ids, builds, cast, make, plain

__all__ = ["set_rows"]


def _infer(x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Shape, DType]:
    check_rows("set_rows", x, ids, rows)
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
        values = spread("set_rows", values, (*i.shape, *y.shape[1:]), y)
    return node(SET_ROWS, (y, i, cast(values, y.dtype)), {})
