"""Conversion between types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

import opweave as ow
from opweave.errors import FormatError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array, dtype_of
from opweave_onnx.trace import Call

__all__ = ["converted"]

NARROW = ("f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0", "f4_e2m1", "i4", "u4", "i2", "u2")


@host_operation("cast_narrow")
def _cast_narrow(x: Array, *, to: DType, saturate: bool, round_mode: str) -> Array:
    """x in a type of one byte or less: floats that do not fit become the largest number, or NaN or infinite."""
    wide = x.astype(np.float32) if x.dtype.kind not in "biuf" or x.dtype.itemsize < 4 else x
    if to.kind in "iu":
        bits = ml_dtypes.iinfo(to.numpy)  # type: ignore[no-untyped-call]
        span = int(bits.max) - int(bits.min) + 1
        whole = np.trunc(wide).astype(np.int64)
        return ((whole - int(bits.min)) % span + int(bits.min)).astype(to.numpy)
    if to.name == "f8_e8m0":
        return _to_e8m0(wide, saturate, round_mode)
    if saturate:
        largest = float(ml_dtypes.finfo(to.numpy).max)  # type: ignore[no-untyped-call]
        wide = np.clip(wide, -largest, largest)
    result = wide.astype(np.float32).astype(to.numpy)
    return result


def _to_e8m0(x: Array, saturate: bool, round_mode: str) -> Array:
    """Floats rounded to powers of two: the exponent of the f32, plus 1 where ``round_mode`` says so for its
    fraction."""
    magnitude = np.abs(x.astype(np.float32))
    bits = magnitude.view(np.uint32)
    exponent, fraction = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
    if round_mode == "up":
        more = (fraction > 0) & ((exponent > 0) | (fraction > 0x400000))
    elif round_mode == "nearest":
        more = (fraction >= 0x400000) & ((exponent > 0) | (fraction > 0x400000))
    else:
        more = np.zeros(bits.shape, bool)
    exponent = exponent + (more & (exponent < (254 if saturate else 255)))
    exponent = np.where((bits == 0x7F800000) & saturate, 254, exponent)
    exponent = np.where(np.isnan(magnitude), 255, exponent)
    return exponent.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def converted(x: Tensor, dtype: Any, saturate: bool = True, round_mode: str = "up") -> Tensor:
    """``x`` in another type by the rules of ONNX's Cast; ``saturate`` and ``round_mode`` are its attributes."""
    to = as_dtype(dtype)
    if x.dtype is to:
        return x
    if to.name in NARROW:
        return _cast_narrow(x, shape=x.shape, dtype=to, to=to, saturate=saturate, round_mode=round_mode)
    return ow.cast(x, to)


@operator("Cast")
def _cast(call: Call, x: Tensor) -> Tensor:
    to = call.node.attributes["to"]
    if isinstance(to, str):  # before version 6, the name of the type
        try:
            to = TensorProto.DataType.Value(to)
        except ValueError:
            raise FormatError(f"attribute 'to' is {to!r}, which is no type") from None
    return converted(x, dtype_of(to, "its result"), bool(call.get("saturate", 1)),
                     call.get("round_mode", "up"))  # fmt: skip


@operator("CastLike")
def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return converted(x, like.dtype, bool(call.get("saturate", 1)), call.get("round_mode", "up"))


@host_operation("bitcast")
def _bitcast(x: Array, *, to: DType) -> Array:
    """The bits of x in another type of the same size."""
    return np.asarray(x, order="C").view(to.numpy)


@operator("BitCast")
def _bit_cast(call: Call, x: Tensor) -> Tensor:
    to = dtype_of(call.get("to", 0), "its result")
    if to.itemsize != x.dtype.itemsize:
        raise call.refuse(f"{x.dtype} and {to} differ in size")
    return _bitcast(x, shape=x.shape, dtype=to, to=to)
