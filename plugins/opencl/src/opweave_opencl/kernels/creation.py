"""Tensors made without sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave.graph.dtypes import DType, as_dtype
from opweave_opencl.kernels.pointwise import Writer, launch_pointwise
from opweave_opencl.kernels.table import KERNELS, NUMBERS, PLAIN
from opweave_opencl.kernels.words import VALUES

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("full", dtypes=PLAIN)
def full(stream: OpenCLStream, op: str, out: Arg, *, shape: tuple[int, ...], value: float, dtype: DType) -> Call:
    writer = Writer()
    writer.put(writer.number(value, dtype), out)
    return launch_pointwise(stream, writer, out.shape)


@KERNELS("arange", dtypes=NUMBERS)
def arange(stream: OpenCLStream, op: str, out: Arg, *, start: float, step: float, count: int, dtype: DType) -> Call:
    """Integers are computed in 64 bits, floats in the type that kernels compute with."""
    wide = dtype if dtype.is_float else as_dtype("i64")
    writer = Writer()
    writer.helper(f"RAMP({dtype}, {VALUES[wide.name]})")
    first, by = (writer.scalar(number, wide) for number in (start, step))
    writer.put(writer.let(dtype, f"ramp_{dtype}(i, {first}, {by})"), out)
    return launch_pointwise(stream, writer, out.shape)
