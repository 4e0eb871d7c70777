"""Shapes, and moving elements."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

__all__ = ["axes_of", "axis_of", "flat_from", "shape_of", "with_axis_at"]


def axis_of(x: Any, axis: int, rank: int | None = None) -> int:
    """An axis, counted from the front. Raises `ShapeError` if there is none."""
    n = len(x.shape) if rank is None else rank
    if not -n <= axis < n:
        raise ShapeError(f"there is no axis {axis} among {n}")
    return axis % n if n else 0


def with_axis_at(x: Tensor, axis: int, place: int) -> Tensor:
    """The tensor with one axis moved to another place; NumPy's ``moveaxis``."""
    order = list(range(x.ndim))
    axis = order.pop(axis_of(x, axis))
    order.insert(axis_of(x, place), axis)
    return ow.transpose(x, tuple(order))


def axes_of(call: Call, x: Any, given: Any, rank: int | None = None) -> tuple[int, ...] | None:
    """The axes that an input or, in older versions, the attribute ``axes`` names; ``None`` if neither is given."""
    values = call.node.attributes.get("axes") if given is None else call.integers(given)
    return None if values is None else tuple([axis_of(x, int(a), rank) for a in values])


def flat_from(x: Tensor, axis: int) -> Tensor:
    """``x`` with the axes before ``axis`` as one, and all others as one."""
    return ow.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an array or a tensor."""
    return tuple(value.shape)


@operator("Shape", raw=True)
def _shape(call: Call, x: Any) -> Array:
    n = len(x.shape)
    start, end = call.get("start", 0), call.get("end", n)
    return np.array(x.shape[start if start >= 0 else max(n + start, 0) : end if end >= 0 else n + end], np.int64)


@operator("Size", raw=True)
def _size(call: Call, x: Any) -> Array:
    return np.array(prod(x.shape), np.int64)


@operator("Identity", raw=True)
def _identity(call: Call, x: Any) -> Any:
    return x


@operator("Reshape")
def _reshape(call: Call, x: Tensor, shape: Tensor | None = None) -> Tensor:
    given = list(call.get("shape", ()) if shape is None else call.integers(shape))
    if not call.get("allowzero", 0):
        given = [x.shape[i] if n == 0 else n for i, n in enumerate(given)]
    if (-1 in given and 0 in given) or (-1 in given and not x.size):
        given[given.index(-1)] = 0
    return ow.reshape(x, given)


@operator("Transpose")
def _transpose(call: Call, x: Tensor) -> Tensor:
    return ow.transpose(x, call.node.attributes.get("perm"))


@operator("Squeeze")
def _squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return ow.squeeze(x, axes_of(call, x, axes))


@operator("Unsqueeze")
def _unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    given = call.get("axes", ()) if axes is None else call.integers(axes)
    return ow.expand_dims(x, tuple([axis_of(x, a, x.ndim + len(given)) for a in given]))


@operator("Flatten")
def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.get("axis", 1)
    return flat_from(x, axis if axis >= 0 else x.ndim + axis)


@operator("Concat")
def _concat(call: Call, *inputs: Tensor) -> Tensor:
    return ow.concat(inputs, axis_of(inputs[0], call.get("axis", 1)))  # a default there is before version 4 only


@operator("Split")
def _split(call: Call, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    if call.before(2) and not call.has("axis"):
        raise call.refuse("version 1 does not say along which axis without the attribute axis")
    axis = axis_of(x, call.get("axis", 0))
    given = call.get("split", ()) if sizes is None else call.integers(sizes)
    if not given:
        count = call.get("num_outputs", len(call.node.outputs))
        each = -(-x.shape[axis] // count)
        given = [max(min(each, x.shape[axis] - i * each), 0) for i in range(count)]
    return ow.split(x, given, axis)


@operator("Slice")
def _slice(
    call: Call, x: Tensor, starts: Tensor | None = None, ends: Tensor | None = None, axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if starts is None:
        first, last = call.get("starts", ()), call.get("ends", ())
    else:
        first, last = call.integers(starts), call.integers(ends)
    at = axes_of(call, x, axes) or tuple(range(len(first)))
    by = (1,) * len(first) if steps is None else call.integers(steps)
    for axis, start, end, step in zip(at, first, last, by, strict=True):
        n = x.shape[axis]
        if step < 0:  # the elements in ascending order, then flipped
            places = range(n)[start if start >= -n else -n - 1 : end if end >= -n else None : step]
            if not len(places):
                x = x[tuple([slice(0, 0) if i == axis else slice(None) for i in range(x.ndim)])]
                continue
            x = x[tuple([slice(places[-1], places[0] + 1, -step) if i == axis else slice(None) for i in range(x.ndim)])]
            x = ow.flip(x, axis)
        else:
            clipped = slice(*slice(start, end, step).indices(n))
            x = x[tuple([clipped if i == axis else slice(None) for i in range(x.ndim)])]
    return x


@operator("Expand")
def _expand(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    return ow.broadcast_to(x, np.broadcast_shapes(x.shape, call.integers(shape)))


@operator("Tile")
def _tile(call: Call, x: Tensor, repeats: Tensor, axis: Tensor | None = None) -> Tensor:
    if axis is not None:  # before version 6: along one axis
        at, (count,) = axis_of(x, int(call.known(axis).reshape(()))), call.integers(repeats)
        return ow.tile(x, [count if i == at else 1 for i in range(x.ndim)])
    return ow.tile(x, call.integers(repeats))


@operator("Pad")
def _pad(
    call: Call, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    given = call.get("paddings" if call.before(2) else "pads", ()) if pads is None else call.integers(pads)
    fill = call.get("value", 0.0) if value is None else call.known(value).reshape(()).item()
    at = axes_of(call, x, axes) if axes is not None else tuple(range(x.ndim))
    assert at is not None
    widths = [[0, 0] for _ in range(x.ndim)]
    for i, axis in enumerate(at):
        widths[axis] = [given[i], given[i + len(at)]]
    for axis, (before, after) in enumerate(widths):  # negative widths cut
        if before < 0 or after < 0:
            cut = slice(max(-before, 0), x.shape[axis] - max(-after, 0))
            x = x[tuple([cut if i == axis else slice(None) for i in range(x.ndim)])]
    places = [(max(a, 0), max(b, 0)) for a, b in widths]
    mode = call.get("mode", "constant")
    if mode == "constant" and all(a == b == 0 for a, b in places):
        return x
    if mode == "constant":
        if x.dtype.name == "bool":
            return _padded(x.astype("u8"), places, float(fill)).astype("bool")
        return _padded(x, places, fill)
    names = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    if mode not in names:
        raise call.refuse(f"there is no mode {mode!r}")
    for axis, (before, after) in enumerate(places):
        if before or after:
            ids = np.pad(np.arange(x.shape[axis]), (before, after), names[mode])  # type: ignore[call-overload]
            x = taken(x, ow.constant(ids), axis)
    return x


def _padded(x: Tensor, places: Any, fill: float) -> Tensor:
    if not x.size:
        return ow.full([n + a + b for n, (a, b) in zip(x.shape, places, strict=True)], fill, x.dtype)
    return ow.pad(x, places, "constant", int(fill) if x.dtype.is_integer else fill)


def taken(x: Tensor, ids: Tensor, axis: int) -> Tensor:
    """The parts of ``x`` along an axis that ``ids``, of any shape and none negative, name; NumPy's ``take``."""
    if axis == 0:
        return ow.embedding(x, ids)
    front = ow.transpose(x, (axis, *[i for i in range(x.ndim) if i != axis]))
    found = ow.embedding(ow.contiguous(front), ids)
    n = ids.ndim
    order = [*range(n, n + axis), *range(n), *range(n + axis, found.ndim)]
    return ow.transpose(found, order)


