"""Reading and adding up by index, replacing a region of a tensor, and writing into states."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import BoundsError, DTypeError, LayoutError, ShapeError
from opweave.graph.dtypes import DType, f32
from opweave.graph.layout import Shape, broadcast_shapes
from opweave.graph.opdef import OpDef, build
from opweave.graph.tensor import Tensor, node
from opweave.ops.movement import after, broadcast_to, flatten
from opweave.ops.operands import Array, as_axis, as_ids, as_integer, builds, cast, make, misfit, no_bools, plain, wide
from opweave.ops.operands import rows as in_rows
from opweave.ops.samples import ROWS, measured, operand

__all__ = [
    "accumulate", "add_region", "assign", "embedding", "index_add", "index_copy", "set_region", "take_along_axis",
]  # fmt: skip


def check_ids(op: str, ids: Array, n: int) -> None:
    """Raises `BoundsError` naming the first index outside of ``0 .. n - 1``."""
    wrong = np.flatnonzero((ids < 0) | (ids >= n))
    if wrong.size:
        at = int(wrong[0])
        raise BoundsError(f"{op}: index {int(ids.reshape(-1)[at])} (number {at}) is outside of 0 .. {n - 1}")


# --- reading --------------------------------------------------------------------------------------------------------


def _embedding_infer(table: Tensor, ids: Tensor, *, blocks: DType | None = None) -> tuple[Shape, DType]:
    if not table.ndim:
        raise ShapeError(f"embedding: a number has no rows; the table is {table.describe()}")
    return (*ids.shape, *table.shape[1:]), table.dtype if blocks is None else f32


def _embedding(table: Array, ids: Array, *, blocks: DType | None = None) -> Array:
    check_ids("embedding", ids, table.shape[0])
    picked: Array = table[ids]
    if blocks is None:
        return picked
    from opweave.ops.blocks import dequantize  # most programs have no quantized table

    return dequantize(picked, blocks)


EMBEDDING = OpDef(
    "embedding",
    infer=_embedding_infer,
    reference=_embedding,
    indices=(1,),
    selects=(0, 1),
    formula="y[i, ...] = table[ids[i], ...]",
    exact=True,
    samples=measured(lambda: [build("embedding", operand(r, c), operand(r // 2, dtype="i32")) for r, c in ROWS]),
)


@builds(EMBEDDING)
def embedding(table: Any, ids: Any) -> Tensor:
    """The rows of ``table`` that ``ids`` name.

    Args:
        table: shape (n, ...), any dtype; rows of a quantized one come out as f32, and its type is the node's attribute
            ``blocks``.
        ids: i32 or i64, any shape, each 0 .. n - 1; the reference raises `BoundsError` for others.

    Returns:
        Shape ids.shape + table.shape[1:].

    Raises:
        ShapeError: the table has no axis.
        DTypeError: ids of another dtype.
        LayoutError: the transpose of a quantized matrix, or quantized blocks along the only axis.
    """
    t, i = make("embedding", table), as_ids("embedding", "ids", ids)
    in_rows("embedding", t)
    if t.dtype.is_quantized and t.ndim < 2:
        raise LayoutError(f"embedding: rows would cut the blocks of the table {t.describe()}")
    return node(EMBEDDING, (t, i), {"blocks": t.dtype} if t.dtype.is_quantized else {})


def _take_infer(x: Tensor, ids: Tensor, *, axis: int) -> tuple[Shape, DType]:
    if x.ndim != ids.ndim or x.shape[:axis] + x.shape[axis + 1 :] != ids.shape[:axis] + ids.shape[axis + 1 :]:
        raise ShapeError(
            f"take_along_axis: the ids must agree with the operand in all axes but axis {axis}: {x.describe()} and "
            f"{ids.describe()}"
        )
    return ids.shape, x.dtype


def _take_along_axis(x: Array, ids: Array, *, axis: int) -> Array:
    check_ids("take_along_axis", ids, x.shape[axis])
    return np.take_along_axis(x, ids, axis)


TAKE_ALONG_AXIS = OpDef(
    "take_along_axis",
    infer=_take_infer,
    reference=_take_along_axis,
    indices=(1,),
    formula="y[..., i, ...] = x[..., ids[..., i, ...], ...] along axis",
    exact=True,
    runs_like="embedding",
)


@builds(TAKE_ALONG_AXIS)
def take_along_axis(x: Any, ids: Any, axis: int | None = -1) -> Tensor:
    """Elements that ``ids`` name along an axis, as NumPy's ``take_along_axis`` and torch's ``gather``.

    Args:
        x: any plain dtype.
        ids: i32 or i64, as many axes as ``x``, each 0 .. n - 1 (else `BoundsError` when the reference reads them); the
            other axes broadcast against those of ``x``.
        axis: the axis; ``None``: both are flattened first.

    Returns:
        The shape of ``ids``, broadcast.

    Raises:
        ShapeError: shapes that do not fit.
        BoundsError: no such axis.
        DTypeError: ids of another dtype, a quantized operand.
    """
    y, i = make("take_along_axis", x), as_ids("take_along_axis", "ids", ids)
    plain("take_along_axis", y)
    if axis is None:
        y, i, axis = flatten(y), flatten(i), 0
    at = as_axis("take_along_axis", axis, y)
    if i.ndim == y.ndim:
        try:
            lead = broadcast_shapes(y.shape[:at], i.shape[:at])
            rest = broadcast_shapes(y.shape[at + 1 :], i.shape[at + 1 :])
        except ShapeError as error:
            raise ShapeError(f"take_along_axis: {error}; of {y.describe()} and {i.describe()}") from None
        y = broadcast_to(y, (*lead, y.shape[at], *rest))
        i = broadcast_to(i, (*lead, i.shape[at], *rest))
    return node(TAKE_ALONG_AXIS, (y, i), {"axis": at})


# --- adding up ------------------------------------------------------------------------------------------------------


def _index_add_infer(ids: Tensor, rows: Tensor, *, n: int) -> tuple[Shape, DType]:
    if rows.shape[: ids.ndim] != ids.shape:
        raise ShapeError(f"index_add: there must be one row for each id: {ids.describe()} and rows {rows.describe()}")
    return (n, *rows.shape[ids.ndim :]), rows.dtype


def _index_add(ids: Array, rows: Array, *, n: int) -> Array:
    check_ids("index_add", ids, n)
    values = wide(rows)
    out = np.zeros((n, *rows.shape[ids.ndim :]), values.dtype)
    np.add.at(out, ids, values)
    return out


INDEX_ADD = OpDef(
    "index_add",
    infer=_index_add_infer,
    reference=_index_add,
    indices=(0,),
    flops=lambda out: out.srcs[1].size,
    formula="y[r, ...] = sum of rows[i, ...] over all i with ids[i] = r",
    slack=2.0,
    runs_like="embedding",
)


@builds(INDEX_ADD)
def index_add(ids: Any, rows: Any, n: int) -> Tensor:
    """Rows added up by id into a new tensor; the counterpart of `embedding`.

    Half types add up in f32; integers wrap around.

    Args:
        ids: i32 or i64, any shape, each 0 .. n - 1 (else `BoundsError` when the reference reads them).
        rows: shape ids.shape + (...), any plain dtype but bool.
        n: the number of rows of the result; those that no id names are 0.

    Returns:
        Shape (n, ...).

    Raises:
        ShapeError: rows that do not fit the ids; ``n`` is no non-negative integer.
        DTypeError: ids of another dtype, bool or quantized rows.
    """
    i, values = as_ids("index_add", "ids", ids), make("index_add", rows)
    plain("index_add", values)
    no_bools("index_add", values)
    count = as_integer("index_add", "the number of rows", n)
    if count < 0:
        raise ShapeError(f"index_add: {count} rows are less than none; the rows are {values.describe()}")
    return node(INDEX_ADD, (i, values), {"n": count})


# --- regions of a tensor --------------------------------------------------------------------------------------------


def _window(value: Tensor | Array, offsets: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple([slice(at, at + n) for at, n in zip(offsets, value.shape, strict=True)])


def _region_infer(x: Tensor, value: Tensor, *, offsets: tuple[int, ...]) -> tuple[Shape, DType]:
    if value.ndim != x.ndim or len(offsets) != x.ndim or value.dtype is not x.dtype:
        raise ShapeError(f"a region has the axes and the dtype of its tensor: {x.describe()} and {value.describe()}")
    for axis, (n, at, length) in enumerate(zip(x.shape, offsets, value.shape, strict=True)):
        if at < 0 or at + length > n:
            raise BoundsError(
                f"the region {at} .. {at + length - 1} reaches out of axis {axis} of length {n}: {x.describe()} and "
                f"{value.describe()}"
            )
    return x.shape, x.dtype


def _set_region(x: Array, value: Array, *, offsets: tuple[int, ...]) -> Array:
    out = np.array(x)
    out[_window(value, offsets)] = value
    return out


def _add_region(x: Array, value: Array, *, offsets: tuple[int, ...]) -> Array:
    out = np.array(wide(x))
    out[_window(value, offsets)] += wide(value)
    return out


SET_REGION = OpDef(
    "set_region",
    infer=_region_infer,
    reference=_set_region,
    inplace=(0,),
    formula="y = x, but y[offsets : offsets + value.shape] = value",
    exact=True,
    runs_like="copy",
)

ADD_REGION = OpDef(
    "add_region",
    infer=_region_infer,
    reference=_add_region,
    inplace=(0,),
    flops=lambda out: out.srcs[1].size,
    formula="y = x, but y[offsets : offsets + value.shape] = x[...] + value",
)


def _with_region(op: OpDef, x: Any, value: Any, offsets: Any) -> Tensor:
    y = make(op.name, x)
    v = make(op.name, value, y)
    plain(op.name, y, v)
    given = offsets if isinstance(offsets, (tuple, list)) else (offsets,)
    at = tuple([as_integer(op.name, "an offset", o) for o in given])
    if v.ndim > y.ndim or len(at) != y.ndim:
        raise ShapeError(
            f"{op.name}: needs an offset for each axis, and a value of no more axes: {len(at)} offsets, {y.describe()} "
            f"and {v.describe()}"
        )
    try:
        return node(op, (y, cast(v.reshape((1,) * (y.ndim - v.ndim) + v.shape), y.dtype)), {"offsets": at})
    except (BoundsError, ShapeError) as error:
        raise type(error)(f"{op.name}: {error}") from None


@builds(SET_REGION)
def set_region(x: Any, value: Any, offsets: Any) -> Tensor:
    """``x`` with a region replaced by ``value``; ``x`` itself stays as it is. For states there is `assign`.

    Args:
        x: any plain dtype.
        value: what the region becomes, of its shape; axes of length 1 are added in front. Takes the dtype of ``x``.
        offsets: where the region begins, a number for each axis of ``x``.

    Raises:
        ShapeError: a value of more axes, or not one integer for each axis.
        BoundsError: a region that reaches out of ``x``.
        DTypeError: quantized operands.
    """
    return _with_region(SET_REGION, x, value, offsets)


@builds(ADD_REGION)
def add_region(x: Any, value: Any, offsets: Any) -> Tensor:
    """``x`` with ``value`` added to a region; ``x`` itself stays as it is. For states there is `accumulate`.

    Arguments as `set_region`; integers wrap around.

    Raises:
        ShapeError: a value of more axes, or not one integer for each axis.
        BoundsError: a region that reaches out of ``x``.
        DTypeError: a quantized operand, or an ``x`` of bool.
    """
    no_bools("add_region", make("add_region", x))
    return _with_region(ADD_REGION, x, value, offsets)


# --- writing --------------------------------------------------------------------------------------------------------


def _target(op: str, region: Any) -> Tensor:
    """The region to write, checked. Elements that share bytes cannot get different values."""
    if not isinstance(region, Tensor):
        raise DTypeError(f"{op}: writes into a state (ow.state) or a view of one, not {type(region).__name__}")
    in_rows(op, region)
    if region.size and any(stride == 0 and n > 1 for n, stride in zip(region.shape, region.strides, strict=True)):
        raise LayoutError(f"{op}: elements of the region share bytes (it is broadcast); write {region.root!r} itself")
    return region


def _written(op: OpDef, region: Tensor, *values: Tensor) -> Tensor:
    """The state's next version. Where ``values`` have no elements, nothing is written: the present version, which then
    depends on ``values``."""
    made = node(op, (region, *values), {})
    return made if values[-1].size else after(region.root, (region, *values))


def _version(region: Tensor, *srcs: Tensor) -> tuple[Shape, DType]:
    """A writing op returns the next version of the whole state that its region lies in."""
    return region.root.shape, region.dtype


def check_rows(op: str, x: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Raises `ShapeError` unless ``rows`` can replace the rows of ``x`` that ``ids`` name."""
    if not x.ndim or ids.ndim != 1 or rows.shape != (*ids.shape, *x.shape[1:]) or rows.dtype is not x.dtype:
        raise misfit(op, "a tensor (n, ...), ids (m,) and rows (m, ...) of the tensor's dtype", x, ids, rows)


