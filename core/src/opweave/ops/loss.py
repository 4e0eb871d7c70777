"""Losses: how far predictions are from their targets. They are built from other operations; half types are computed,
and returned, in f32."""

from __future__ import annotations

from typing import Any, Literal, get_args

from opweave.errors import DTypeError, ShapeError, UnknownNameError
from opweave.graph.dtypes import bool_, wide_type
from opweave.graph.tensor import Tensor
from opweave.ops.elementwise import square, sub
from opweave.ops.indexing import take_along_axis
from opweave.ops.movement import expand_dims, reshape
from opweave.ops.normalization import log_softmax
from opweave.ops.operands import as_axis, as_integer, as_number, cast, float_pair, floating, make, plain
from opweave.ops.reduction import mean, sum
from opweave.ops.selection import where

__all__ = ["cross_entropy", "mse_loss"]

Reduction = Literal["mean", "sum", "none"]
"""What is returned: the mean of the losses of the elements, their sum, or the loss of each element."""


def _reduced(op: str, losses: Tensor, reduction: Reduction) -> Tensor:
    _check_reduction(op, reduction)
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)


def _check_reduction(op: str, reduction: Any) -> None:
    if not isinstance(reduction, str) or reduction not in get_args(Reduction):
        raise UnknownNameError(f"reduction of {op}", str(reduction), get_args(Reduction))


def mse_loss(x: Any, target: Any, reduction: Reduction = "mean") -> Tensor:
    """The squared differences of two tensors, broadcast and promoted; torch's ``mse_loss``.

    Args:
        x: the predictions; integers become f32.
        target: the values that they should have.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        Shape (), without a reduction that of the operands.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand.
        UnknownNameError: no such reduction.
    """
    a, b = [cast(v, wide_type(v.dtype)) for v in float_pair("mse_loss", x, target)]
    return _reduced("mse_loss", square(sub(a, b)), reduction)


def cross_entropy(
    logits: Any,
    target: Any,
    axis: int = -1,
    reduction: Reduction = "mean",
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """The cross entropy between softmax(logits) and labels or distributions; torch's ``cross_entropy``.

    With smoothing ε it is that of (1 − ε) · target + ε / classes: Szegedy et al., "Rethinking the Inception
    Architecture for Computer Vision", 2016, section 7.

    Args:
        logits: unnormalised logarithms of probabilities, with the classes along ``axis``.
        target: labels, i32 or i64 of the shape of the logits without ``axis``, each 0 .. classes - 1 or
            ``ignore_index``; or distributions, of a float type and the shape of the logits.
        axis: that of the classes; the last one by default (torch: 1, or the only one).
        reduction: ``"mean"``, of labels over those that are not ignored (NaN if all are); ``"sum"`` or ``"none"``.
        label_smoothing: ε, 0 .. 1.
        ignore_index: a label whose element has loss and gradient 0.

    Returns:
        Shape (), without a reduction that of the logits without ``axis``.

    Raises:
        ShapeError: a target of another shape.
        DTypeError: a target of another dtype, a quantized operand, a smoothing that is no such number.
        BoundsError: no such axis.
        UnknownNameError: no such reduction.
    """
    x = floating("cross_entropy", logits)
    x = cast(x, wide_type(x.dtype))
    at = as_axis("cross_entropy", axis, x)
    t = make("cross_entropy", target)
    plain("cross_entropy", t)
    smoothing = as_number("cross_entropy", "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise DTypeError(f"cross_entropy: label_smoothing is a number between 0 and 1, not {label_smoothing!r}")
    _check_reduction("cross_entropy", reduction)
    rest = (*x.shape[:at], *x.shape[at + 1 :])
    if t.shape != (x.shape if t.dtype.is_float else rest):
        raise ShapeError(
            f"cross_entropy: needs labels of shape {rest} or distributions of shape {x.shape} for logits "
            f"{x.describe()}, not {t.describe()}"
        )
    scores = log_softmax(x, at)
    if t.dtype.is_float:
        wanted = cast(t, x.dtype)
        if smoothing:
            wanted = wanted * (1 - smoothing) + smoothing / x.shape[at]
        return _reduced("cross_entropy", -sum(wanted * scores, at), reduction)
    if t.dtype.kind != "i" or t.dtype.itemsize < 4:
        raise DTypeError(f"cross_entropy: labels are i32 or i64; cast them; the target is {t.describe()}")
    counted = cast(sub(t, as_integer("cross_entropy", "ignore_index", ignore_index)), bool_)
    labels = expand_dims(where(counted, t, 0), at)
    losses = -reshape(take_along_axis(scores, labels, at), rest)
    if smoothing:
        losses = losses * (1 - smoothing) - mean(scores, at) * smoothing
    losses = where(counted, losses, 0.0)
    if reduction == "mean":
        return sum(losses) / sum(cast(counted, x.dtype))
    return _reduced("cross_entropy", losses, reduction)
