"""Arithmetic and elementary functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from opweave.contract import Arg, Call
from opweave_opencl.kernels.pointwise import pointwise
from opweave_opencl.kernels.table import KERNELS

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["EXPRESSIONS"]

EXPRESSIONS: Final = {
    "add": "((x) + (y))",
    "sub": "((x) - (y))",
    "mul": "((x) * (y))",
    "div": "((x) / (y))",
    "neg": "(-(x))",
    "exp": "exp(x)",
    "log": "log(x)",
    "sqrt": "sqrt(x)",
    "tanh": "tanh(x)",
}
"""OpenCL C of each operation, for scalars and vectors."""


@KERNELS(*EXPRESSIONS, inplace=True)
def elementwise(stream: OpenCLStream, op: str, out: Arg, *srcs: Arg, **attrs: Any) -> Call:
    return pointwise(stream, EXPRESSIONS[op], out, srcs)


@KERNELS("scale", inplace=True)
def scale(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, scale: float, bias: float) -> Call:
    return pointwise(stream, "((x) * alpha + beta)", out, (x,), alpha=scale, beta=bias)