def _index_copy_infer(state: Tensor, ids: Tensor, rows: Tensor) -> tuple[Shape, DType]:
    check_rows("index_copy", state, ids, rows)
    return _version(state)


def _index_copy(state: Array, ids: Array, rows: Array) -> Array:
    check_ids("index_copy", ids, state.shape[0])
    state[ids] = rows
    return state


INDEX_COPY = OpDef(
    "index_copy",
    infer=_index_copy_infer,
    reference=_index_copy,
    writes=True,
    indices=(1,),
    formula="state[ids[i], ...] = rows[i, ...]",
    exact=True,
    runs_like="copy",
)


@builds(INDEX_COPY)
def index_copy(state: Any, ids: Any, rows: Any) -> Tensor:
    """Write rows of a state, e.g. of a key-value cache, and return the state's next version.

    Args:
        state: a state or a view of one, shape (n, ...).
        ids: i32 or i64, shape (m,), each 0 .. n - 1 (else `BoundsError` when the reference reads them). Where an index
            repeats, any one of its rows stays.
        rows: broadcasts to (m, ...) and takes the state's dtype: of a quantized state they are quantized, unless they
            are blocks of its type, which are copied.

    Returns:
        The whole state (also if a view of it was written) as it is afterwards; without rows nothing is written.

    Raises:
        HazardError: ``state`` is a tensor, but no state.
        ShapeError: shapes that do not fit.
        DTypeError: ``state`` is no tensor; ids of another dtype, quantized rows for a state of another type.
        LayoutError: a broadcast view of a state; rows that would cut the blocks of a state with one axis.
    """
    region, i, values = _target("index_copy", state), as_ids("index_copy", "ids", ids), make("index_copy", rows)
    if region.dtype.is_quantized and region.ndim < 2:
        raise LayoutError(f"index_copy: rows would cut the blocks of {region.describe()}; add an axis of rows")
    if region.ndim and i.ndim == 1:
        shape = (*i.shape, *region.shape[1:])
        values = spread("index_copy", _writable("index_copy", values, region), shape, region)
    return _written(INDEX_COPY, region, i, cast(values, region.dtype))


