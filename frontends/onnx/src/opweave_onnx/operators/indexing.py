"""Elements that indices name."""

from __future__ import annotations

from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import BoundsError
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.movement import axis_of, taken
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

__all__ = ["from_front"]


def from_front(call: Call, ids: Tensor, n: int) -> Tensor:
    """Indices that count from the front: negative ones count from the end. Raises `BoundsError` for known ones that are
    outside."""
    known = call.trace.session.array(ids)
    if known is not None:
        if known.size and not -n <= int(known.min()) <= int(known.max()) < n:
            raise BoundsError(f"indices from {known.min()} to {known.max()} for an axis of length {n}")
        return ids if not known.size or known.min() >= 0 else ow.constant(np.where(known < 0, known + n, known))
    return ow.where(ow.less(ids, ow.constant(0, ids.dtype)), ids + n, ids)


@operator("Gather")
def _gather(call: Call, x: Tensor, ids: Tensor) -> Tensor:
    axis = axis_of(x, call.get("axis", 0))
    ids = from_front(call, ids, x.shape[axis])
    known = call.trace.session.array(ids)
    if known is not None and not known.shape:  # one of them: a view
        return x[tuple([slice(None)] * axis + [int(known)])]
    return taken(x, ids, axis)


@operator("GatherElements")
def _gather_elements(call: Call, x: Tensor, ids: Tensor) -> Tensor:
    axis = axis_of(x, call.get("axis", 0))
    # NumPy and opweave want equal lengths along the other axes; ONNX allows fewer indices.
    x = x[tuple([slice(None) if i == axis else slice(0, n) for i, n in enumerate(ids.shape)])]
    return ow.take_along_axis(x, from_front(call, ids, x.shape[axis]), axis)


@operator("GatherND")
def _gather_nd(call: Call, x: Tensor, ids: Tensor) -> Tensor:
    batch, depth = call.get("batch_dims", 0), ids.shape[-1]
    lengths = x.shape[batch : batch + depth]
    flat = ow.reshape(x, (int(np.prod(x.shape[: batch + depth], dtype=np.int64)), *x.shape[batch + depth :]))
    place: Any = None
    for i, n in enumerate(lengths):
        part = from_front(call, ids[..., i], n)
        place = part if place is None else place * n + part
    if batch:
        count, each = int(np.prod(x.shape[:batch])), int(np.prod(lengths))
        first = np.arange(count).reshape(*x.shape[:batch], *[1] * (place.ndim - batch)) * each
        place = place + ow.constant(first.astype(place.dtype.numpy))
    return ow.embedding(flat, place)


# --- scattering -----------------------------------------------------------------------------------------------------


@host_operation("scatter_elements")
def _scatter_elements(x: Array, ids: Array, updates: Array, *, axis: int, reduction: str) -> Array:
    """x with x[..., ids[..., i, ...], ...] replaced by, or reduced with, updates[..., i, ...], one after the other."""
    places: list[Array] = list(np.indices(ids.shape, sparse=True))
    places[axis] = np.where(ids < 0, ids + x.shape[axis], ids)
    _check(places[axis], x.shape[axis])
    return _written(x, tuple(places), updates, reduction)


def _check(ids: Array, n: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < n:
        raise BoundsError(f"indices from {ids.min()} to {ids.max()} for an axis of length {n}")


def _written(x: Array, places: Any, updates: Array, reduction: str) -> Array:
    result = np.array(x)
    if reduction == "none":
        result[places] = updates
        return result
    ufuncs = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
    if result.dtype.kind == "b":
        ufuncs |= {"add": np.logical_or, "mul": np.logical_and}
    ufuncs[reduction].at(result, places, updates)
    return result


@operator("ScatterElements", "Scatter")
def _scatter(call: Call, x: Tensor, ids: Tensor, updates: Tensor) -> Tensor:
    return _scatter_elements(x, ids, updates, shape=x.shape, dtype=x.dtype, axis=axis_of(x, call.get("axis", 0)),
                             reduction=call.get("reduction", "none"))  # fmt: skip


@host_operation("scatter_nd")
def _scatter_nd(x: Array, ids: Array, updates: Array, *, reduction: str) -> Array:
    """x with the parts that the rows of ids name replaced by, or reduced with, updates, one after the other."""
    places: list[Array] = []
    for i in range(ids.shape[-1]):
        part = np.where(ids[..., i] < 0, ids[..., i] + x.shape[i], ids[..., i])
        _check(part, x.shape[i])
        places.append(part)
    return _written(x, tuple(places), updates, reduction)


@operator("ScatterND")
def _scatter_into(call: Call, x: Tensor, ids: Tensor, updates: Tensor) -> Tensor:
    return _scatter_nd(x, ids, updates, shape=x.shape, dtype=x.dtype, reduction=call.get("reduction", "none"))


@host_operation("tensor_scatter")
def _tensor_scatter(past: Array, update: Array, starts: Array, *, axis: int, circular: bool) -> Array:
    """past with update written along an axis, from a start for each element of the batch."""
    result = np.array(past)
    n = past.shape[axis]
    for row in range(past.shape[0]):
        places = int(starts[row]) + np.arange(update.shape[axis])
        places = places % n if circular else places
        _check(places, n)
        np.moveaxis(result[row], axis - 1, 0)[places] = np.moveaxis(update[row], axis - 1, 0)
    return result


@operator("TensorScatter")
def _tensor_scatter_node(call: Call, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    first = ow.constant(np.zeros(past.shape[0], np.int64)) if starts is None else starts
    return _tensor_scatter(past, update, first, shape=past.shape, dtype=past.dtype,
                           axis=axis_of(past, call.get("axis", -2)),
                           circular=call.get("mode", "linear") == "circular")  # fmt: skip


# --- how many there are depends on values ---------------------------------------------------------------------------


@operator("NonZero", raw=True)
def _non_zero(call: Call, x: Any) -> Any:
    return call.found(lambda a: np.array(np.nonzero(a), np.int64).reshape(a.ndim, -1), x)


@operator("Compress", raw=True)
def _compress(call: Call, x: Any, condition: Any) -> Any:
    axis = call.node.attributes.get("axis")

    def compress(values: Array, flags: Array) -> Array:
        n = values.size if axis is None else values.shape[axis]
        return np.compress(flags[:n].astype(bool), values, axis)

    return call.found(compress, x, condition)


@operator("Unique", raw=True)
def _unique(call: Call, x: Any) -> Any:
    axis, in_order = call.node.attributes.get("axis"), bool(call.get("sorted", 1))

    def unique(values: Array) -> list[Array]:
        found, first, inverse, counts = np.unique(
            values, return_index=True, return_inverse=True, return_counts=True, axis=axis
        )
        inverse = inverse.reshape(-1)
        if not in_order:
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(order.size)
            found = np.take(found, order, 0 if axis is None else axis)
            first, inverse, counts = first[order], rank[inverse], counts[order]
        return [found, *[part.astype(np.int64) for part in (first, inverse, counts)]]

    return tuple(call.found(unique, x))
