"""Views, which no device computes, and the operations that pack and join elements.

All views of elements are built from five operations: ``reshape`` (also expand_dims, squeeze, flatten), ``transpose``
(also swapaxes), ``slice`` (also split), ``broadcast_to`` and ``diagonal``. Where a view would be the window of its
source, the source is returned.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import index as as_index
from typing import Any

import numpy as np

from opweave.errors import LayoutError, OpweaveError, ShapeError
from opweave.graph.dtypes import PLAIN, DType, u8
from opweave.graph.layout import (
    Key,
    Shape,
    Strides,
    broadcast_strides,
    check_shape,
    dense_strides,
    normalize_axis,
    normalize_key,
    reshape_strides,
    resolve_reshape,
    slice_window,
)
from opweave.graph.opdef import Example, OpDef, build, define_op, flops_per_element
from opweave.graph.tensor import Tensor, node, shows_columns_of_blocks, view_node
from opweave.ops.operands import Array, as_axis, as_integer, builds, explain, make, plain, promoted, rows, unquantized
from opweave.ops.samples import ROWS, measured, operand, over_rows

__all__ = [
    "broadcast_to", "concat", "contiguous", "copy", "diagonal", "expand_dims", "flatten", "reshape", "split",
    "squeeze", "swapaxes", "transpose",
]  # fmt: skip

Window = tuple[Shape, Strides, int]


def _define_view(name: str, shape: Callable[..., Shape], reference: Callable[..., Array], formula: str) -> OpDef:
    return OpDef(
        name,
        infer=lambda x, **attrs: (shape(x.shape, **attrs), x.dtype),
        reference=reference,
        is_view=True,
        formula=formula,
    )


def _view(op: OpDef, x: Tensor, attrs: dict[str, Any], shape: Shape, strides: Strides, offset: int) -> Tensor:
    if shape == x.shape and strides == x.strides and offset == x.offset:
        return x
    return view_node(op, x, attrs, shape, strides, offset)


# --- reshape --------------------------------------------------------------------------------------------------------

RESHAPE = _define_view(
    "reshape",
    lambda have, *, shape: tuple(shape),
    lambda x, *, shape: x.reshape(shape),
    "the same elements, row-major, in another shape",
)


@builds(RESHAPE)
def reshape(x: Any, shape: Any) -> Tensor:
    """The elements of ``x``, taken row-major, in another shape; one length may be -1.

    It is a view: of ``x``, or where strides cannot express that of a packed copy (`contiguous`).

    Raises:
        ShapeError: the elements do not fit.
        LayoutError: it would cut quantized blocks.
    """
    source: Tensor = make("reshape", x)
    rows("reshape", source)
    try:
        target = check_shape(resolve_reshape(source.shape, shape), source.dtype)
    except OpweaveError as error:
        raise explain(error, "reshape", source) from None
    except TypeError:
        raise ShapeError(f"reshape: a shape is a tuple of integers, not {shape!r}; of {source.describe()}") from None
    if target == source.shape:
        return source
    strides = reshape_strides(source.shape, source.strides, target, source.dtype)
    if strides is None:
        source = contiguous(source)
        strides = dense_strides(target, source.dtype)
    return _view(RESHAPE, source, {"shape": target}, target, strides, source.offset)


def expand_dims(x: Any, axis: int | Sequence[int]) -> Tensor:
    """``x`` with axes of length 1 inserted, so that they are at ``axis`` in the result; a view.

    Raises:
        BoundsError: an axis outside of the result's.
        ShapeError: an axis named twice, or more than 8 axes.
        LayoutError: it would cut quantized blocks.
    """
    x = make("expand_dims", x)
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    ndim = x.ndim + len(axes)
    try:
        at = {normalize_axis(a, ndim) for a in axes}
    except OpweaveError as error:
        raise explain(error, "expand_dims", x) from None
    except TypeError:
        raise ShapeError(f"expand_dims: an axis is an integer, not {axis!r}; the operand is {x.describe()}") from None
    if len(at) < len(axes):
        raise ShapeError(f"expand_dims: axes {axes} name an axis twice; the operand is {x.describe()}")
    old = iter(x.shape)
    return reshape(x, tuple([1 if i in at else next(old) for i in range(ndim)]))


def squeeze(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """``x`` without the given axes of length 1, without all such axes by default; a view.

    Raises:
        BoundsError: an axis outside of those of ``x``.
        ShapeError: an axis whose length is not 1.
    """
    x = make("squeeze", x)
    if axis is None:
        at = {i for i, n in enumerate(x.shape) if n == 1}
    else:
        at = {as_axis("squeeze", a, x) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))}
    for i in at:
        if x.shape[i] != 1:
            raise ShapeError(f"squeeze: axis {i} has length {x.shape[i]}, not 1; the operand is {x.describe()}")
    return reshape(x, tuple([n for i, n in enumerate(x.shape) if i not in at]))


def flatten(x: Any, start: int = 0, end: int = -1) -> Tensor:
    """``x`` with the axes ``start`` to ``end`` (inclusive, as in torch) merged into one; a number becomes shape (1,).

    Raises:
        BoundsError: an axis outside of those of ``x``.
        ShapeError: ``end`` lies before ``start``.
    """
    x = make("flatten", x)
    if not x.shape:
        return reshape(x, (1,))
    first, last = as_axis("flatten", start, x), as_axis("flatten", end, x)
    if last < first:
        raise ShapeError(f"flatten: axis {end} lies before axis {start}; the operand is {x.describe()}")
    return reshape(x, (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


# --- transpose ------------------------------------------------------------------------------------------------------

TRANSPOSE = _define_view(
    "transpose",
    lambda shape, *, axes: tuple([shape[a] for a in axes]),
    lambda x, *, axes: x.transpose(axes),
    "y[i[axes]] = x[i]",
)


@builds(TRANSPOSE)
def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """``x`` with its axes in the given order, reversed by default; a view.

    The transpose of a quantized matrix only serves as the right operand of `matmul`.

    Raises:
        ShapeError: ``axes`` is no order of all axes of ``x``.
        BoundsError: an axis outside of those of ``x``.
        LayoutError: the last axis of a quantized tensor would move.
    """
    y: Tensor = make("transpose", x)
    if axes is None:
        order = tuple(range(y.ndim))[::-1]
    else:
        order = tuple([as_axis("transpose", a, y) for a in axes]) if isinstance(axes, (tuple, list)) else ()
        if len(order) != y.ndim or len(set(order)) != y.ndim:
            raise ShapeError(f"transpose: axes {axes} must name each axis once; the operand is {y.describe()}")
    if y.op is TRANSPOSE:
        # Two in a row are one; and the transpose of a transposed quantized matrix is the matrix.
        inner = y.attrs["axes"]
        order = tuple([inner[a] for a in order])
        y = y.srcs[0]
    if order == tuple(range(y.ndim)):
        return y
    shape, strides = tuple([y.shape[a] for a in order]), tuple([y.strides[a] for a in order])
    if y.dtype.block > 1 and order[-1] != y.ndim - 1:
        if y.ndim != 2:
            raise LayoutError(
                f"transpose: the blocks of {y.dtype} run along the last axis, which must stay last; "
                f"the operand is {y.describe()}"
            )
        return view_node(TRANSPOSE, y, {"axes": order}, shape, strides, y.offset)
    return _view(TRANSPOSE, y, {"axes": order}, shape, strides, y.offset)


def swapaxes(x: Any, a: int, b: int) -> Tensor:
    """``x`` with two axes exchanged; a view. Raises `BoundsError` for an axis outside of its own, `LayoutError` where
    the last axis of a quantized tensor would move (a matrix may be transposed)."""
    x = make("swapaxes", x)
    i, j = as_axis("swapaxes", a, x), as_axis("swapaxes", b, x)
    order = list(range(x.ndim))
    order[i], order[j] = j, i
    return transpose(x, order)


# --- slice ----------------------------------------------------------------------------------------------------------


def _as_key(key: Key) -> tuple[Any, ...]:
    return tuple([builtins.slice(*k) if isinstance(k, tuple) else k for k in key])


def _sliced_shape(shape: Shape, *, key: Key) -> Shape:
    return slice_window(shape, shape, 0, normalize_key(_as_key(key), shape), u8)[0]


SLICE = _define_view("slice", _sliced_shape, lambda x, *, key: x[_as_key(key)], "x[key]")


@builds(SLICE)
def slice(x: Any, key: Any) -> Tensor:
    """``x[key]`` by NumPy's basic indexing: integers, slices with positive steps, ``None``, ``...``; a view.

    Raises:
        BoundsError: an integer outside of its axis, or more parts than axes.
        LayoutError: a negative step, a cut quantized block, or an index that is none of the above.
    """
    x = make("slice", x)
    rows("slice", x)
    try:
        parts = normalize_key(key, x.shape)
        shape, strides, offset = slice_window(x.shape, x.strides, x.offset, parts, x.dtype)
        check_shape(shape, x.dtype)
    except OpweaveError as error:
        raise explain(error, "slice", x) from None
    return _view(SLICE, x, {"key": parts}, shape, strides, offset)


def split(x: Any, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """``x`` cut along ``axis`` into views, as NumPy's ``split``.

    Args:
        x: the tensor to cut.
        sizes: the number of equal pieces, or the length of each piece.
        axis: the axis to cut.

    Raises:
        ShapeError: the axis does not divide, or the lengths do not add up to it.
        BoundsError: no such axis.
        LayoutError: a cut quantized block.
    """
    x = make("split", x)
    axis = as_axis("split", axis, x)
    length = x.shape[axis]
    if isinstance(sizes, (tuple, list)):
        try:
            lengths = [as_index(n) for n in sizes]
        except TypeError:
            raise ShapeError(f"split: lengths are integers, not {sizes!r}; the operand is {x.describe()}") from None
        if builtins.sum(lengths) != length or min(lengths, default=0) < 0:
            raise ShapeError(f"split: lengths {lengths} do not add up to {length}; the operand is {x.describe()}")
    else:
        try:
            count = as_index(sizes)  # type: ignore[arg-type]  # whatever else it is raises
        except TypeError:
            raise ShapeError(f"split: sizes are a number of pieces or their lengths, not {sizes!r}") from None
        if count < 1 or length % count:
            raise ShapeError(f"split: {length} does not divide into {count} equal pieces; {x.describe()}")
        lengths = [length // count] * count
    pieces, start = [], 0
    for n in lengths:
        pieces.append(slice(x, (*[builtins.slice(None)] * axis, builtins.slice(start, start + n))))
        start += n
    return tuple(pieces)


# --- broadcast ------------------------------------------------------------------------------------------------------

BROADCAST_TO = _define_view(
    "broadcast_to",
    lambda have, *, shape: tuple(shape),
    lambda x, *, shape: np.broadcast_to(x, shape),
    "x repeated along axes of length 1",
)


@builds(BROADCAST_TO)
def broadcast_to(x: Any, shape: Any) -> Tensor:
    """``x`` seen in a larger shape, as NumPy's ``broadcast_to``; a view with stride 0 where elements repeat.

    Raises:
        ShapeError: ``x`` does not broadcast to ``shape``.
    """
    x = make("broadcast_to", x)
    rows("broadcast_to", x)
    try:
        target = check_shape(shape, x.dtype)
        strides = broadcast_strides(x.shape, x.strides, target)
        dense_strides(target, x.dtype)  # raises where the elements have more bytes than the address space
    except OpweaveError as error:
        raise explain(error, "broadcast_to", x) from None
    return x if target == x.shape else _view(BROADCAST_TO, x, {"shape": target}, target, strides, x.offset)


# --- diagonal -------------------------------------------------------------------------------------------------------


def _diagonal_length(rows: int, columns: int, offset: int) -> int:
    return max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))


DIAGONAL = _define_view(
    "diagonal",
    lambda shape, *, offset: (*shape[:-2], _diagonal_length(shape[-2], shape[-1], offset)),
    lambda x, *, offset: np.diagonal(x, offset, -2, -1),
    "y[..., i] = x[..., i, i + offset]",
)


@builds(DIAGONAL)
def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The diagonal of the matrices that two axes of ``x`` span, as the last axis of the result; a view.

    Args:
        x: at least two axes.
        offset: how many columns above the main diagonal; below it where negative.
        axis1, axis2: rows and columns of the matrices, as NumPy's ``diagonal``.

    Raises:
        ShapeError: less than two axes, or ``axis1`` is ``axis2``.
        BoundsError: no such axis.
        DTypeError: a quantized operand.
    """
    x = unquantized("diagonal", x)
    if x.ndim < 2:
        raise ShapeError(f"diagonal: needs at least two axes; the operand is {x.describe()}")
    first, second = as_axis("diagonal", axis1, x), as_axis("diagonal", axis2, x)
    if first == second:
        raise ShapeError(f"diagonal: axis {axis1} and axis {axis2} are one; the operand is {x.describe()}")
    offset = as_integer("diagonal", "the offset", offset)
    y = transpose(x, [*[a for a in range(x.ndim) if a not in (first, second)], first, second])
    length = _diagonal_length(y.shape[-2], y.shape[-1], offset)
    down, right = y.strides[-2:]
    start = (offset * right if offset >= 0 else -offset * down) if length else 0
    strides = (*y.strides[:-2], down + right)
    return view_node(DIAGONAL, y, {"offset": offset}, (*y.shape[:-2], length), strides, y.offset + start)


