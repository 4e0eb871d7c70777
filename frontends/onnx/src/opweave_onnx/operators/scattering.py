"""Replacing parts of a tensor by index, adding to them, and reducing them with others.

Elements or parts are rows of the flattened tensor: `opweave.set_rows` replaces them, and `opweave.index_add` adds to
them. The other reductions (mul, min, max) run on ``host``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import BoundsError, ShapeError
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.indexing import flat_place, from_front, last_axis_parts
from opweave_onnx.operators.movement import axis_of
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call


@host_operation("scatter_rows")
def _scatter_rows(x: Array, ids: Array, rows: Array, *, reduction: str) -> Array:
    """x with the rows at ids reduced with the given rows, one after the other."""
    if ids.size and not 0 <= ids.min() <= ids.max() < len(x):
        raise BoundsError(f"indices from {ids.min()} to {ids.max()} for {len(x)} rows")
    result = np.array(x)
    ufuncs: dict[str, Any] = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
    if result.dtype.kind == "b":
        ufuncs |= {"add": np.logical_or, "mul": np.logical_and}
    ufuncs[reduction].at(result, ids, rows)
    return result


def scattered(x: Tensor, ids: Tensor, rows: Tensor, reduction: str) -> Tensor:
    """``x`` with rows replaced by or reduced with others.

    Args:
        ids: one axis, none negative; where an id repeats, the last of its rows stays.
        reduction: ``"none"``, ``"add"``, ``"mul"``, ``"min"`` or ``"max"``.

    Raises:
        ShapeError: another reduction.
    """
    if reduction == "none":
        return ow.set_rows(x, ids, rows)
    if reduction not in ("add", "mul", "min", "max"):
        raise ShapeError(f"there is no reduction {reduction!r}")
    if reduction == "add" and str(x.dtype) != "bool":
        return x + ow.index_add(ids, rows, x.shape[0])
    return _scatter_rows(x, ids, rows, shape=x.shape, dtype=x.dtype, reduction=reduction)


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call, x: Tensor, ids: Tensor, updates: Tensor) -> Tensor:
    axis = axis_of(x, call.get("axis", 0))
    if ids.ndim != x.ndim or any(n > m for i, (n, m) in enumerate(zip(ids.shape, x.shape, strict=True)) if i != axis):
        raise ShapeError(f"indices {ids.describe()} do not fit into {x.describe()} beside axis {axis}")
    strides = [prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    others = [i for i in range(x.ndim) if i != axis]
    grid = np.indices(ids.shape, np.int64, sparse=True)
    first = np.broadcast_to(sum([grid[i] * strides[i] for i in others], np.zeros((), np.int64)), ids.shape)
    place = flat_place(call, [ids], [x.shape[axis]], strides[axis], np.ascontiguousarray(first))
    flat = scattered(ow.flatten(x), ow.flatten(place), ow.flatten(updates), call.get("reduction", "none"))
    return ow.reshape(flat, x.shape)


@operator("ScatterND")
def _scatter_nd(call: Call, x: Tensor, ids: Tensor, updates: Tensor) -> Tensor:
    depth = ids.shape[-1]
    if depth > x.ndim:
        raise ShapeError(f"indices {ids.describe()} name more axes than {x.describe()} has")
    none = call.tensor(np.zeros(ids.shape[:-1], np.int64))
    place = flat_place(call, last_axis_parts(call, ids), x.shape[:depth]) if depth else none
    rows = ow.reshape(x, (prod(x.shape[:depth]), *x.shape[depth:]))
    given = ow.reshape(updates, (prod(ids.shape[:-1]), *x.shape[depth:]))
    return ow.reshape(scattered(rows, ow.flatten(place), given, call.get("reduction", "none")), x.shape)


@operator("TensorScatter")
def _tensor_scatter(call: Call, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    """``past`` with ``update`` written into it along an axis, from an index for each element of the batch on."""
    axis = axis_of(past, call.get("axis", -2))
    batch, n, m = past.shape[0], past.shape[axis], update.shape[axis]
    first = call.tensor(np.zeros(batch, np.int64)) if starts is None else starts.astype("i64")
    place = ow.expand_dims(first, 1) + call.tensor(np.arange(m))
    if call.get("mode", "linear") == "circular":
        place = ow.where(ow.less(place, call.tensor(np.array(n))), place, place - n)
    row = call.tensor(np.arange(batch).reshape(-1, 1) * n)
    inner = [i for i in range(1, past.ndim) if i != axis]
    order = (0, axis, *inner)
    rows, given = (
        ow.reshape(ow.transpose(v, order), (batch * v.shape[axis], *[past.shape[i] for i in inner]))
        for v in (past, update)
    )
    written = ow.reshape(ow.set_rows(rows, ow.flatten(place + row), given), [past.shape[i] for i in order])
    return ow.transpose(written, [order.index(i) for i in range(past.ndim)])


@operator("MaxUnpool")
def _max_unpool(call: Call, x: Tensor, places: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Zeros with the elements of ``x`` at the flat indices that MaxPool returned."""
    rank = x.ndim - 2
    kernel = call.get("kernel_shape", ())
    strides, pads = call.get("strides", ()) or (1,) * rank, call.get("pads", ()) or (0,) * (2 * rank)
    inferred = [(n - 1) * s + k - pads[i] - pads[rank + i]
                for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))]  # fmt: skip
    shape = (*x.shape[:2], *inferred)
    ids = from_front(call, ow.flatten(places), prod(shape))
    result = ow.reshape(ow.set_rows(ow.full((prod(shape),), 0, x.dtype), ids, ow.flatten(x)), shape)
    if wanted is None or call.integers(wanted) == shape:
        return result
    target = call.integers(wanted)
    return ow.pad(result, [(0, n - m) for n, m in zip(target, shape, strict=True)])
