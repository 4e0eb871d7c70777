"""Bits of integers."""

from __future__ import annotations

from typing import Final

import numpy as np

from opweave.graph.tensor import Tensor
from opweave_onnx.operators.arithmetic import on_one_shape
from opweave_onnx.operators.host import HostOperation, host_operation
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call


@host_operation("left_shift")
def _left(a: Array, b: Array) -> Array:
    """a · 2ᵇ, which wraps around; 0 where b is not less than the bits of the type."""
    wide = b >= a.dtype.itemsize * 8
    return np.where(wide, 0, np.left_shift(a, np.where(wide, 0, b))).astype(a.dtype)


@host_operation("right_shift")
def _right(a: Array, b: Array) -> Array:
    """⌊a / 2ᵇ⌋"""
    last = a.dtype.itemsize * 8 - 1
    return np.where(b > last, np.where(a < 0, -1, 0), np.right_shift(a, np.minimum(b, last))).astype(a.dtype)


_TWO: Final = {
    "BitwiseAnd": HostOperation("bitwise_and", lambda a, b: np.bitwise_and(a, b)),
    "BitwiseOr": HostOperation("bitwise_or", lambda a, b: np.bitwise_or(a, b)),
    "BitwiseXor": HostOperation("bitwise_xor", lambda a, b: np.bitwise_xor(a, b)),
}
_NOT: Final = HostOperation("bitwise_not", lambda x: np.invert(x))


@operator(*_TWO)
def _bitwise(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return on_one_shape(_TWO[call.node.op], a, b)


@operator("BitwiseNot")
def _bitwise_not(call: Call, x: Tensor) -> Tensor:
    return _NOT(x, shape=x.shape, dtype=x.dtype)


@operator("BitShift")
def _bit_shift(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return on_one_shape({"LEFT": _left, "RIGHT": _right}[call.get("direction", "")], a, b)