# --- packing and joining --------------------------------------------------------------------------------------------


def _same(x: Tensor) -> tuple[Shape, DType]:
    rows("copy", x)
    return x.shape, x.dtype


COPY = OpDef(
    "copy",
    infer=_same,
    reference=lambda x: x,
    inplace=(0,),
    pointwise=True,
    flops=flops_per_element(0),
    formula="x",
    exact=True,
    samples=over_rows("copy"),
    sources=1,
    examples=(Example(PLAIN),),
)


@builds(COPY)
def copy(x: Any) -> Tensor:
    """A packed copy of ``x`` in memory of its own, e.g. of a state before it is written. Takes any dtype.

    Raises:
        LayoutError: the transpose of a quantized matrix.
    """
    return node(COPY, (make("copy", x),), {})


CONTIGUOUS = OpDef(
    "contiguous",
    infer=_same,
    reference=lambda x: x,
    pointwise=True,
    flops=flops_per_element(0),
    formula="x, packed",
    exact=True,
    runs_like="copy",
)


@builds(CONTIGUOUS)
def contiguous(x: Any) -> Tensor:
    """``x`` packed row-major; itself if it already is. Takes any dtype.

    Raises:
        LayoutError: the transpose of a quantized matrix.
    """
    x = make("contiguous", x)
    return x if x.is_dense and not shows_columns_of_blocks(x) else node(CONTIGUOUS, (x,), {})


