"""Reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.movement import axes_of, axis_of
from opweave_onnx.operators.table import operator
from opweave_onnx.trace import Call

Axes = tuple[int, ...]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.is_float else x.astype(f32)


@composite
def _log_sum_exp(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    y = _wide(x)
    top = ow.max(y, axes, True)
    finite = ow.where(ow.equal(ow.abs(top), ow.constant(np.inf, top.dtype)), ow.constant(0, top.dtype), top)
    result = ow.log(ow.sum(ow.exp(y - finite), axes, True)) + finite
    return result if keep else ow.squeeze(result, axes)


REDUCTIONS: Final[dict[str, Callable[[Tensor, Axes, bool], Tensor]]] = {
    "ReduceSum": lambda x, axes, keep: ow.sum(x, axes, keep),
    "ReduceMean": lambda x, axes, keep: ow.mean(x, axes, keep),
    "ReduceMax": lambda x, axes, keep: ow.max(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: ow.min(x, axes, keep),
    "ReduceProd": lambda x, axes, keep: ow.prod(x, axes, keep),
    "ReduceL1": lambda x, axes, keep: ow.sum(ow.abs(x), axes, keep),
    "ReduceL2": composite(lambda x, axes, keep: ow.sqrt(ow.sum(ow.square(_wide(x)), axes, keep))),
    "ReduceSumSquare": composite(lambda x, axes, keep: ow.sum(ow.square(x), axes, keep)),
    "ReduceLogSum": composite(lambda x, axes, keep: ow.log(ow.sum(_wide(x), axes, keep))),
    "ReduceLogSumExp": _log_sum_exp,
}


def _limits(x: Tensor) -> np.iinfo[Any]:
    return np.iinfo(x.dtype.numpy)


EMPTY: Final[dict[str, Callable[[Tensor], Any]]] = {
    "ReduceMax": lambda x: -np.inf if x.dtype.is_float else _limits(x).min,
    "ReduceMin": lambda x: np.inf if x.dtype.is_float else _limits(x).max,
    "ReduceLogSumExp": lambda x: -np.inf,
}
"""The results of empty reductions, for operators whose operation in opweave refuses empty operands."""


@operator(*REDUCTIONS)
def _reduce(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    at = axes_of(call, x, axes)
    keep = bool(call.get("keepdims", 1))
    if not at:
        if call.get("noop_with_empty_axes", 0):
            # Reduction along no axis: each element is reduced by itself.
            return _elements(call.node.op, x).astype(x.dtype)
        at = tuple(range(x.ndim))
    if not at:
        return _elements(call.node.op, x).astype(x.dtype)
    is_bool = x.dtype.name == "bool"
    if not x.size and (is_bool or call.node.op in EMPTY):
        shape = [1 if i in at else n for i, n in enumerate(x.shape) if keep or i not in at]
        return ow.full(shape, call.node.op == "ReduceMin" if is_bool else EMPTY[call.node.op](x), x.dtype)
    if is_bool:
        return REDUCTIONS[call.node.op](x.astype("u8"), at, keep).astype("bool")
    return REDUCTIONS[call.node.op](x, at, keep).astype(x.dtype)


def _elements(op: str, x: Tensor) -> Tensor:
    match op:
        case "ReduceL1" | "ReduceL2":
            return ow.abs(x)
        case "ReduceSumSquare":
            return ow.square(x)
        case "ReduceLogSum":
            return ow.log(x)
    return x


@operator("ArgMax", "ArgMin")
def _arg(call: Call, x: Tensor) -> Tensor:
    axis, keep = axis_of(x, call.get("axis", 0)), bool(call.get("keepdims", 1))
    y = ow.flip(x, axis) if call.get("select_last_index", 0) else x
    if call.node.op == "ArgMin":
        if y.dtype.is_float:
            y = ow.neg(y)
        else:  # the complement reverses the order of integers within their type
            y = ow.sub(ow.constant(np.iinfo(y.dtype.numpy).max if y.dtype.kind == "u" else -1, y.dtype), y)
    found = ow.argmax(y, axis, keep)
    return ow.sub(ow.constant(x.shape[axis] - 1, "i64"), found) if call.get("select_last_index", 0) else found
