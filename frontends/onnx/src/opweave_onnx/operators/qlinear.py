"""Operators of the domain com.microsoft between quantized values, as ONNX Runtime's quantizer writes them. They compute
in f32 between converting from integers and rounding to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.dtypes import f32, u8
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.attention import attended_by_parts
from opweave_onnx.operators.indexing import from_front
from opweave_onnx.operators.matmul import integer_product
from opweave_onnx.operators.movement import axis_of, flat_from, taken, with_axis_at
from opweave_onnx.operators.normalization import embedded
from opweave_onnx.operators.pooling import average_pool
from opweave_onnx.operators.quantization import requantized, rounded, zeroed
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.trace import Call

__all__: list[str] = []


def _number(v: Tensor) -> Tensor:
    """A scale or zero point of a whole tensor, without axes."""
    if v.size != 1:
        raise ShapeError(f"one scale and one zero point are needed for the whole tensor, not {v.describe()}")
    return ow.reshape(v, ())


def _floats(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The numbers that quantized values stand for."""
    return zeroed(x, None if zero is None else _number(zero), 0).astype(f32) * _number(scale).astype(f32)


def _quantized(y: Tensor, scale: Tensor, zero: Tensor | None, like: Tensor) -> Tensor:
    """Floats in the scale of the result, whose type is that of the zero point, or of ``like`` without one."""
    shift = None if zero is None else _number(zero)
    return rounded(y / _number(scale).astype(f32), None if shift is None else shift.astype(f32),
                   like.dtype if zero is None else zero.dtype)  # fmt: skip