def _concat_infer(*pieces: Tensor, axis: int) -> tuple[Shape, DType]:
    first = pieces[0]
    for piece in pieces[1:]:
        if (
            piece.ndim != first.ndim
            or piece.shape[:axis] != first.shape[:axis]
            or piece.shape[axis + 1 :] != first.shape[axis + 1 :]
        ):
            raise ShapeError(
                f"concat: pieces must agree in all axes but axis {axis}: {first.describe()} and {piece.describe()}"
            )
    length = builtins.sum([p.shape[axis] for p in pieces])
    return (*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype


CONCAT = OpDef(
    "concat",
    infer=_concat_infer,
    reference=lambda *pieces, axis: np.concatenate(pieces, axis),
    formula="the pieces one after the other along axis",
    exact=True,
    runs_like="copy",
    samples=measured(lambda: [build("concat", [operand(*s), operand(*s)], -1) for s in ROWS]),
)


AFTER = define_op(
    OpDef(
        "after",
        infer=lambda x, *others: (x.shape, x.dtype),
        reference=lambda x, *others: x,
        is_view=True,
        formula="x; what the others need is part of the graph too",
    )
)


def after(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """A view of ``x`` that depends on further tensors, whose elements it does not show: a graph of the result also
    contains the inputs, nodes and writes of states that these need. ``x`` itself where they are constants, weights,
    states that no node wrote, or views of ``x``."""
    needed = tuple(dict.fromkeys([other for other in others if _needs_more(other, x)]))
    return view_node(AFTER, x, {}, x.shape, x.strides, x.offset, needed) if needed else x


def _needs_more(other: Tensor, x: Tensor) -> bool:
    while other is not x and other.is_view and other.op is not AFTER:
        other = other.srcs[0]
    return other is not x and (other.leaf is None or other.leaf.kind == "input")


@builds(CONCAT)
def concat(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """The tensors, promoted to one dtype, one after the other along ``axis``. Quantized ones are of one block type, and
    are not decoded.

    Pieces without elements are not sources of the node; of one piece the result is that piece. The result depends on
    all pieces nevertheless (`after`): their inputs have to be fed, and the writes of states that they need are done.

    Raises:
        ShapeError: no pieces, or pieces that differ in another axis.
        BoundsError: no such axis.
        DTypeError: quantized pieces beside others.
        LayoutError: the transpose of a quantized matrix.
    """
    if isinstance(tensors, Tensor):
        raise ShapeError(f"concat: takes a sequence of tensors, not one; got {tensors!r}")
    try:
        given = list(tensors)
    except TypeError:
        raise ShapeError(f"concat: takes a sequence of tensors, not {tensors!r:.60}") from None
    pieces = tuple([make("concat", t) for t in given])
    if not pieces:
        raise ShapeError("concat: needs at least one tensor")
    of_blocks = pieces[0].dtype.is_quantized and all(p.dtype is pieces[0].dtype for p in pieces)
    (rows if of_blocks else plain)("concat", *pieces)
    axis = as_axis("concat", axis, pieces[0])
    _concat_infer(*pieces, axis=axis)
    pieces = pieces if of_blocks else promoted("concat", *pieces)
    full = tuple([p for p in pieces if p.shape[axis]]) or pieces[:1]
    if len(full) < len(pieces):
        full = (after(full[0], [p for p in pieces if p not in full]), *full[1:])
    return full[0] if len(full) == 1 else node(CONCAT, full, {"axis": axis})
