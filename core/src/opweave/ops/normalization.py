"""Softmax, its logarithm, and layer, root-mean-square, group and Euclidean normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import Infer, OpDef, define_op, flops_per_element
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.elementwise import add
from opweave.ops.movement import broadcast_to, reshape, swapaxes
from opweave.ops.operands import (
    Array,
    added,
    as_axis,
    as_integer,
    as_mask,
    as_number,
    builds,
    check_shape_of,
    floating,
    make,
    misfit,
    promoted,
    wide,
)
from opweave.ops.samples import over_rows

__all__ = ["group_norm", "l2_norm", "layer_norm", "log_softmax", "rms_norm", "softmax"]


def _norm_infer(name: str) -> Infer:
    def infer(x: Tensor, *parameters: Tensor, **attrs: Any) -> tuple[Shape, DType]:
        if not x.ndim:
            raise ShapeError(f"{name}: a number has no last axis to normalise over; the operand is {x.describe()}")
        _check_parameters(name, x, -1, parameters)
        return x.shape, x.dtype

    return infer


def _check_parameters(name: str, x: Tensor, axis: int, parameters: tuple[Tensor, ...]) -> None:
    what = "channels" if axis == 1 else "last axis"
    for p in parameters:
        if p.shape != (x.shape[axis],) or p.dtype is not x.dtype:
            raise ShapeError(
                f"{name}: weight and bias must have shape ({x.shape[axis]},), the {what} of x: "
                f"{x.describe()} and {p.describe()}"
            )


def _norm(op: OpDef, x: Any, weight: Any, bias: Any, axis: int, attrs: dict[str, Any]) -> Tensor:
    """The node with weight and bias, one number of each for every index along ``axis``. A bias without a weight is
    added to the result of a node without either."""
    x = floating(op.name, x)
    if weight is None and bias is not None:
        y, b = node(op, (x,), attrs), make(op.name, bias)
        check_shape_of(op.name, "the bias", b, (y.shape[axis],))
        return add(y, b if axis == -1 else reshape(b, (-1, *[1] * (y.ndim - 1 - axis))))
    return node(op, promoted(op.name, x, *[make(op.name, p) for p in (weight, bias) if p is not None]), attrs)


def _define(name: str, infer: Infer, reference: Callable[..., Array], flops: int, formula: str, **facts: Any) -> OpDef:
    """The definition of a normalization. ``flops`` are those of an element, ``facts`` as `OpDef` has them."""
    return OpDef(
        name, infer=infer, reference=reference, inplace=(0,), flops=flops_per_element(flops), formula=formula, **facts
    )


# --- softmax --------------------------------------------------------------------------------------------------------


def _softmax_infer(x: Tensor, mask: Tensor | None = None, *, scale: float) -> tuple[Shape, DType]:
    if not x.ndim:
        raise ShapeError(f"softmax: a number has no axis to normalise over; the operand is {x.describe()}")
    if mask is not None and (mask.shape != x.shape or mask.dtype is not x.dtype):
        raise ShapeError(f"softmax: the mask must have shape and dtype of x: {x.describe()} and {mask.describe()}")
    return x.shape, x.dtype


def softmax_of(scores: Array, sinks: Array | None = None) -> Array:
    """The softmax over the last axis. The powers e^sink of ``sinks``, one for each head along axis -3, are added to the
    sum in the denominator."""
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sinks = wide(sinks)[:, None, None]
        top = np.maximum(top, sinks)
    # In place, because the pages of each further array of this size cost more time than the arithmetic.
    powers: Array = scores - top
    np.exp(powers, out=powers)
    total = powers.sum(-1, keepdims=True)
    powers /= total if sinks is None else total + np.exp(sinks - top)
    return powers


def _softmax(x: Array, mask: Array | None = None, *, scale: float) -> Array:
    scores = wide(x) * scale
    return softmax_of(scores if mask is None else scores + wide(mask))


def alibi_slopes(heads: int, max_bias: float) -> Array:
    """The factor of each head's bias, shape (heads,), f64: Press, Smith and Lewis, "Train Short, Test Long: Attention
    with Linear Biases Enables Input Length Extrapolation", 2022, whose ``max_bias`` is 8.

    For a power of two it is the geometric sequence that starts at, and proceeds by, 2^(-max_bias / heads). Other
    numbers take that of the next lower power of two, n, then every other member of the sequence for 2 n. All are 1
    where ``max_bias`` is 0.
    """
    n = 1 << (heads.bit_length() - 1)
    first = -max_bias / n * np.arange(1, n + 1)
    between = -max_bias / (2 * n) * np.arange(1, 2 * (heads - n), 2)
    slopes: Array = np.exp2(np.concatenate([first, between]))
    return slopes


SOFTMAX = _define(
    "softmax",
    _softmax_infer,
    _softmax,
    5,
    "eᶻ / Σ eᶻ over the last axis, z = scale · x + mask",
    slack=2.0,
    runs_like="rms_norm",
    samples=over_rows("softmax"),
)


def _head_softmax_infer(
    x: Tensor, sinks: Tensor, mask: Tensor | None = None, *, scale: float, max_bias: float
) -> tuple[Shape, DType]:
    _softmax_infer(x, mask, scale=scale)
    if x.ndim < 3 or sinks.shape != (x.shape[-3],) or sinks.dtype is not x.dtype:
        raise ShapeError(
            f"softmax: sinks are one logit for each head of x (..., heads, queries, keys), of its dtype: "
            f"{x.describe()} and {sinks.describe()}"
        )
    return x.shape, x.dtype


def _head_softmax(x: Array, sinks: Array, mask: Array | None = None, *, scale: float, max_bias: float) -> Array:
    scores = wide(x) * scale
    if mask is not None:
        scores = scores + wide(mask) * alibi_slopes(len(sinks), max_bias)[:, None, None]
    return softmax_of(scores, sinks)


HEAD_SOFTMAX = define_op(
    _define(
        "head_softmax",
        _head_softmax_infer,
        _head_softmax,
        6,
        "eᶻ / (e^sink[h] + Σ eᶻ) over the last axis, z = scale · x + slope[h] · mask, h along axis -3",
        slack=2.0,
        runs_like="softmax",
    )
)


@builds(SOFTMAX)
def softmax(
    x: Any, axis: int = -1, mask: Any = None, scale: float = 1.0, *, max_bias: float = 0.0, sinks: Any = None
) -> Tensor:
    """``exp(z) / sum(exp(z))`` along ``axis``, with ``z = scale * x + mask``; integers become f32.

    The node always works along the last axis; another axis is exchanged with it by views before and after. With
    ``max_bias`` or ``sinks`` it is a ``head_softmax`` over operands ``(x, sinks)`` or ``(x, sinks, mask)``, where
    absent sinks are -inf; ``x`` then has shape (..., heads, queries, keys).

    Args:
        x: at least one axis.
        axis: along which the result sums to 1.
        mask: broadcasts to the shape of ``x``. Of a float type it is added to the scaled ``x``, in whose dtype: 0
            keeps, -inf hides. Of bool, True keeps and False hides, as in torch's ``scaled_dot_product_attention``.
            Where everything is hidden the result is NaN.
        scale: a number.
        max_bias: if not 0, the mask of each head is multiplied by the head's slope (`alibi_slopes`, ALiBi): the mask
            then holds what grows with distance, e.g. ``-(query - key)``, and -inf still hides. Heads are axis -3.
        sinks: shape (heads,), one logit for each head, in the dtype of ``x``. It is added to the sum in the
            denominator only, as the score of a key without a value: rows sum to less than 1, and to 0 where everything
            is hidden.

    Raises:
        BoundsError: no such axis.
        ShapeError: the mask does not broadcast to the shape of ``x``; heads without an axis -3, or not as many as
            sinks; heads and an ``axis`` other than the last one; ``max_bias`` without a mask.
        DTypeError: a quantized operand, sinks that are not of a float type, a mask that is neither of a float type nor
            bool, a bool mask with ``max_bias``.
    """
    x = floating("softmax", x)
    axis = as_axis("softmax", axis, x)
    factor, bias = as_number("softmax", "scale", scale), as_number("softmax", "max_bias", max_bias)
    masks = () if mask is None else (as_mask("softmax", mask, x.shape, x, bias),)
    if bias or sinks is not None:
        if axis != x.ndim - 1:
            raise ShapeError(f"softmax: with max_bias or sinks the axis is the last one; the operand is {x.describe()}")
        return _of_heads(x, masks, factor, bias, sinks)
    return _along(SOFTMAX, (x, *masks), axis, {"scale": factor})


def _of_heads(x: Tensor, masks: tuple[Tensor, ...], scale: float, max_bias: float, sinks: Any) -> Tensor:
    if x.ndim < 3:
        raise ShapeError(
            f"softmax: max_bias and sinks need x of shape (..., heads, queries, keys); the operand is {x.describe()}"
        )
    if max_bias and not masks:
        raise ShapeError(f"softmax: max_bias scales the mask, and there is none; the operand is {x.describe()}")
    if sinks is None:
        sinks = broadcast_to(constant(-np.inf, x.dtype), x.shape[-3:-2])
    extra = added("softmax", "sinks", sinks, x.dtype)
    return node(HEAD_SOFTMAX, (x, extra, *masks), {"scale": scale, "max_bias": max_bias})


def _log_softmax(x: Array) -> Array:
    x = wide(x)
    x = x - x.max(-1, keepdims=True)
    result: Array = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def _along(op: OpDef, srcs: tuple[Tensor, ...], axis: int, attrs: dict[str, Any]) -> Tensor:
    """The node along the last axis; another axis is exchanged with it by views before and after."""
    last = srcs[0].ndim - 1
    if axis == last:
        return node(op, srcs, attrs)
    return swapaxes(node(op, tuple([swapaxes(s, axis, last) for s in srcs]), attrs), axis, last)


LOG_SOFTMAX = _define(
    "log_softmax", _norm_infer("log_softmax"), _log_softmax, 5, "x − ln Σ eˣ over the last axis", runs_like="softmax"
)


@builds(LOG_SOFTMAX)
def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """The logarithm of `softmax` along ``axis``, exact also where that would be 0; integers become f32.

    Raises:
        BoundsError: no such axis.
        DTypeError: a quantized operand.
    """
    x = floating("log_softmax", x)
    return _along(LOG_SOFTMAX, (x,), as_axis("log_softmax", axis, x), {})


# --- layer and RMS normalization ------------------------------------------------------------------------------------


def _layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float) -> Array:
    x = wide(x)
    centered = x - x.mean(-1, keepdims=True)
    y: Array = centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + eps)
    if weight is not None:
        y = y * wide(weight)
    return y if bias is None else y + wide(bias)


LAYER_NORM = _define(
    "layer_norm",
    _norm_infer("layer_norm"),
    _layer_norm,
    8,
    "(x − mean x) / √(var x + eps) · weight + bias over the last axis",
    slack=4.0,
    runs_like="rms_norm",
    samples=over_rows("layer_norm", scaled=True),
)


@builds(LAYER_NORM)
def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Layer normalization over the last axis; operands are promoted to one float dtype.

    Ba, Kiros and Hinton, "Layer Normalization", 2016; the variance is the population's (divided by n).

    Args:
        x: shape (..., n).
        weight, bias: shape (n,), or ``None``.
        eps: added to the variance.

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized operand.
    """
    return _norm(LAYER_NORM, x, weight, bias, -1, {"eps": as_number("layer_norm", "eps", eps)})