@operator("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def _binary(
    call: Call, a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, b_scale: Tensor, b_zero: Tensor | None,
    scale: Tensor, zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    function = ow.add if call.node.op == "QLinearAdd" else ow.mul
    return _quantized(function(_floats(a, a_scale, a_zero), _floats(b, b_scale, b_zero)), scale, zero, a)


def _unary(name: str) -> Callable[[Callable[[Call, Tensor], Tensor]], Callable[[Call, Tensor], Tensor]]:
    """Decorator: the function of floats is the operator between quantized values, which takes a value, its scale and
    zero point, and the scale and zero point of the result."""

    def register(function: Callable[[Call, Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
        @operator(name, domain=MICROSOFT)
        def build(
            call: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, scale: Tensor, zero: Tensor | None = None
        ) -> Tensor:
            return _quantized(function(call, _floats(x, x_scale, x_zero)), scale, zero, x)

        return function

    return register


@_unary("QLinearSigmoid")
def _sigmoid(call: Call, x: Tensor) -> Tensor:
    return ow.sigmoid(x)


@_unary("QLinearLeakyRelu")
def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return ow.leaky_relu(x, call.get("alpha", 0.01))


@_unary("QLinearSoftmax")
def _softmax(call: Call, x: Tensor) -> Tensor:
    last = call.get("opset", 13) >= 13
    axis = axis_of(x, call.get("axis", -1 if last else 1))
    return ow.softmax(x, axis) if last else ow.reshape(ow.softmax(flat_from(x, axis), -1), x.shape)


@_unary("QLinearAveragePool")
def _average_pool(call: Call, x: Tensor) -> Tensor:
    if not call.get("channels_last", 0):
        return average_pool(call, x)
    return with_axis_at(average_pool(call, with_axis_at(x, -1, 1)), 1, -1)


@_unary("QLinearGlobalAveragePool")
def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    last = bool(call.get("channels_last", 0))
    return ow.mean(x, tuple(range(1, x.ndim - 1) if last else range(2, x.ndim)), True)


@_unary("QLinearReduceMean")
def _mean(call: Call, x: Tensor) -> Tensor:
    axes = tuple([axis_of(x, axis) for axis in call.get("axes", ())])
    return ow.mean(x, axes or None, bool(call.get("keepdims", 1)))


@operator("QLinearConcat", domain=MICROSOFT)
def _concat(call: Call, scale: Tensor, zero: Tensor, *parts: Tensor) -> Tensor:
    if len(parts) % 3:
        raise ShapeError(f"each value comes with a scale and a zero point; {len(parts)} inputs are no such triples")
    values = [_floats(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return _quantized(ow.concat(values, axis_of(values[0], call.get("axis", 0))), scale, zero, parts[0])


@operator("QLinearWhere", domain=MICROSOFT)
def _where(
    call: Call, condition: Tensor, x: Tensor, x_scale: Tensor, x_zero: Tensor, y: Tensor, y_scale: Tensor,
    y_zero: Tensor, scale: Tensor, zero: Tensor,
) -> Tensor:  # fmt: skip
    # Each value is requantized before one of two is chosen, so that a NaN is never made.
    a, b = (_quantized(_floats(*part), scale, zero, x) for part in ((x, x_scale, x_zero), (y, y_scale, y_zero)))
    return ow.where(condition, a, b)


@operator("GatherBlockQuantized", domain=MICROSOFT)
def _gather_blocks(call: Call, x: Tensor, ids: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Rows of a table whose blocks along another axis have a scale each."""
    axis, along = axis_of(x, call.get("gather_axis", 0)), axis_of(x, call.get("quantize_axis", 1))
    bits, block = call.get("bits", 4), call.get("block_size", 128)
    if axis == along:
        raise ShapeError(f"rows are gathered and quantized along one axis, {axis}")
    if x.dtype is u8 and bits == 4 and along != x.ndim - 1:
        raise ShapeError(f"numbers of 4 bits lie in bytes along the last axis, not along axis {along}")
    middle = 1 << (bits - 1) if x.dtype is u8 else 0
    ids = from_front(call, ids, x.shape[axis])
    values = taken(_numbers(call, x, bits), ids, axis).astype("i32")
    place = along + (ids.ndim - 1 if along > axis else 0)

    def spread(v: Tensor) -> Tensor:
        repeated = ow.repeat(taken(v, ids, axis), block, place)
        return repeated[tuple([slice(n) for n in values.shape])]

    shift: Any = middle if zeros is None else spread(_numbers(call, zeros, bits)).astype("i32")
    result: Tensor = (values - shift).astype(f32) * spread(scales).astype(f32)
    return result.astype(scales.dtype)


def _numbers(call: Call, v: Tensor, bits: int) -> Tensor:
    """A table of integers as one of bytes; two of 4 bits may lie in one, the lower half first."""
    known = call.trace.session.array(v)
    if known is None:
        raise call.refuse("a table, or zero points, that are computed are not supported")
    if v.dtype is u8 and bits == 8:
        return v

    def compute() -> np.ndarray[Any, Any]:
        if v.dtype is u8:
            return np.stack([known & 15, known >> 4], -1).reshape(*v.shape[:-1], -1)
        return known.astype(np.int8)

    return call.trace.session.derived(v, ("numbers", bits), compute)


@operator("QGemm", domain=MICROSOFT)
def _gemm(
    call: Call, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
    c: Tensor | None = None, y_scale: Tensor | None = None, y_zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    a = ow.swapaxes(a, 0, 1) if call.get("transA", 0) else a
    b = ow.swapaxes(b, 0, 1) if call.get("transB", 0) else b
    total = integer_product(call, a, b, _number(a_zero), b_zero)
    if c is not None:  # in the scale of the product
        total = total + c
    each = b_scale.astype(f32) if b_scale.size > 1 else _number(b_scale).astype(f32)
    factor: Tensor = _number(a_scale).astype(f32) * each * float(call.get("alpha", 1.0))
    if y_scale is None:
        return total.astype(f32) * factor
    zero = ow.constant(0, a.dtype) if y_zero is None else _number(y_zero)
    return requantized(total, factor / _number(y_scale).astype(f32), zero)


@operator("QAttention", domain=MICROSOFT)
def _attention(
    call: Call, x: Tensor, w: Tensor, bias: Tensor, x_scale: Tensor, w_scale: Tensor, mask: Tensor | None = None,
    x_zero: Tensor | None = None, w_zero: Tensor | None = None, past: Tensor | None = None,
) -> Any:  # fmt: skip
    each = w_scale if w_scale.size > 1 else _number(w_scale)
    product = integer_product(call, x, w, None if x_zero is None else _number(x_zero), w_zero)
    projected = product.astype(f32) * (_number(x_scale).astype(f32) * each.astype(f32)) + bias.astype(f32)
    return attended_by_parts(call, projected.astype(x_scale.dtype), (w.shape[1] // 3,) * 3, mask, past, None)


@operator("QEmbedLayerNormalization", domain=MICROSOFT)
def _embed_layer_norm(
    call: Call, ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor, kinds: Tensor | None,
    gamma: Tensor, beta: Tensor, mask: Tensor | None, *scales_and_zeros: Tensor | None,
) -> Any:  # fmt: skip
    half = len(scales_and_zeros) // 2
    if half != 5:
        raise ShapeError(f"five scales and five zero points are needed, not {len(scales_and_zeros)} inputs for them")
    tables: list[Tensor | None] = []
    for x, scale, zero in zip(
        (words, positions, kinds, gamma, beta), scales_and_zeros[:half], scales_and_zeros[half:], strict=True
    ):
        if x is None or scale is None:
            tables.append(None)
            continue
        tables.append(_floats(x, scale, zero))
    word, place, kind, factor, shift = tables
    assert word is not None
    assert place is not None
    assert factor is not None
    return embedded(call, ids, segments, word, place, kind, factor, shift, mask)
