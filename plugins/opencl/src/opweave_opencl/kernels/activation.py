"""Activation functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call
from opweave_opencl.kernels.pointwise import pointwise
from opweave_opencl.kernels.table import KERNELS

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["EXPRESSIONS"]

EXPRESSIONS: Final = {
    "relu": "((x) < (T)(0.0f) ? (T)(0.0f) : (x))",
    "sigmoid": "((T)(1.0f) / ((T)(1.0f) + exp(-(x))))",
    "silu": "((x) / ((T)(1.0f) + exp(-(x))))",
    # 1 + erf(z) = erfc(-z), which keeps its digits where the sum would cancel.
    "gelu": "((T)(0.5f) * (x) * erfc((x) * (T)(-0.70710678118654752f)))",
}
"""OpenCL C of each function, for scalars and vectors."""


@KERNELS(*EXPRESSIONS, inplace=True)
def activation(stream: OpenCLStream, op: str, out: Arg, x: Arg) -> Call:
    return pointwise(stream, EXPRESSIONS[op], out, (x,))