def _writable(op: str, value: Tensor, region: Tensor) -> Tensor:
    """``value``, checked: quantized values are only written to regions of the same type."""
    if value.dtype is not region.dtype or not region.dtype.is_quantized:
        plain(op, value)
    in_rows(op, value)
    return value


def _assign_infer(region: Tensor, value: Tensor) -> tuple[Shape, DType]:
    if value.shape != region.shape or value.dtype is not region.dtype:
        raise ShapeError(f"shapes and dtypes must agree: {region.describe()} and {value.describe()}")
    return _version(region)


def _assign(region: Array, value: Array) -> Array:
    region[...] = value
    return region


ASSIGN = OpDef(
    "assign",
    infer=_assign_infer,
    reference=_assign,
    writes=True,
    formula="region = value",
    exact=True,
    runs_like="copy",
)


@builds(ASSIGN)
def assign(region: Any, value: Any) -> Tensor:
    """Write a state, or a view of one, and return the state's next version, whole.

    Args:
        region: a state or a view of one.
        value: broadcasts to the region's shape and takes its dtype: for a quantized state it is quantized, unless it
            is of blocks of its type, which are copied.

    Raises:
        HazardError: ``region`` is a tensor, but no state.
        ShapeError: ``value`` does not broadcast to it.
        DTypeError: ``region`` is no tensor; a quantized value for a state of another type.
        LayoutError: a broadcast view of a state.
    """
    return _write(ASSIGN, _target("assign", region), value)


