"""Repeating and reordering elements, padding, and the triangles and diagonals of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, Literal, get_args

import numpy as np

from opweave.errors import ShapeError, UnknownNameError
from opweave.graph.dtypes import DType
from opweave.graph.layout import MAX_NDIM, Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.movement import broadcast_to, diagonal, flatten, reshape
from opweave.ops.operands import Array, as_axis, as_fill, as_integer, builds, make, unquantized
from opweave.ops.pointwise import same

__all__ = ["diag", "diag_embed", "flip", "pad", "repeat", "roll", "tile", "tril", "triu"]


# --- repeating ------------------------------------------------------------------------------------------------------


def tile(x: Any, reps: int | Sequence[int]) -> Tensor:
    """``x`` several times side by side along each axis, as NumPy's ``tile``.

    It is built from a broadcast view and a packed copy of it, or from the view alone where only axes of length 1 are
    repeated. So every device that has `contiguous` runs it.

    Args:
        x: any dtype.
        reps: how often for each axis; for fewer numbers than axes, of the last axes, for more, axes are added in front.

    Raises:
        ShapeError: ``reps`` are no non-negative integers, or the result has more than 8 axes.
        LayoutError: the transpose of a quantized matrix.
    """
    x = make("tile", x)
    times = [as_integer("tile", "a number of repetitions", r) for r in (_as_list(reps))]
    times = [1] * (x.ndim - len(times)) + times
    if min(times, default=0) < 0 or len(times) > MAX_NDIM:
        raise ShapeError(f"tile: at most {MAX_NDIM} numbers of repetitions, none negative, not {reps}; {x.describe()}")
    return _multiply(reshape(x, (1,) * (len(times) - x.ndim) + x.shape), times, inner=False)


def repeat(x: Any, repeats: int, axis: int | None = None) -> Tensor:
    """Each element of ``x`` several times in a row along ``axis``, as NumPy's ``repeat``.

    It is built as `tile` is.

    Args:
        x: any dtype.
        repeats: how often, the same for all elements.
        axis: the axis along which elements are repeated; ``None``: that of the flattened tensor.

    Raises:
        ShapeError: ``repeats`` is no non-negative integer.
        BoundsError: no such axis.
        LayoutError: a quantized operand repeated along its last axis, or the transpose of a quantized matrix.
    """
    x = make("repeat", x)
    count = as_integer("repeat", "the number of repetitions", repeats)
    if count < 0:
        raise ShapeError(f"repeat: {count} repetitions are less than none; the operand is {x.describe()}")
    if axis is None:
        x, axis = flatten(x), 0
    times = [1] * x.ndim
    times[as_axis("repeat", axis, x)] = count
    return _multiply(x, times, inner=True)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _multiply(x: Tensor, times: Sequence[int], *, inner: bool) -> Tensor:
    """``x`` with each axis as many times as long: each element of it (``inner``), or the whole, is repeated."""
    shape = tuple([n * count for n, count in zip(x.shape, times, strict=True)])
    once: list[int] = []  # the shape with an axis of 1 for each number of repetitions
    grown: list[int] = []
    for n, count in zip(x.shape, times, strict=True):
        if n == 1 or count == 1:
            once.append(n)
            grown.append(n * count)
        else:
            once += (n, 1) if inner else (1, n)
            grown += (n, count) if inner else (count, n)
    if len(grown) <= MAX_NDIM:
        return reshape(broadcast_to(reshape(x, tuple(once)), tuple(grown)), shape)
    # A tensor has no more than 8 axes: one axis is repeated first, with those before and behind it merged.
    axis, n, count = next((a, n, c) for a, (n, c) in enumerate(zip(x.shape, times, strict=True)) if n != 1 != c)
    merged = reshape(x, (prod(x.shape[:axis]), n, prod(x.shape[axis + 1 :])))
    longer = _multiply(merged, (1, count, 1), inner=inner)
    rest = [1 if a == axis else c for a, c in enumerate(times)]
    return _multiply(reshape(longer, (*x.shape[:axis], n * count, *x.shape[axis + 1 :])), rest, inner=inner)


# --- order ----------------------------------------------------------------------------------------------------------


FLIP = OpDef(
    "flip",
    infer=same,
    reference=lambda x, *, axes: np.flip(x, axes),
    formula="y[..., i, ...] = x[..., n - 1 - i, ...] along each of axes",
    exact=True,
    runs_like="copy",
)


@builds(FLIP)
def flip(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """The elements in reverse order along ``axis``, one or several, or (``None``) along all axes; NumPy's ``flip``.

    Raises:
        BoundsError: no such axis.
        ShapeError: an axis named twice.
        DTypeError: a quantized operand.
    """
    x = unquantized("flip", x)
    axes = list(range(x.ndim)) if axis is None else [as_axis("flip", a, x) for a in _as_list(axis)]
    if len(set(axes)) < len(axes):
        raise ShapeError(f"flip: axes {axis} name an axis twice; the operand is {x.describe()}")
    # Along an axis of one element there is nothing to reverse.
    turned = tuple(sorted(a for a in axes if x.shape[a] > 1))
    return node(FLIP, (x,), {"axes": turned}) if turned else x


def _roll_infer(x: Tensor, *, shifts: Shape) -> tuple[Shape, DType]:
    if len(shifts) != x.ndim or any(not 0 <= by < max(n, 1) for by, n in zip(shifts, x.shape, strict=True)):
        raise ShapeError(f"roll: shifts {shifts} are not one number 0 .. n - 1 for each axis of {x.describe()}")
    return x.shape, x.dtype


ROLL = OpDef(
    "roll",
    infer=_roll_infer,
    reference=lambda x, *, shifts: np.roll(x, shifts, tuple(range(x.ndim))),
    formula="y[..., (i + shift) mod n, ...] = x[..., i, ...] along each axis",
    exact=True,
    runs_like="copy",
)


@builds(ROLL)
def roll(x: Any, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """The elements shifted along an axis, as NumPy's ``roll``: those beyond its end continue at its start.

    The attribute ``shifts`` has one number for each axis, 0 .. n - 1.

    Args:
        x: any plain dtype.
        shift: by how many places; negative ones shift towards the start.
        axis: the axis, or one for each shift (shifts of one axis add up); ``None``: over the flattened elements.

    Raises:
        ShapeError: shifts that are no integers, or not as many as axes.
        BoundsError: no such axis.
        DTypeError: a quantized operand.
    """
    x = unquantized("roll", x)
    if axis is None:
        return reshape(roll(flatten(x), shift, 0), x.shape)
    places, axes = _as_list(shift), [as_axis("roll", a, x) for a in _as_list(axis)]
    if len(places) == 1:
        places *= len(axes)
    elif len(axes) == 1:
        axes *= len(places)
    if len(places) != len(axes):
        raise ShapeError(f"roll: {len(places)} shifts for {len(axes)} axes; the operand is {x.describe()}")
    total = [0] * x.ndim
    for a, by in zip(axes, places, strict=True):
        total[a] += as_integer("roll", "a shift", by)
    shifts = tuple([by % n if n else 0 for by, n in zip(total, x.shape, strict=True)])
    return node(ROLL, (x,), {"shifts": shifts}) if any(shifts) else x


Window = tuple[slice, ...]


def roll_windows(shape: Shape, shifts: Shape) -> Iterator[tuple[Window, Window]]:
    """For kernels of `roll`: windows that cover the result, each with the window of the operand from which it is
    copied.

    Along a shifted axis two ranges change places; each combination of ranges of all axes is one window.
    """
    whole = slice(None)
    ranges = [
        [(slice(by, n), slice(0, n - by)), (slice(0, by), slice(n - by, n))] if by else [(whole, whole)]
        for n, by in zip(shape, shifts, strict=True)
    ]
    for pairs in product(*ranges):
        yield tuple([to for to, _ in pairs]), tuple([of for _, of in pairs])


# --- frames ---------------------------------------------------------------------------------------------------------

PadMode = Literal["constant", "edge", "reflect", "wrap"]
"""What a frame is filled with: one value; the nearest element; the elements mirrored at the first and last one, which
are not repeated; the elements from the other end."""

Widths = tuple[tuple[int, int], ...]


def _pad(x: Array, *, widths: Widths, mode: PadMode, value: float) -> Array:
    if mode == "constant":
        return np.pad(x, widths, constant_values=x.dtype.type(value))
    return np.pad(x, widths, mode)


def _pad_infer(x: Tensor, *, widths: Widths, mode: str, value: Any) -> tuple[Shape, DType]:
    for axis, (n, pair) in enumerate(zip(x.shape, widths, strict=True)):
        widest = max(pair)
        most = {"constant": widest, "edge": widest if n else 0, "reflect": max(n - 1, 0), "wrap": n}[mode]
        if widest > most:
            raise ShapeError(
                f"pad: axis {axis} of length {n} has elements for a frame of {most} by {mode!r}, not of {widest}; "
                f"the operand is {x.describe()}"
            )
    return tuple([sum(w) + n for n, w in zip(x.shape, widths, strict=True)]), x.dtype


PAD = OpDef(
    "pad",
    infer=_pad_infer,
    reference=_pad,
    formula="y[b : b + n] = x along each axis; value, the edge, the mirrored or the opposite elements around it",
    exact=True,
    runs_like="copy",
)


@builds(PAD)
def pad(x: Any, widths: Any, mode: PadMode = "constant", value: float = 0) -> Tensor:
    """``x`` with a frame around it, as NumPy's ``pad``.

    Args:
        x: any plain dtype.
        widths: elements before and after: a number or a pair ``(before, after)`` for all axes, or a pair for each axis.
        mode: ``"constant"``: ``value``; ``"edge"``: the nearest element; ``"reflect"``: mirrored at the first and last
            element, which are not repeated; ``"wrap"``: the elements from the other end.
        value: fills a constant frame; converted to the dtype of ``x``.

    Raises:
        ShapeError: widths that are negative or do not fit the axes; a frame that asks for more elements than there are
            (``"reflect"``: n - 1, ``"wrap"``: n, ``"edge"``: any number of at least one).
        UnknownNameError: another mode.
        DTypeError: a quantized operand, or a value that the dtype does not hold.
    """
    x = unquantized("pad", x)
    if not isinstance(mode, str) or mode not in get_args(PadMode):
        raise UnknownNameError("mode of pad", str(mode), get_args(PadMode))
    pairs = _widths(widths, x)
    fill = as_fill("pad", value, x.dtype) if mode == "constant" else 0
    return node(PAD, (x,), {"widths": pairs, "mode": mode, "value": fill}) if any(map(any, pairs)) else x


def _widths(widths: Any, x: Tensor) -> Widths:
    """A pair for each axis."""
    given = _as_list(widths)
    if not any(isinstance(w, (tuple, list)) for w in given):
        given = [given * 2 if len(given) == 1 else given]
    if len(given) == 1:
        given = given * x.ndim
    pairs = [tuple([as_integer("pad", "a width", w) for w in _as_list(pair)]) for pair in given]
    if len(pairs) != x.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ShapeError(
            f"pad: widths are a number, a pair, or a pair for each axis, none negative, not {widths!r}; "
            f"the operand is {x.describe()}"
        )
    return tuple([(before, after) for before, after in pairs])


def frame_windows(shape: Shape, widths: Widths, mode: str) -> Iterator[tuple[int, Window, Window]]:
    """For kernels of `pad`: the windows of the result that are its frame, in an order in which they can be filled after
    the operand, of ``shape``, was copied inside.

    The filled box is extended along one axis after the other, at both sides. The elements of a side are copies of
    elements that are inside of the box by then.

    Yields:
        The axis, the window of a side, and the window of the result from which it is copied (in ``"reflect"`` mode in
        reverse order along the axis; without meaning in ``"constant"`` mode).
    """
    box = [slice(before, before + n) for n, (before, _) in zip(shape, widths, strict=True)]
    for axis, (n, (before, after)) in enumerate(zip(shape, widths, strict=True)):
        end = before + n
        for side in (slice(0, before), slice(end, end + after)):
            if side.start < side.stop:
                origin = _origin(mode, before, end, side)
                yield axis, (*box[:axis], side, *box[axis + 1 :]), (*box[:axis], origin, *box[axis + 1 :])
        box[axis] = slice(0, end + after)


def _origin(mode: str, start: int, end: int, side: slice) -> slice:
    """Where along an axis the elements come from that fill one side of a box from ``start`` to ``end``."""
    ahead, width = side.start < start, side.stop - side.start
    if mode == "edge":
        return slice(start, start + 1) if ahead else slice(end - 1, end)
    if mode == "reflect":
        return slice(start + 1, start + 1 + width) if ahead else slice(end - 1 - width, end - 1)
    return slice(end - width, end) if ahead else slice(start, start + width)


# --- matrices -------------------------------------------------------------------------------------------------------


def _define_triangle(name: str, reference: Callable[..., Array], formula: str) -> OpDef:
    return OpDef(
        name, infer=same, reference=lambda x, *, k: reference(x, k), inplace=(0,),
        formula=formula, exact=True, runs_like="copy",
    )  # fmt: skip


TRIL = _define_triangle("tril", np.tril, "y[..., i, j] = x[..., i, j] where j - i <= k, else 0")
TRIU = _define_triangle("triu", np.triu, "y[..., i, j] = x[..., i, j] where j - i >= k, else 0")


def _triangle(op: OpDef, x: Any, k: int) -> Tensor:
    x = unquantized(op.name, x)
    if x.ndim < 2:
        raise ShapeError(f"{op.name}: needs at least two axes; the operand is {x.describe()}")
    # All diagonals outside of the matrix on one side give the same result, so they are one node.
    diagonal = max(-x.shape[-2], min(as_integer(op.name, "k", k), x.shape[-1]))
    return node(op, (x,), {"k": diagonal})


@builds(TRIL)
def tril(x: Any, k: int = 0) -> Tensor:
    """The lower triangle of matrices (the last two axes); what lies above the diagonal becomes 0, NaN too.

    NumPy's ``tril``.

    Args:
        x: shape (..., n, m), any plain dtype.
        k: the last diagonal to keep: 0 the main one, 1 the one above it, -1 the one below it.

    Raises:
        ShapeError: less than two axes, or ``k`` is no integer.
        DTypeError: a quantized operand.
    """
    return _triangle(TRIL, x, k)


@builds(TRIU)
def triu(x: Any, k: int = 0) -> Tensor:
    """The upper triangle of matrices, from diagonal ``k`` on; NumPy's ``triu``. Arguments and errors as `tril`."""
    return _triangle(TRIU, x, k)


