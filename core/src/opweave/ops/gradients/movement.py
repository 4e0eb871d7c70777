"""Gradients of views, of reordering and padding, and of reading, replacing and writing by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from opweave import ops
from opweave.errors import HazardError
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.gradients.rules import gradient_of, zeros

Array = np.ndarray[Any, Any]

# --- views ----------------------------------------------------------------------------------------------------------

gradient_of("reshape")(lambda grad, out, x, *, shape: ops.reshape(grad, x.shape))
gradient_of("transpose")(lambda grad, out, x, *, axes: ops.transpose(grad, tuple(int(a) for a in np.argsort(axes))))


@gradient_of("broadcast_to")
def _broadcast_to(grad: Tensor, out: Tensor, x: Tensor, *, shape: Shape) -> Tensor:
    lead = len(shape) - x.ndim
    repeated = [a + lead for a, n in enumerate(x.shape) if n != shape[a + lead]]
    return ops.reshape(ops.sum(grad, (*range(lead), *repeated)), x.shape)


@gradient_of("slice")
def _slice(grad: Tensor, out: Tensor, x: Tensor, *, key: Any) -> Tensor:
    parts = [part for part in key if part is not None]
    grad = ops.reshape(grad, tuple([_count(part) for part in parts]))
    for axis, part in enumerate(parts):
        if isinstance(part, tuple) and part[2] > 1:
            grad = spread(grad, axis, part[2])
    before = [part[0] if isinstance(part, tuple) else part for part in parts]
    return ops.pad(grad, [(b, n - b - m) for b, n, m in zip(before, x.shape, grad.shape, strict=True)])


def _count(part: Any) -> int:
    return -(-(part[1] - part[0]) // part[2]) if isinstance(part, tuple) else 1


def spread(x: Tensor, axis: int, step: int) -> Tensor:
    """``x`` with ``step`` − 1 zeros between neighbours along an axis."""
    n = x.shape[axis]
    if step == 1 or not n:
        return x
    apart = ops.pad(ops.expand_dims(x, axis + 1), [(0, (step - 1) * (a == axis + 1)) for a in range(x.ndim + 1)])
    return _part(ops.reshape(apart, (*x.shape[:axis], n * step, *x.shape[axis + 1 :])), axis, 0, (n - 1) * step + 1)


def _part(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return x[(*[slice(None)] * axis, slice(start, stop))]


@gradient_of("diagonal")
def _diagonal(grad: Tensor, out: Tensor, x: Tensor, *, offset: int) -> Tensor:
    square = ops.diag_embed(grad, offset)
    rows, columns = x.shape[-2:]
    part = square[..., :rows, :columns]
    missing = [(0, 0)] * (x.ndim - 2) + [(0, rows - part.shape[-2]), (0, columns - part.shape[-1])]
    return ops.pad(part, missing)


gradient_of("after", "recompute")(lambda grad, out, x, *others: (grad, *[None] * len(others)))
gradient_of("copy", "contiguous")(lambda grad, out, x: grad)
gradient_of("concat")(lambda grad, out, *pieces, axis: ops.split(grad, [piece.shape[axis] for piece in pieces], axis))


# --- order and frames -----------------------------------------------------------------------------------------------

gradient_of("flip")(lambda grad, out, x, *, axes: ops.flip(grad, axes))
gradient_of("roll")(lambda grad, out, x, *, shifts: ops.roll(grad, [-by for by in shifts], list(range(x.ndim))))
gradient_of("tril")(lambda grad, out, x, *, k: ops.tril(grad, k))
gradient_of("triu")(lambda grad, out, x, *, k: ops.triu(grad, k))
gradient_of("diag_embed")(lambda grad, out, x, *, offset: ops.diagonal(grad, offset, -2, -1))


@gradient_of("pad")
def _pad(grad: Tensor, out: Tensor, x: Tensor, *, widths: Sequence[tuple[int, int]], mode: str, value: float) -> Tensor:
    for axis, ((before, after), n) in enumerate(zip(widths, x.shape, strict=True)):
        inner = _part(grad, axis, before, before + n)
        if mode != "constant":
            if before:
                inner = inner + _folded(_part(grad, axis, 0, before), axis, mode, n, True)
            if after:
                inner = inner + _folded(_part(grad, axis, before + n, before + n + after), axis, mode, n, False)
        grad = inner
    return grad


def _folded(frame: Tensor, axis: int, mode: str, n: int, first: bool) -> Tensor:
    """The gradients of one side of a frame, added up at the elements of which that side consists of copies."""
    if mode == "edge":
        frame = ops.sum(frame, axis, keepdims=True)
    elif mode == "reflect":
        frame = ops.flip(frame, axis)
    m = frame.shape[axis]
    at_start = first if mode != "wrap" else not first
    start = (1 if mode == "reflect" else 0) if at_start else n - m - (1 if mode == "reflect" else 0)
    return ops.pad(frame, [(start, n - m - start) if a == axis else (0, 0) for a in range(frame.ndim)])


# --- reading by index -----------------------------------------------------------------------------------------------

gradient_of("embedding")(
    lambda grad, out, table, ids, **blocks: (None if blocks else ops.index_add(ids, grad, table.shape[0]), None)
)


@gradient_of("take_along_axis")
def _take_along_axis(grad: Tensor, out: Tensor, x: Tensor, ids: Tensor, *, axis: int) -> tuple[Tensor, None]:
    if ids.shape[axis] == 1:
        # Each row gets at most one value, so nothing is added up: element by element, the value or 0.
        places = ops.reshape(ops.arange(x.shape[axis], dtype=ids.dtype), (-1, *[1] * (x.ndim - 1 - axis)))
        return ops.where(ops.equal(ids, places), grad, 0.0), None
    moved, places = ops.swapaxes(grad, axis, -1), ops.swapaxes(ids, axis, -1)
    shape = (*moved.shape[:-1], x.shape[axis])
    return ops.swapaxes(added_in_rows(moved, places, shape), axis, -1), None


def added_in_rows(values: Tensor, ids: Tensor, shape: Shape) -> Tensor:
    """Zeros of ``shape``, to which each value is added in its own row, at the column of its id."""
    rows, columns = prod(shape[:-1]), shape[-1]
    start = ops.reshape(
        ops.arange(0, rows * columns, columns, "i64") if columns else zeros((rows,), ids.dtype), (rows, 1)
    )
    places = ops.add(ops.reshape(ids, (rows, ids.shape[-1])), start)
    return ops.reshape(ops.index_add(ops.flatten(places), ops.flatten(values), rows * columns), shape)


gradient_of("index_add")(lambda grad, out, ids, rows, *, n: (None, ops.embedding(grad, ids)))


# --- regions --------------------------------------------------------------------------------------------------------


def _region(grad: Tensor, value: Tensor, offsets: Shape) -> Tensor:
    return grad[tuple([slice(at, at + n) for at, n in zip(offsets, value.shape, strict=True)])]


gradient_of("set_region")(
    lambda grad, out, x, value, *, offsets: (
        ops.set_region(grad, zeros(value.shape, grad.dtype), offsets),
        _region(grad, value, offsets),
    )
)


@gradient_of("set_rows")
def _set_rows(grad: Tensor, out: Tensor, x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, None, Tensor]:
    each = _distinct(ids, "set_rows")
    return ops.set_rows(grad, each, zeros(rows.shape, grad.dtype)), None, ops.embedding(grad, each)


gradient_of("add_region")(lambda grad, out, x, value, *, offsets: (grad, _region(grad, value, offsets)))


# --- states ---------------------------------------------------------------------------------------------------------

_SEEN: Final[dict[str, Callable[..., Tensor]]] = {
    "reshape": lambda x, shape: ops.reshape(x, shape),
    "transpose": lambda x, axes: ops.transpose(x, axes),
    "broadcast_to": lambda x, shape: ops.broadcast_to(x, shape),
    "slice": lambda x, key: x[tuple([slice(*k) if isinstance(k, tuple) else k for k in key])],
    "diagonal": lambda x, offset: ops.diagonal(x, offset, -2, -1),
    "after": lambda x: x,
    "recompute": lambda x: x,
}
"""For each view of which a region of a state may consist: the same view of another tensor."""


def _seen(region: Tensor, grad: Tensor) -> Tensor:
    """The part of ``grad``, which has the shape of the whole state, that belongs to a region of it."""
    if region is region.root:
        return grad
    assert region.op is not None
    return _SEEN[region.op.name](_seen(region.srcs[0], grad), **region.attrs)


def _in_state(region: Tensor, values: Tensor) -> Tensor:
    """Zeros of the shape of the state, with ``values`` in the region."""
    while region is not region.root:
        op = region.op
        assert op is not None
        assert op.gradient is not None
        made = op.gradient(values, region, *region.srcs, **region.attrs)
        values = made if isinstance(made, Tensor) else made[0]  # type: ignore[index, assignment]
        region = region.srcs[0]
    return values


@gradient_of("assign")
def _assign(grad: Tensor, out: Tensor, region: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor]:
    written = _seen(region, grad)
    if region.size == region.root.size:
        return None, written
    return ops.where(_in_state(region, ops.full(region.shape, 1, grad.dtype)), 0.0, grad), written


gradient_of("accumulate")(lambda grad, out, region, value: (grad, _seen(region, grad)))


@gradient_of("index_copy")
def _index_copy(grad: Tensor, out: Tensor, region: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, None, Tensor]:
    each = _distinct(ids, "index_copy")
    marks = ops.index_add(each, ops.full(ids.shape, 1, grad.dtype), region.shape[0])
    marks = ops.broadcast_to(ops.reshape(marks, (-1, *[1] * (region.ndim - 1))), region.shape)
    return ops.where(_in_state(region, marks), 0.0, grad), None, ops.embedding(_seen(region, grad), each)


def _distinct(ids: Tensor, op: str) -> Tensor:
    """``ids``, checked for repeated ones: it is unspecified which row of a repeated id is kept, and so which one has a
    gradient. Ids that are no constants are checked in each run, by a node on the host.

    Raises:
        HazardError: constant ids that repeat. For other ids it is the cause of the `ExecutionError` of a run.
    """
    if ids.leaf is not None and ids.leaf.data is not None:
        _checked(ids.leaf.data, op)
        return ids
    return ops.custom(_CHECKED[op], ids, like=ids)


def _checked(ids: Array, op: str) -> Array:
    values, counts = np.unique(ids, return_counts=True)
    if counts.size and counts.max() > 1:
        raise HazardError(
            f"{op}: index {values[counts.argmax()]} repeats, so it is open which of its rows is kept and gets a "
            "gradient; pass distinct ids"
        )
    return ids


_CHECKED: Final = {op: partial(_checked, op=op) for op in ("index_copy", "set_rows")}