def _accumulate(region: Array, value: Array) -> Array:
    with np.errstate(all="ignore"):
        np.copyto(region, wide(region) + wide(value), casting="unsafe")
    return region


ACCUMULATE = OpDef(
    "accumulate",
    infer=_assign_infer,
    reference=_accumulate,
    writes=True,
    flops=lambda out: out.srcs[1].size,
    formula="region += value",
)


@builds(ACCUMULATE)
def accumulate(region: Any, value: Any) -> Tensor:
    """Add to a state, or to a view of one, and return the state's next version, whole. Integers wrap around.

    Args:
        region: a state or a view of one.
        value: broadcasts to the region's shape and takes its dtype; must not read the region (take ``ow.copy`` of it).

    Raises:
        HazardError: ``region`` is a tensor, but no state.
        ShapeError: ``value`` does not broadcast to it.
        DTypeError: ``region`` is no tensor, or bool; a quantized operand.
        LayoutError: a broadcast view of a state.
    """
    target = _target("accumulate", region)
    plain("accumulate", target)
    no_bools("accumulate", target)
    return _write(ACCUMULATE, target, value)


def _write(op: OpDef, target: Tensor, value: Any) -> Tensor:
    v = _writable(op.name, make(op.name, value, target), target)
    return _written(op, target, cast(spread(op.name, v, target.shape, target), target.dtype))


def spread(op: str, value: Tensor, shape: Shape, region: Tensor) -> Tensor:
    """A value broadcast to the ``shape`` of a part of ``region``; raises `ShapeError` that names both."""
    try:
        return broadcast_to(value, shape)
    except ShapeError:
        raise ShapeError(f"{op}: {value.describe()} does not broadcast to {shape} of {region.describe()}") from None
