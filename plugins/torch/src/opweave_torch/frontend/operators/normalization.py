"""Normalization, softmax and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave.ops.operands import widened
from opweave_torch.frontend.call import Call, constant_of
from opweave_torch.frontend.native import overload
from opweave_torch.frontend.operators.fallback import random_by_torch
from opweave_torch.frontend.operators.table import operator

__all__: list[str] = []


def _column(x: Tensor, values: Tensor) -> Tensor:
    """A number for each channel, in the shape that meets ``x`` of shape (batch, channels, ...)."""
    return ow.reshape(values, (1, -1, *[1] * (x.ndim - 2)))


def _affine(call: Call, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(x - mean) / √(var + eps) · weight + bias, as one product and one sum for each element."""
    known = [call.known(v) for v in (weight, bias, mean, var)]
    if all(k is not None or v is None for k, v in zip(known, (weight, bias, mean, var), strict=True)):
        w, b, m, v = known
        assert m is not None
        assert v is not None
        factor = torch.rsqrt(v.double() + eps) * (1 if w is None else w.double())
        offset = (0 if b is None else b.double()) - m.double() * factor
        kind = torch.float64 if x.dtype.name == "f64" else torch.float32
        scale, shift = constant_of(factor.to(kind)), constant_of(offset.to(kind))
    else:
        scale = ow.rsqrt(widened(var) + eps)
        scale = scale if weight is None else scale * widened(weight)
        shift = ow.neg(widened(mean)) * scale
        shift = shift if bias is None else shift + widened(bias)
    return (x.astype(scale.dtype) * _column(x, scale) + _column(x, shift)).astype(x.dtype)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel over the batch."""
    axes = (0, *range(2, x.ndim))
    wide = widened(x)
    return ow.mean(wide, axes), ow.var(wide, axes, 0.0)


@operator("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    call: Call, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _affine(call, x, weight, bias, mean, var, eps), None, None


@operator("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    call: Call,
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    if not training:
        return _affine(call, x, weight, bias, mean, var, eps), None, None, mean, var
    batch_mean, batch_var = _moments(x)
    count = x.size // x.shape[1]
    unbiased = batch_var * (count / max(count - 1, 1))
    return (
        _affine(call, x, weight, bias, batch_mean, batch_var, eps),
        batch_mean,
        ow.rsqrt(batch_var + eps),
        _mixed(mean, batch_mean, momentum),
        _mixed(var, unbiased, momentum),
    )


def _mixed(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """A running statistic after a batch."""
    return (widened(old) * (1 - momentum) + new * momentum).astype(old.dtype)


@operator("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    call: Call, x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    mean, var = _moments(x)
    return _affine(call, x, weight, bias, mean, var, eps), mean, ow.rsqrt(var + eps)


@operator("layer_norm", "native_layer_norm")
def _layer_norm(
    call: Call, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    rank = len(shape)
    rows, flat = ow.reshape(x, (*x.shape[: x.ndim - rank], prod(shape))), (prod(shape),)
    w, b = (None if v is None else ow.reshape(v, flat) for v in (weight, bias))
    y = ow.reshape(ow.layer_norm(rows, w, b, eps), x.shape)
    if str(call.node.target) == "aten.layer_norm.default":
        return y
    mean = rstd = None
    if call.wants(1) or call.wants(2):
        kept = (*x.shape[: x.ndim - rank], *[1] * rank)
        wide = widened(rows)
        mean = ow.reshape(ow.mean(wide, -1), kept)
        rstd = ow.reshape(ow.rsqrt(ow.var(wide, -1, 0.0) + eps), kept)
    return y, mean, rstd


@operator("rms_norm", "_fused_rms_norm")
def _rms_norm(
    call: Call, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    exact = torch.finfo(
        {"f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}.get(x.dtype.name, torch.float32)
    ).eps
    eps = exact if eps is None else eps
    rank = len(shape)
    rows = ow.reshape(x, (*x.shape[: x.ndim - rank], prod(shape)))
    flat = None if weight is None else ow.reshape(weight, (prod(shape),))
    y = ow.reshape(ow.rms_norm(rows, flat, eps), x.shape)
    if str(call.node.target) == "aten.rms_norm.default":
        return y
    rstd = None
    if call.wants(1):
        wide = widened(rows)
        kept = (*x.shape[: x.ndim - rank], *[1] * rank)
        rstd = ow.reshape(ow.rsqrt(ow.mean(ow.square(wide), -1) + eps), kept)
    return y, rstd


@operator("group_norm", "native_group_norm")
def _group_norm(call: Call, x: Tensor, *rest: Any, **named: Any) -> Any:
    if str(call.node.target) == "aten.group_norm.default":
        groups, weight, bias, eps = [*rest, *[None, None, 1e-5][len(rest) - 1 :]][:4]
        return ow.group_norm(x, groups, named.get("weight", weight), named.get("bias", bias), named.get("eps", eps))
    weight, bias, _, _, _, groups, eps = rest
    y = ow.group_norm(x, groups, weight, bias, eps)
    mean = rstd = None
    if call.wants(1) or call.wants(2):
        wide = widened(ow.reshape(x, (x.shape[0], groups, -1)))
        mean, rstd = ow.mean(wide, -1), ow.rsqrt(ow.var(wide, -1, 0.0) + eps)
    return y, mean, rstd


@operator("softmax.int", "_softmax", "_safe_softmax")
def _softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    x = x.astype(call.dtype)
    if not x.ndim:
        return ow.full((), 1.0, x.dtype)
    y = ow.softmax(x, dim)
    if str(call.node.target).startswith("aten._safe"):
        y = ow.where(ow.greater(ow.max(x, dim, True), ow.constant(-float("inf"), x.dtype)), y, ow.constant(0, x.dtype))
    return y


@operator("log_softmax.int", "_log_softmax")
def _log_softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    return ow.log_softmax(x.astype(call.dtype), dim) if x.ndim else ow.full((), 0.0, call.dtype)


@operator("native_dropout")
def _native_dropout(call: Call, x: Tensor, p: float, train: bool | None) -> Any:
    """x with elements set to zero by the probability p, and which ones were kept; torch makes the random numbers."""
    if train is False or p == 0:
        return x, ow.full(x.shape, True, "bool")
    kept = random_by_torch(call, overload("bernoulli.p"), ow.full(x.shape, 0.0, "f32"), 1 - p).astype("bool")
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return ow.where(kept, x * scale, ow.constant(0, x.dtype)), kept