def _rms_norm(x: Array, weight: Array | None = None, *, eps: float) -> Array:
    x = wide(x)
    y: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * wide(weight)


RMS_NORM = _define(
    "rms_norm",
    _norm_infer("rms_norm"),
    _rms_norm,
    5,
    "x / √(mean x² + eps) · weight over the last axis",
    samples=over_rows("rms_norm", scaled=True),
)


@builds(RMS_NORM)
def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6) -> Tensor:
    """Root-mean-square normalization over the last axis; operands are promoted to one float dtype.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Shapes and errors as `layer_norm`.
    """
    return _norm(RMS_NORM, x, weight, None, -1, {"eps": as_number("rms_norm", "eps", eps)})


# --- group and Euclidean normalization ------------------------------------------------------------------------------


def _group_norm_infer(x: Tensor, *parameters: Tensor, groups: int, eps: float) -> tuple[Shape, DType]:
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise misfit("group_norm", f"x (n, channels, ...) whose channels make {groups} equal groups", x)
    _check_parameters("group_norm", x, 1, parameters)
    return x.shape, x.dtype


def _group_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, groups: int, eps: float) -> Array:
    n, channels, *rest = x.shape
    grouped = wide(x).reshape(n, groups, -1)
    y: Array = _layer_norm(grouped, eps=eps).reshape(x.shape)
    each = (channels, *[1] * len(rest))
    if weight is not None:
        y = y * wide(weight).reshape(each)
    return y if bias is None else y + wide(bias).reshape(each)


