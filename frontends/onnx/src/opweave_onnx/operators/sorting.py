"""Orders and running sums."""

from __future__ import annotations

import numpy as np

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.movement import axis_of
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call


@operator("TopK")
def _top_k(call: Call, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    count = call.get("k", 0) if k is None else int(call.known(k).reshape(()))
    axis = axis_of(x, call.get("axis", -1))
    if call.get("largest", 1):
        return ow.top_k(x, count, axis)
    order = ow.argsort(x, axis, stable=True)
    ids = order[tuple([slice(0, count) if i == axis else slice(None) for i in range(x.ndim)])]
    return ow.take_along_axis(x, ids, axis), ids


@host_operation("cumprod")
def _cumprod(x: Array, *, axis: int) -> Array:
    """The running product along axis."""
    if x.dtype.kind in "iu":
        return np.cumprod(x, axis, dtype=x.dtype)
    return np.cumprod(x.astype(np.float64), axis)


@operator("CumSum", "CumProd")
def _cumulated(call: Call, x: Tensor, axis: Tensor) -> Tensor:
    at = axis_of(x, int(call.known(axis).reshape(())))
    y = ow.flip(x, at) if call.get("reverse", 0) else x
    is_sum = call.node.op == "CumSum"
    if call.get("exclusive", 0):
        shape = [1 if i == at else n for i, n in enumerate(x.shape)]
        rest = y[tuple([slice(0, x.shape[at] - 1) if i == at else slice(None) for i in range(x.ndim)])]
        y = ow.concat([ow.full(shape, 0 if is_sum else 1, x.dtype), rest], at)
    result = ow.cumsum(y, at).astype(x.dtype) if is_sum else _cumprod(y, shape=y.shape, dtype=y.dtype, axis=at)
    return ow.flip(result, at) if call.get("reverse", 0) else result
