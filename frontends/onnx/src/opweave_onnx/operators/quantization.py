"""Quantized values: integers, or floats of a byte, with scales and zero points."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.dtypes import DType, f32
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.movement import axis_of, with_axis_at
from opweave_onnx.operators.table import operator
from opweave_onnx.operators.types import NARROW, converted
from opweave_onnx.tensors import dtype_of
from opweave_onnx.trace import Call

__all__ = ["zeroed"]


def zeroed(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """Quantized integers minus their zero point, as i32: one number, or one for each index along an axis."""
    y = x.astype("i32")
    return y if zero is None else y - _along(zero.astype("i32"), x, axis)


def _along(v: Tensor, x: Tensor, axis: int) -> Tensor:
    """One number, or one for each index along an axis, in a shape that broadcasts to ``x``."""
    if v.size == 1:
        return ow.reshape(v, ())
    return ow.reshape(v, [v.shape[0] if i == axis else 1 for i in range(x.ndim)])


def _spread(call: Call, v: Tensor | None, x: Tensor, axis: int) -> Tensor | None:
    """Scales or zero points in a shape that broadcasts to ``x``; those of blocks along an axis are repeated."""
    if v is None:
        return None
    block = call.get("block_size", 0)
    if v.ndim <= 1 and not (block and x.ndim == 1):
        return _along(v, x, axis)
    if not block:
        raise ShapeError(f"scales {v.describe()} of blocks need block_size")
    narrow = v.dtype.name in NARROW
    v = ow.repeat(v.astype(f32) if narrow else v, block, axis)
    return v[tuple([slice(0, x.shape[axis]) if i == axis else slice(None) for i in range(x.ndim)])]


@operator("DequantizeLinear")
@operator("DequantizeLinear", domain="com.microsoft")
def _dequantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis = axis_of(x, call.get("axis", 1)) if scale.ndim else 0
    result = dtype_of(call.get("output_dtype", 0)) if call.get("output_dtype", 0) else scale.dtype
    wide = f32 if result.itemsize < 8 else result
    if x.dtype.is_integer:
        y = x.astype("i32")
        shift = _spread(call, None if zero is None else zero.astype("i32"), x, axis)
        y = (y if shift is None else y - shift).astype(wide)
    else:
        y = x.astype(wide)
    spread = _spread(call, scale.astype(wide), x, axis)
    assert spread is not None
    return (y * spread).astype(result)


@operator("QuantizeLinear")
@operator("QuantizeLinear", domain="com.microsoft")
def _quantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis = axis_of(x, call.get("axis", 1)) if scale.ndim else 0
    to = zero.dtype if zero is not None else dtype_of(call.get("output_dtype", 0) or 2)
    precision = dtype_of(call.get("precision", 0)) if call.get("precision", 0) else scale.dtype
    spread = _spread(call, scale, x, axis)
    assert spread is not None
    wide = f32 if precision.itemsize < 8 else precision
    ratio = (x.astype(wide) / spread.astype(wide)).astype(precision).astype(wide)
    shift = None if zero is None else _spread(call, zero.astype(wide), x, axis)
    return rounded(ratio, shift, to, bool(call.get("saturate", 1)))


def rounded(ratio: Tensor, zero: Tensor | None, to: DType, saturate: bool = True) -> Tensor:
    """``ratio`` rounded, plus the zero point, clamped to the range of the type ``to`` and converted to it."""
    if not to.is_integer:
        return converted(ratio if zero is None else ratio + zero, to, saturate)
    whole = ow.round(ratio)
    limits: Any = (
        ml_dtypes.iinfo(to.numpy)  # type: ignore[no-untyped-call]
        if to.name in NARROW
        else np.iinfo(to.numpy)
    )
    moved = whole if zero is None else whole + zero
    return converted(ow.clamp(moved, float(limits.min), float(limits.max)), to)


@operator("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call, x: Tensor) -> Any:
    values, scale, zero = in_bytes(x)
    return values.astype("u8"), scale, zero.astype("u8")


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Floats rounded to 256 equal steps over a range that contains them and 0, as floats from 0 to 255; the scale; and
    the zero point, also a float."""
    if not x.size:  # no elements, and a range of 0 alone
        return x, ow.constant(1, x.dtype), ow.constant(0, x.dtype)
    low, high = ow.minimum(ow.min(x), 0.0), ow.maximum(ow.max(x), 0.0)
    scale = (high - low) / 255.0
    scale = ow.where(scale > 0.0, scale, ow.constant(1, x.dtype))  # of zeros alone, as ONNX Runtime does
    zero = ow.clamp(ow.round(-low / scale), 0.0, 255.0)
    return ow.clamp(ow.round(x / scale) + zero, 0.0, 255.0), scale, zero


# --- products and convolutions --------------------------------------------------------------------------------------


def requantized(total: Tensor, factor: Tensor, zero: Tensor) -> Tensor:
    """Sums of products, i32, in the scale of the result."""
    return rounded(total.astype(f32) * factor, zero.astype(f32), zero.dtype)


@operator("QLinearMatMul")
def _qlinear_matmul(
    call: Call, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor, y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:  # fmt: skip
    from opweave_onnx.operators.matmul import integer_product

    total = integer_product(call, a, b, a_zero, b_zero)
    left = ow.expand_dims(a_scale, -1) if a_scale.ndim and a_scale.size > 1 else ow.reshape(a_scale, ())
    right = b_scale if b_scale.size > 1 else ow.reshape(b_scale, ())
    factor = (
        left.astype(f32) * right.astype(f32) / (y_scale if y_scale.size > 1 else ow.reshape(y_scale, ())).astype(f32)
    )
    return requantized(total, factor, y_zero if y_zero.size > 1 else ow.reshape(y_zero, ()))


@operator("DynamicQuantizeMatMul", domain="com.microsoft")
def _dynamic_matmul(
    call: Call, a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    values, scale, zero = in_bytes(a)
    return _matmul_to_float(call, values.astype("u8"), b, scale, b_scale, zero.astype("u8"), b_zero, bias)


@operator("MatMulIntegerToFloat", domain="com.microsoft")
@composite
def _matmul_to_float(
    call: Call, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None = None,
    b_zero: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from opweave_onnx.operators.matmul import integer_product

    factor = ow.reshape(a_scale, ()) * (b_scale if b_scale.size > 1 else ow.reshape(b_scale, ()))
    y = integer_product(call, a, b, a_zero, b_zero).astype(a_scale.dtype) * factor
    return y if bias is None else y + bias


@operator("QLinearConv", domain="com.microsoft")
@operator("QLinearConv")
def _qlinear_conv(
    call: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor, y_scale: Tensor,
    y_zero: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from opweave_onnx.operators.convolution import convolved
    from opweave_onnx.operators.windows import read_windows

    last = bool(call.get("channels_last", 0))
    x = with_axis_at(x, -1, 1) if last else x
    a, b = zeroed(x, x_zero, 1).astype("f64"), zeroed(w, w_zero, 0).astype("f64")
    total = convolved(a, b, None, read_windows(call, x, w.shape[2:]), call.get("group", 1))
    if bias is not None:
        total = total + ow.reshape(bias.astype("f64"), (-1, *[1] * (x.ndim - 2)))
    factor = ow.reshape(x_scale, ()) * w_scale / ow.reshape(y_scale, ())
    y = requantized(total, _along(factor, x, 1), ow.reshape(y_zero, ()))
    return with_axis_at(y, 1, -1) if last else y
