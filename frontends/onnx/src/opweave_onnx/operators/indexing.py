"""Reading elements by index."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import BoundsError
from opweave.graph.tensor import Tensor
from opweave_onnx.folding import fold
from opweave_onnx.operators.movement import axis_of, taken
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

__all__ = ["flat_place", "from_front", "last_axis_parts"]


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
    flat = ow.reshape(x, (prod(x.shape[: batch + depth]), *x.shape[batch + depth :]))
    each = np.arange(prod(x.shape[:batch])).reshape((*x.shape[:batch], *[1] * (ids.ndim - 1 - batch)))
    return ow.embedding(flat, flat_place(call, last_axis_parts(call, ids), lengths, first=each * prod(lengths)))


def last_axis_parts(call: Call, ids: Tensor) -> list[Tensor]:
    """The indices along the last axis, one tensor for each; known ones stay known."""
    known = call.trace.session.array(ids)
    if known is None:
        return [ids[..., i] for i in range(ids.shape[-1])]
    return [call.tensor(np.asarray(known[..., i], order="C")) for i in range(ids.shape[-1])]


def flat_place(
    call: Call, parts: Sequence[Tensor], lengths: Sequence[int], stride: int = 1, first: Array | None = None
) -> Tensor:
    """Indices along several axes as one index, i64, along the flattened axes; computed at once where all are known.

    Args:
        parts: indices along each axis, of one shape; negative ones count from the end.
        lengths: of the axes.
        stride: the distance of neighbours along the flattened axes; the result is multiplied by it.
        first: added to the result.

    Raises:
        BoundsError: known indices that are outside.
    """
    place: Any = None
    for part, n in zip(parts, lengths, strict=True):
        here = from_front(call, part, n).astype("i64")
        place = here if place is None else place * n + here
    place = place if stride == 1 else place * stride
    if first is not None:
        place = place + call.tensor(np.asarray(first, np.int64))
    session = call.trace.session
    return place if any(session.array(p) is None for p in parts) else call.tensor(fold(place, session.array))


# --- results whose shapes depend on values --------------------------------------------------------------------------


@operator("NonZero", raw=True)
def _non_zero(call: Call, x: Any) -> Any:
    def non_zero(a: Array) -> Array:
        if not a.ndim:  # as the standard says it, no axes by the number of elements
            return np.zeros((0, int(a != 0)), np.int64)
        return np.array(np.nonzero(a), np.int64).reshape(a.ndim, -1)

    return call.found(non_zero, x)


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
