"""Normalization."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.dtypes import wide_type
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite, widened
from opweave_onnx.operators.movement import axis_of, flat_from
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.trace import Call


def _along_channels(v: Tensor, rank: int) -> Tensor:
    return ow.reshape(v, (-1, *[1] * (rank - 2)))


@operator("BatchNormalization")
def _batch_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
    eps = call.get("epsilon", 1e-5)
    if call.before(7):
        trains = not call.get("is_test", 0)
    elif call.before(14):
        trains = any(call.wants(i) for i in range(1, 5))
    else:
        trains = bool(call.get("training_mode", 0))
    spatial = bool(call.get("spatial", 1))  # 0, before version 9: an element has statistics of its own
    if not trains:
        return _normalized(call, x, scale, bias, mean, var, eps, spatial)
    axes = tuple([i for i in range(x.ndim) if i != 1]) if spatial else (0,)
    momentum, wide = call.get("momentum", 0.9), widened(x)
    now, spread = ow.mean(wide, axes), ow.var(wide, axes, 0)
    y = _normalized(call, x, scale, bias, now, spread, eps, spatial)
    saved = [now.astype(mean.dtype), spread.astype(var.dtype)] if call.before(14) else []
    return y, _mixed(mean, now, momentum), _mixed(var, spread, momentum), *saved


def _mixed(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """A running statistic after a batch."""
    return (widened(old) * momentum + new * (1 - momentum)).astype(old.dtype)


def _normalized(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, spatial: bool
) -> Tensor:
    def placed(v: Tensor) -> Tensor:
        return _along_channels(v, x.ndim) if spatial else v

    known = [call.trace.session.array(v) for v in (scale, bias, mean, var)]
    if all(v is not None for v in known):  # one multiplication and one addition
        a, b, m, v = [np.asarray(k, np.float64) for k in known]
        factor = a / np.sqrt(v + eps)
        dtype = wide_type(x.dtype).numpy
        y = widened(x) * placed(call.tensor(factor.astype(dtype))) + placed(call.tensor((b - m * factor).astype(dtype)))
    else:
        factors, shifts, center, spread = [placed(widened(p)) for p in (scale, bias, mean, var)]
        y = (widened(x) - center) * ow.rsqrt(spread + eps) * factors + shifts
    return y.astype(x.dtype)


@operator("InstanceNormalization")
def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return ow.group_norm(x, x.shape[1], scale, bias, call.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = call.get("num_groups", 1)
    if call.before(21):  # one for each group
        scale, bias = (ow.repeat(v, x.shape[1] // groups) for v in (scale, bias))
    return ow.group_norm(x, groups, scale, bias, call.get("epsilon", 1e-5))


@operator("LayerNormalization")
@operator("LayerNormalization", domain=MICROSOFT)
def _layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis, eps = axis_of(x, call.get("axis", -1)), call.get("epsilon", 1e-5)
    inner = x.shape[axis:]
    flat = flat_from(x, axis)
    row = ow.reshape(ow.broadcast_to(scale, inner), (prod(inner),))
    shift = None if bias is None else ow.reshape(ow.broadcast_to(bias, inner), (prod(inner),))
    y = ow.reshape(ow.layer_norm(flat, row, shift, eps), x.shape)
    if not (call.wants(1) or call.wants(2)):
        return y
    wide = widened(flat)
    shape = (*x.shape[:axis], *[1] * len(inner))
    return y, ow.reshape(ow.mean(wide, 1), shape), ow.reshape(ow.rsqrt(ow.var(wide, 1, 0) + eps), shape)


@operator("RMSNormalization")
@operator("SimplifiedLayerNormalization")
def _rms_norm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    axis, eps = axis_of(x, call.get("axis", -1)), call.get("epsilon", 1e-5)
    inner = x.shape[axis:]
    row = ow.reshape(ow.broadcast_to(scale, inner), (prod(inner),))
    return ow.reshape(ow.rms_norm(flat_from(x, axis), row, eps), x.shape).astype(scale.dtype)


@operator("SkipLayerNormalization", domain=MICROSOFT)
@composite
def _skip_layer_norm(
    call: Call, x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    y = ow.layer_norm(total, gamma, beta, call.get("epsilon", 1e-12))
    return (y, None, None, total) if call.wants(3) else y


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
@composite
def _skip_rms_norm(call: Call, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    y = ow.rms_norm(total, gamma, call.get("epsilon", 1e-12))
    return (y, None, None, total) if call.wants(3) else y


@operator("EmbedLayerNormalization", domain=MICROSOFT)
@composite
def embedded(
    call: Call, ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor, kinds: Tensor | None,
    gamma: Tensor, beta: Tensor | None, mask: Tensor | None = None, position_ids: Tensor | None = None,
) -> Any:  # fmt: skip
    at = ow.arange(ids.shape[1], dtype="i32") if position_ids is None else position_ids
    total = ow.embedding(words, ids) + ow.embedding(positions, at)
    if segments is not None and kinds is not None:
        total = total + ow.embedding(kinds, segments)
    y = ow.layer_norm(total, gamma, beta, call.get("epsilon", 1e-12))
    counts = ow.full(ids.shape[:1], 0, "i32") if mask is None else ow.sum(mask, 1).astype("i32")
    return y, counts, total


@operator("LRN")
@composite
def _lrn(call: Call, x: Tensor) -> Tensor:
    alpha, beta, bias, size = (
        call.get("alpha", 1e-4),
        call.get("beta", 0.75),
        call.get("bias", 1.0),
        call.get("size", 1),
    )
    before = (size - 1) // 2
    squares = ow.pad(ow.square(x), [(before, size - 1 - before) if i == 1 else (0, 0) for i in range(x.ndim)])
    channels = x.shape[1]
    total = squares[:, :channels]
    for i in range(1, size):
        total = total + squares[:, i : i + channels]
    return x / ow.pow(total * (alpha / size) + bias, beta)


@operator("LpNormalization")
@composite
def _lp_norm(call: Call, x: Tensor) -> Tensor:
    axis, p = axis_of(x, call.get("axis", -1)), call.get("p", 2)
    norm = ow.sum(ow.abs(x), axis, True) if p == 1 else ow.sqrt(ow.sum(ow.square(x), axis, True))
    zero = ow.constant(0, x.dtype)
    return ow.where(ow.equal(norm, zero), zero, x / norm)