def _diag_infer(x: Tensor, *, offset: int) -> tuple[Shape, DType]:
    n = x.shape[-1] + abs(offset)
    return (*x.shape[:-1], n, n), x.dtype


def _diag_embed(x: Array, *, offset: int) -> Array:
    n = x.shape[-1] + abs(offset)
    out = np.zeros((*x.shape[:-1], n, n), x.dtype)
    i = np.arange(x.shape[-1])
    out[..., i + max(-offset, 0), i + max(offset, 0)] = x
    return out


DIAG_EMBED = OpDef(
    "diag_embed",
    infer=_diag_infer,
    reference=_diag_embed,
    formula="y[..., i, i + offset] = x[..., i], else 0",
    exact=True,
    runs_like="copy",
)


@builds(DIAG_EMBED)
def diag_embed(x: Any, offset: int = 0) -> Tensor:
    """Matrices with the rows of ``x`` on a diagonal and 0 elsewhere; torch's ``diag_embed``.

    Args:
        x: shape (..., n), any plain dtype.
        offset: how many columns above the main diagonal; below it where negative.

    Returns:
        Shape (..., n + abs(offset), n + abs(offset)).

    Raises:
        ShapeError: no axis, more than 7, or ``offset`` is no integer.
        DTypeError: a quantized operand.
    """
    x = unquantized("diag_embed", x)
    if not x.ndim or x.ndim >= MAX_NDIM:
        raise ShapeError(f"diag_embed: needs 1 to {MAX_NDIM - 1} axes; the operand is {x.describe()}")
    return node(DIAG_EMBED, (x,), {"offset": as_integer("diag_embed", "the offset", offset)})


def diag(x: Any, k: int = 0) -> Tensor:
    """Of a vector the matrix with it on diagonal ``k`` (`diag_embed`), of a matrix that diagonal; NumPy's ``diag``.

    Raises:
        ShapeError: neither one nor two axes, or ``k`` is no integer.
        DTypeError: a quantized operand.
    """
    x = make("diag", x)
    if x.ndim not in (1, 2):
        raise ShapeError(f"diag: takes a vector or a matrix (else diag_embed, diagonal); the operand is {x.describe()}")
    return diag_embed(x, k) if x.ndim == 1 else diagonal(x, k)