@operator("DepthToSpace")
def _depth_to_space(call: Call, x: Tensor) -> Tensor:
    b, (n, c, h, w) = call.get("blocksize", 1), x.shape
    if call.get("mode", "DCR") == "DCR":
        y = ow.transpose(ow.reshape(x, (n, b, b, c // (b * b), h, w)), (0, 3, 4, 1, 5, 2))
    else:
        y = ow.transpose(ow.reshape(x, (n, c // (b * b), b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return ow.reshape(y, (n, c // (b * b), h * b, w * b))


@operator("SpaceToDepth")
def _space_to_depth(call: Call, x: Tensor) -> Tensor:
    b, (n, c, h, w) = call.get("blocksize", 1), x.shape
    y = ow.reshape(x, (n, c, h // b, b, w // b, b))
    order = (0, 1, 3, 5, 2, 4) if call.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return ow.reshape(ow.transpose(y, order), (n, c * b * b, h // b, w // b))


@operator("Trilu")
def _trilu(call: Call, x: Tensor, k: Tensor | None = None) -> Tensor:
    offset = 0 if k is None else int(call.known(k).reshape(()))
    if not x.size:
        return x
    function = ow.triu if call.get("upper", 1) else ow.tril
    if x.dtype.name == "bool":
        return function(x.astype("u8"), offset).astype("bool")
    return function(x, offset)


@operator("ReverseSequence")
def _reverse_sequence(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    known = call.integers(lengths)
    ids = np.tile(np.arange(x.shape[time]), (x.shape[batch], 1))
    for row, n in zip(ids, known, strict=True):
        row[:n] = row[:n][::-1]
    shape = [1] * x.ndim
    shape[batch], shape[time] = ids.shape
    placed = (ids if batch < time else ids.T).reshape(shape)
    return ow.take_along_axis(x, ow.constant(np.ascontiguousarray(np.broadcast_to(placed, x.shape))), time)
