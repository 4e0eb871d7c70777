"""Copies, conversions and joins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave.dtypes import DType
from opweave_opencl.kernels.pointwise import pointwise
from opweave_opencl.kernels.table import KERNELS, MOVABLE, PLAIN

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["WORDS"]

WORDS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}
"""Unsigned types by their size in bytes."""


@KERNELS("copy", "contiguous", "assign", dtypes=MOVABLE, index=MOVABLE)
def copy(stream: OpenCLStream, op: str, out: Arg, x: Arg) -> Call:
    word = WORDS[x.dtype.itemsize]
    return pointwise(stream, "(x)", out, (x,), types=(word, word))


@KERNELS("cast", dtypes=" ".join(PLAIN))
def cast(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, dtype: DType) -> Call:
    # A comparison gives 1 of scalars and -1 of vectors; the lowest bit is right for both.
    expression = "(TO((x) != (T)(0)) & TO((T)(1)))" if dtype.kind == "b" else "TO(x)"
    return pointwise(stream, expression, out, (x,), types=(PLAIN[dtype.name], PLAIN[x.dtype.name]))


@KERNELS("concat", dtypes=MOVABLE)
def concat(stream: OpenCLStream, op: str, out: Arg, *srcs: Arg, axis: int) -> Call:
    calls = []
    offset = out.offset
    for src in srcs:
        if src.size:
            window = Arg(out.buffer, offset, out.dtype, src.shape, out.strides)
            calls.append(copy(stream, op, window, src))
        offset += src.shape[axis] * out.strides[axis]

    def join() -> None:
        for call in calls:
            call()

    return join
