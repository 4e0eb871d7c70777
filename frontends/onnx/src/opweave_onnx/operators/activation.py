"""Activation functions."""

from __future__ import annotations

from typing import Final

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.movement import axis_of, flat_from
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.trace import Call

__all__ = ["activated"]

LARGEST_F16: Final = 65504


@operator("LeakyRelu")
def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return ow.leaky_relu(x, call.get("alpha", 0.01))


@operator("Elu")
def _elu(call: Call, x: Tensor) -> Tensor:
    return ow.elu(x, call.get("alpha", 1.0))


@operator("Celu")
@composite
def _celu(call: Call, x: Tensor) -> Tensor:
    alpha = call.get("alpha", 1.0)
    return ow.maximum(x, 0.0) + ow.minimum(alpha * ow.expm1(x / alpha), 0.0)


@operator("Selu")
@composite
def _selu(call: Call, x: Tensor) -> Tensor:
    old = call.before(6)
    alpha = call.get("alpha", 1.6732 if old else 1.6732632423543772)
    gamma = call.get("gamma", 1.0507 if old else 1.0507009873554805)
    return ow.mul(ow.elu(x, alpha), gamma)


@operator("PRelu")
def _prelu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    if call.before(7) and slope.ndim == 1:
        slope = ow.reshape(slope, (-1, *[1] * (x.ndim - 2)))  # one for each channel
    return ow.where(x < ow.constant(0, x.dtype), x * slope, x)


@operator("ThresholdedRelu")
def _thresholded_relu(call: Call, x: Tensor) -> Tensor:
    alpha = ow.constant(call.get("alpha", 1.0), x.dtype)
    return ow.where(x > alpha, x, ow.constant(0, x.dtype))


@operator("Shrink")
def _shrink(call: Call, x: Tensor) -> Tensor:
    bias, limit = ow.constant(call.get("bias", 0.0), "f32"), call.get("lambd", 0.5)
    wide = x if x.dtype.is_float else x.astype("f32")
    bias = bias.astype(wide.dtype)
    inner = ow.where(wide > ow.constant(limit, wide.dtype), wide - bias, ow.constant(0, wide.dtype))
    return ow.where(wide < ow.constant(-limit, wide.dtype), wide + bias, inner).astype(x.dtype)


@operator("HardSigmoid")
def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    return ow.clamp(ow.scale(x, call.get("alpha", 0.2), call.get("beta", 0.5)), 0.0, 1.0)


@operator("Softsign")
@composite
def _softsign(call: Call, x: Tensor) -> Tensor:
    return x / (ow.abs(x) + 1.0)


@operator("Mish")
@composite
def _mish(call: Call, x: Tensor) -> Tensor:
    return x * ow.tanh(ow.softplus(x))


@operator("Gelu")
@operator("Gelu", domain=MICROSOFT)
def _gelu(call: Call, x: Tensor) -> Tensor:
    return ow.gelu_tanh(x) if call.get("approximate", "none") == "tanh" else ow.gelu(x)


@operator("FastGelu", domain=MICROSOFT)
@composite
def _fast_gelu(call: Call, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return ow.gelu_tanh(x if bias is None else x + bias)


@operator("QuickGelu", domain=MICROSOFT)
@composite
def _quick_gelu(call: Call, x: Tensor) -> Tensor:
    return x * ow.sigmoid(x * call.get("alpha", 1.702))


@operator("BiasGelu", domain=MICROSOFT)
@composite
def _bias_gelu(call: Call, x: Tensor, bias: Tensor) -> Tensor:
    return ow.gelu(x + bias)


@operator("Swish")
@composite
def _swish(call: Call, x: Tensor) -> Tensor:
    alpha = call.get("alpha", 1.0)
    return ow.silu(x) if alpha == 1.0 else x * ow.sigmoid(x * alpha)


@operator("Softmax", "LogSoftmax")
def _softmax(call: Call, x: Tensor) -> Tensor:
    function = ow.softmax if call.node.op == "Softmax" else ow.log_softmax
    axis = axis_of(x, call.get("axis", 1 if call.before(13) else -1))
    if call.before(13):  # all axes from this one on are one
        return ow.reshape(function(flat_from(x, axis), -1), x.shape)
    if x.dtype.name == "f16" and call.node.op == "Softmax" and x.shape[axis] <= LARGEST_F16:
        # The body that the standard gives, which rounds each step: expected results of f16 depend on it. No power is
        # larger than 1, so that longer axes only have sums beyond f16.
        powers = ow.exp(x - ow.max(x, axis, True))
        return powers / ow.sum(powers, axis, True)
    return function(x, axis)


@operator("Hardmax")
def _hardmax(call: Call, x: Tensor) -> Tensor:
    axis = axis_of(x, call.get("axis", 1 if call.before(13) else -1))
    y = flat_from(x, axis) if call.before(13) else x
    at = 1 if call.before(13) else axis
    places = ow.reshape(ow.arange(y.shape[at]), [y.shape[at] if i == at else 1 for i in range(y.ndim)])
    return ow.reshape(ow.equal(ow.argmax(y, at, True), places).astype(x.dtype), x.shape)


def activated(call: Call, x: Tensor, params: tuple[float, ...]) -> Tensor:
    """``x`` after the function that the attribute ``activation`` of a fused operator names, with the numbers that the
    function takes; those that are left out at its defaults."""
    name = call.get("activation", "")
    match name:
        case "":
            return x
        case "Relu":
            return ow.relu(x)
        case "Tanh":
            return ow.tanh(x)
        case "Sigmoid":
            return ow.sigmoid(x)
        case "LeakyRelu":
            return ow.leaky_relu(x, *params[:1] or (0.01,))
        case "HardSigmoid":
            return ow.clamp(ow.scale(x, *(params if len(params) > 1 else (0.2, 0.5))[:2]), 0.0, 1.0)
        case "Clip" if len(params) >= 2:
            return ow.clamp(x, params[0], params[1])
    raise call.refuse(f"the activation {name!r} with parameters {params} is not supported")
