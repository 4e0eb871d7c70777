"""Reordered, padded and shifted elements, triangles and diagonals."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from opweave.contract import Arg, Call
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.movement import WORDS, copy_call
from opweave_opencl.kernels.pointwise import Writer, launch_pointwise
from opweave_opencl.kernels.table import KERNELS, PLAIN
from opweave_opencl.layouts import element_offset, element_strides, padded
from opweave_opencl.tuning import CHUNK

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

_MODES: Final = {"constant": 0, "edge": 1, "reflect": 2, "wrap": 3}


@KERNELS("flip", dtypes=PLAIN, moves=True)
def flip(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    """A copy with negative strides."""
    offset, strides = x.offset, list(x.strides)
    for axis in axes:
        offset += (x.shape[axis] - 1) * strides[axis]
        strides[axis] = -strides[axis]
    return copy_call(stream, out, Arg(x.buffer, offset, x.dtype, x.shape, tuple(strides)))


@KERNELS("roll", dtypes=PLAIN, moves=True)
def roll(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, shifts: tuple[int, ...]) -> Call:
    """Padding on one side, with the elements of the other."""
    return _arrange(stream, "frame", out, x, before=shifts, mode=_MODES["wrap"])


@KERNELS("pad", dtypes=PLAIN, moves=True)
def pad(
    stream: OpenCLStream, op: str, out: Arg, x: Arg, *, widths: tuple[tuple[int, int], ...], mode: str, value: float
) -> Call:
    bits = int(np.asarray(value).astype(x.dtype.numpy).reshape(1).view(f"u{x.dtype.itemsize}")[0])
    before = tuple([width for width, _ in widths])
    return _arrange(stream, "frame", out, x, before=before, mode=_MODES[mode], value=bits)


@KERNELS("tril", "triu", dtypes=PLAIN, inplace=True, moves=True)
def triangle(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, k: int) -> Call:
    return _arrange(stream, "triangle", out, x, before=(0,) * len(x.shape), mode=int(op == "triu"), k=k)


@KERNELS("diag_embed", dtypes=PLAIN, moves=True)
def diag_embed(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, offset: int) -> Call:
    """Zeros, then a copy along the diagonal."""
    word = WORDS[out.dtype.itemsize]
    writer = Writer()
    whole = Arg(out.buffer, out.offset, word, out.shape, out.strides)
    writer.put(writer.number(0, word), whole)
    down, right = out.strides[-2:]
    start = out.offset + (offset * right if offset >= 0 else -offset * down)
    line = Arg(out.buffer, start, out.dtype, x.shape, (*out.strides[:-2], down + right))
    return in_order([launch_pointwise(stream, writer, out.shape), copy_call(stream, line, x)])


def _arrange(
    stream: OpenCLStream,
    kernel: str,
    out: Arg,
    x: Arg,
    *,
    before: tuple[int, ...],
    mode: int,
    value: int = 0,
    k: int = 0,
) -> Call:
    shape, rows = out.shape, prod(out.shape[:-1])
    tuning = stream.target.tuning
    chunk = 1 if tuning.row_group > 1 else CHUNK.value
    value -= 1 << 64 if value >= 1 << 63 else 0
    words = [len(shape), *padded(shape[::-1], 1), rows, chunk, *padded(x.shape[::-1], 1), *padded(before[::-1], 0)]
    words += [*padded(element_strides(x)[::-1], 0), *padded(element_strides(out)[::-1], 0)]
    words += [element_offset(x), element_offset(out), mode, value, k]
    macros = {"VEC": str(tuning.vector), "T": WORDS[x.dtype.itemsize].name}
    if kernel == "frame":
        macros["FRAME"] = "1"
    program = stream.target.programs.get("arrangement", macros)
    size = -(-shape[-1] // chunk), min(rows, tuning.most_groups)
    return stream.launch(program, kernel, size, (tuning.row_group, 1), (x, out), words)
