"""Pooling: the largest element or the mean of each window."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import Infer, OpDef, build, define_op
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, as_flag, builds, floating, misfit, unquantized, wide
from opweave.ops.samples import measured, operand
from opweave.ops.windows import as_lengths, batched, fitting, sum_of_windows, unpadded, window_attrs, windows_of

__all__ = ["avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d"]


def _places(
    lengths: Shape,
    *,
    kernel_size: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    ceil_mode: bool,
    **averaging: Any,
) -> Shape:
    """How many windows there are along each axis."""
    counts = []
    for n, k, s, p, d in zip(lengths, kernel_size, stride, padding, dilation, strict=True):
        count = fitting(n + 2 * p + (s - 1 if ceil_mode else 0), k, s, d)
        # The last window has to begin inside of the input or the padding before it.
        counts.append(count - 1 if ceil_mode and (count - 1) * s >= n + p else count)
    return tuple(counts)


def _pool_infer(op: str, rank: int) -> Infer:
    def infer(x: Tensor, **window: Any) -> tuple[Shape, DType]:
        if x.ndim != rank + 2:
            raise misfit(op, f"(batch, channels) and {rank} more axes", x)
        kernel, padding = window["kernel_size"], window["padding"]
        for p, k in zip(padding, kernel, strict=True):
            if 2 * p > k:
                raise ShapeError(f"{op}: padding {p} must be at most half of the window of {k}; {x.describe()}")
        places = _places(x.shape[2:], **window)
        if min(places) < 1:
            raise ShapeError(f"{op}: no window of {kernel} fits into {x.describe()} with padding {padding}")
        return (*x.shape[:2], *places), x.dtype

    return infer


def _padded_windows(x: Array, fill: Any, **window: Any) -> Array:
    """All windows, shape (batch, channels, *places, *kernel), with ``fill`` where they reach out of the operand."""
    kernel, stride, dilation = window["kernel_size"], window["stride"], window["dilation"]
    places, pads = _places(x.shape[2:], **window), [(0, 0), (0, 0)]
    for n, m, k, s, p, d in zip(x.shape[2:], places, kernel, stride, window["padding"], dilation, strict=True):
        pads.append((p, max(p, (m - 1) * s + d * (k - 1) + 1 - n - p)))
    views = windows_of(np.pad(x, pads, constant_values=fill), kernel, stride, dilation)
    return views[(slice(None), slice(None), *[slice(n) for n in places])]


_MAX: Final = "y[n, c, i] = max_k x[n, c, stride · i + dilation · k − padding]"
_MEAN: Final = "y[n, c, i] = Σ_k x[n, c, stride · i + k − padding] / count"


_WINDOW: Final = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_AVERAGE: Final = (*_WINDOW, "count_include_pad", "divisor")


def _define(op: str, rank: int, reference: Callable[..., Array], more_flops: int, formula: str, **facts: Any) -> OpDef:
    """The definition of a pooling, with one operation for each element of a window and ``more_flops`` for a result."""
    return OpDef(
        op,
        infer=_pool_infer(op, rank),
        attributes=_WINDOW if op.startswith("max") else _AVERAGE,
        reference=reference,
        flops=lambda out: out.size * (prod(out.attrs["kernel_size"]) + more_flops),
        formula=formula,
        runs_like="max_pool2d",
        **facts,
    )


# --- the largest ----------------------------------------------------------------------------------------------------


def _max_pool(x: Array, **window: Any) -> Array:
    lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    result: Array = _padded_windows(x, lowest, **window).max(tuple(range(2 - x.ndim, 0)))
    return result


MAX_POOL1D: Final = _define("max_pool1d", 1, _max_pool, 0, _MAX, exact=True)
MAX_POOL2D: Final = _define(
    "max_pool2d", 2, _max_pool, 0, _MAX, exact=True,
    samples=measured(lambda: [build("max_pool2d", operand(1, c, n, n), 2) for c, n in ((4, 8), (16, 32), (64, 64))]),
)  # fmt: skip


def _build(op: OpDef, rank: int, x: Tensor, window: dict[str, Any], flags: dict[str, bool], **more: Any) -> Tensor:
    """The node; by default windows follow each other without gaps."""
    if window["stride"] is None:
        window["stride"] = window["kernel_size"]
    attrs = window_attrs(op.name, rank, **window)
    attrs |= {name: as_flag(op.name, name, flag) for name, flag in flags.items()} | more
    return batched(op.name, x, rank, lambda y: node(op, (y,), attrs))


def _build_max_pool(
    op: OpDef, rank: int, x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Tensor:
    y = unquantized(op.name, x)
    y = y if y.dtype.is_integer else floating(op.name, y)
    window = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    return _build(op, rank, y, window, {"ceil_mode": ceil_mode})


@builds(MAX_POOL1D)
def max_pool1d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """The largest element of each window of one axis, as ``torch.nn.functional.max_pool1d``; see `max_pool2d`.

    Shapes: (batch, channels, length) or (channels, length).
    """
    return _build_max_pool(MAX_POOL1D, 1, x, kernel_size, stride, padding, dilation, ceil_mode)


@builds(MAX_POOL2D)
def max_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """The largest element of each window of two axes, as ``torch.nn.functional.max_pool2d``; NaN where a
    window has one.

    Args:
        x: shape (batch, channels, height, width), or without a batch; floats or integers.
        kernel_size: of the windows; here and below one integer or one for each axis.
        stride: steps between windows, ``kernel_size`` by default.
        padding: elements on both sides that are never the largest, at most half a window.
        dilation: distance between the elements of a window.
        ceil_mode: also windows that reach over the end of the padded operand, if they begin before its padding at the
            end.

    Raises:
        ShapeError: no window fits, too much padding, another number of axes, arguments that are no such integers.
        DTypeError: a quantized operand.
    """
    return _build_max_pool(MAX_POOL2D, 2, x, kernel_size, stride, padding, dilation, ceil_mode)


def _backward_infer(grad: Tensor, x: Tensor, **window: Any) -> tuple[Shape, DType]:
    if not x.dtype.is_float:
        raise DTypeError(f"max_pool_backward: only floats have gradients, not {x.describe()}")
    if grad.shape != (*x.shape[:2], *_places(x.shape[2:], **window)) or grad.dtype is not x.dtype:
        raise ShapeError(f"max_pool_backward: needs the gradient of every window of {x.describe()}: {grad.describe()}")
    return x.shape, x.dtype


def _max_pool_backward(
    grad: Array, x: Array, *, kernel_size: Shape, stride: Shape, padding: Shape, dilation: Shape, ceil_mode: bool
) -> Array:
    views = _padded_windows(
        x, -np.inf, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode
    )
    places = views.shape[: grad.ndim]
    best = np.unravel_index(views.reshape(*places, -1).argmax(-1), kernel_size)
    at: list[Array] = list(np.indices(places, sparse=True))
    lengths = []
    for axis, (n, k, s, p, d) in enumerate(zip(x.shape[2:], kernel_size, stride, padding, dilation, strict=True)):
        at[2 + axis] = at[2 + axis] * s + best[axis] * d
        lengths.append(max(n + p, (places[2 + axis] - 1) * s + d * (k - 1) + 1))
    total = np.zeros((*x.shape[:2], *lengths), wide(grad).dtype)
    np.add.at(total, tuple(at), wide(grad))
    return unpadded(total, x.shape[2:], padding)


MAX_POOL_BACKWARD: Final = define_op(
    OpDef(
        "max_pool_backward",
        infer=_backward_infer,
        reference=_max_pool_backward,
        inplace=(1,),
        flops=lambda out: 2 * out.srcs[0].size * prod(out.attrs["kernel_size"]),
        formula="dx[n, c, j] = Σ_i dy[n, c, i], over the windows i of max_pool whose first largest element is j",
        nan=False,
        runs_like="max_pool2d",
    )
)


def max_pool_backward(grad: Tensor, x: Tensor, **attrs: Any) -> Tensor:
    """The gradient of `max_pool1d` and `max_pool2d`, of the shape of ``x``.

    Args:
        grad: the gradient of their result, in the dtype of ``x``.
        x: their operand, of a float type.
        attrs: the attributes of their nodes.

    Raises:
        ShapeError: ``grad`` has another shape or dtype than their result.
        DTypeError: an operand of integers.
    """
    return node(MAX_POOL_BACKWARD, (grad, x), attrs)


# --- the mean -------------------------------------------------------------------------------------------------------


def window_counts(n: int, places: int, kernel: int, stride: int, padding: int, include_pad: bool) -> Array:
    """How many elements of each window of one axis are counted: those in the input, or with the padding."""
    first = np.arange(places) * stride - padding
    last = np.minimum(first + kernel, n + padding)
    counted: Array = last - first if include_pad else np.minimum(last, n) - np.maximum(first, 0)
    return counted


def axis_counts(
    lengths: Shape,
    places: Shape,
    *,
    kernel_size: Shape,
    stride: Shape,
    padding: Shape,
    count_include_pad: bool,
    **_: Any,
) -> list[Array]:
    """`window_counts` of each axis, in a shape that broadcasts to that of all places."""
    axes = zip(lengths, places, kernel_size, stride, padding, strict=True)
    last = len(lengths) - 1
    return [
        window_counts(n, m, k, s, p, count_include_pad).reshape(-1, *[1] * (last - axis))
        for axis, (n, m, k, s, p) in enumerate(axes)
    ]


def shared_count(
    *, kernel_size: Shape, padding: Shape, ceil_mode: bool, count_include_pad: bool, divisor: int, **_: Any
) -> int:
    """The number by which the sum of every window is divided; 0 where it is not the same for all windows."""
    return divisor or (0 if ceil_mode or (any(padding) and not count_include_pad) else prod(kernel_size))


def _over_counts(total: Array, lengths: Shape, **attrs: Any) -> Array:
    """``total``, one element for each window, divided by the number of elements that the window counts."""
    shared = shared_count(**attrs)
    for counts in [shared] if shared else axis_counts(lengths, total.shape[2:], **attrs):
        total = total / counts
    return total


def _avg_pool(x: Array, **attrs: Any) -> Array:
    total: Array = _padded_windows(wide(x), 0.0, **attrs).sum(tuple(range(2 - x.ndim, 0)))
    return _over_counts(total, x.shape[2:], **attrs)


AVG_POOL1D: Final = _define("avg_pool1d", 1, _avg_pool, 1, _MEAN)
AVG_POOL2D: Final = _define("avg_pool2d", 2, _avg_pool, 1, _MEAN)


def _build_avg_pool(
    op: OpDef, rank: int, x: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include: bool, divisor: Any
) -> Tensor:
    number = 0 if divisor is None else as_lengths(op.name, "divisor_override", divisor, 1)[0]
    flags = {"ceil_mode": ceil_mode, "count_include_pad": include}
    window = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": 1}
    return _build(op, rank, floating(op.name, x), window, flags, divisor=number)


@builds(AVG_POOL1D)
def avg_pool1d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window of one axis, as ``torch.nn.functional.avg_pool1d``; see `avg_pool2d`.

    Shapes: (batch, channels, length) or (channels, length).
    """
    return _build_avg_pool(AVG_POOL1D, 1, x, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


@builds(AVG_POOL2D)
def avg_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window of two axes, as ``torch.nn.functional.avg_pool2d``; integers become f32.

    Args:
        x: shape (batch, channels, height, width), or without a batch.
        kernel_size: of the windows; here and below one integer or one for each axis.
        stride: steps between windows, ``kernel_size`` by default.
        padding: zeros on both sides, at most half a window.
        ceil_mode: also windows that reach over the end of the padded operand, if they begin before its padding at the
            end; elements beyond the padding are never counted.
        count_include_pad: the padding counts as elements of the mean.
        divisor_override: divide by this number instead. On nodes ``divisor``, 0 for none.

    Raises:
        ShapeError: no window fits, too much padding, another number of axes, arguments that are no such integers.
        DTypeError: a quantized operand.
    """
    return _build_avg_pool(
        AVG_POOL2D, 2, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def _avg_backward_infer(grad: Tensor, *, size: Shape, **attrs: Any) -> tuple[Shape, DType]:
    if not grad.dtype.is_float:
        raise DTypeError(f"avg_pool_backward: only floats have gradients, not {grad.describe()}")
    places = _places(size, **attrs)
    if grad.shape[2:] != places:
        raise misfit("avg_pool_backward", f"the gradient of {places} windows of axes of {size}", grad)
    return (*grad.shape[:2], *size), grad.dtype


def _avg_pool_backward(grad: Array, *, size: Shape, **attrs: Any) -> Array:
    kernel, stride, dilation, padding = (attrs[n] for n in ("kernel_size", "stride", "dilation", "padding"))
    share = _over_counts(wide(grad), size, **attrs)
    views = np.broadcast_to(share[(..., *[None] * len(size))], (*grad.shape, *kernel))
    axes = zip(size, grad.shape[2:], kernel, stride, padding, strict=True)
    padded = tuple([max(n + p, (m - 1) * s + k) for n, m, k, s, p in axes])
    return unpadded(sum_of_windows(views, padded, stride, dilation), size, padding)


AVG_POOL_BACKWARD: Final = define_op(
    OpDef(
        "avg_pool_backward",
        infer=_avg_backward_infer,
        attributes=_AVERAGE,
        reference=_avg_pool_backward,
        flops=lambda out: out.srcs[0].size * (prod(out.attrs["kernel_size"]) + 1),
        formula="dx[n, c, j] = Σ_i dy[n, c, i] / count, over the windows i of avg_pool in which j lies",
        runs_like="max_pool2d",
    )
)


def avg_pool_backward(grad: Tensor, size: Shape, **attrs: Any) -> Tensor:
    """The gradient of `avg_pool1d` and `avg_pool2d`, of the shape of their operand.

    Args:
        grad: the gradient of their result, of a float type.
        size: lengths of the spatial axes of their operand.
        attrs: the attributes of their nodes.

    Raises:
        ShapeError: ``grad`` has another shape than their result.
        DTypeError: a ``grad`` of integers.
    """
    return node(AVG_POOL_BACKWARD, (grad,), {"size": size, **attrs})