GROUP_NORM = _define(
    "group_norm",
    _group_norm_infer,
    _group_norm,
    8,
    "(x − mean x) / √(var x + eps) · weight + bias over all elements of a group of channels (axis 1)",
    runs_like="layer_norm",
)


@builds(GROUP_NORM)
def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Normalization over groups of channels; operands are promoted to one float dtype.

    Wu and He, "Group Normalization", 2018. One group is layer normalization over all but the first axis; as many groups
    as channels are instance normalization. The variance is the population's.

    Args:
        x: shape (n, channels, ...).
        groups: a divisor of the number of channels; each group is consecutive ones.
        weight, bias: shape (channels,), or ``None``.
        eps: added to the variance.

    Raises:
        ShapeError: shapes that do not fit, groups that do not divide the channels.
        DTypeError: a quantized operand.
    """
    attrs = {"groups": as_integer("group_norm", "groups", groups), "eps": as_number("group_norm", "eps", eps)}
    return _norm(GROUP_NORM, x, weight, bias, 1, attrs)


def _l2_norm(x: Array, *, eps: float) -> Array:
    x = wide(x)
    result: Array = x / np.maximum(np.sqrt(np.square(x).sum(-1, keepdims=True)), eps)
    return result


L2_NORM = _define(
    "l2_norm", _norm_infer("l2_norm"), _l2_norm, 4, "x / max(√Σ x², eps) over the last axis", runs_like="rms_norm"
)


@builds(L2_NORM)
def l2_norm(x: Any, axis: int = -1, eps: float = 1e-12) -> Tensor:
    """``x`` divided by its Euclidean norm along ``axis``, or by ``eps`` where that is larger; torch's ``normalize``.

    Integers become f32.

    Raises:
        BoundsError: no such axis.
        DTypeError: a quantized operand, an ``eps`` that is no number.
    """
    x = floating("l2_norm", x)
    return _along(L2_NORM, (x,), as_axis("l2_norm", axis, x), {"eps": as_number("l2_norm", "eps", eps)})
