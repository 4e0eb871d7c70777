"""Sums, means, largest elements and their places."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.kernels.table import KERNELS, PLAIN
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("sum", "mean", "max")
def reduce(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axes: Axes) -> Call:
    words, step = _walk(out, x, axes)
    tuning = stream.target.tuning
    macros = {
        "VEC": str(tuning.row_vector if step == 1 else 1),
        "GROUP": str(tuning.row_group),
        "MAXIMUM": str(int(op == "max")),
    }
    scale = out.size / x.size if op == "mean" else 1.0
    program = stream.target.programs.get("reduction", macros)
    group = tuning.row_group
    return stream.launch(program, "reduce", (out.size * group,), (group,), (out, x), words, (scale,))


@KERNELS("argmax")
def argmax(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    words, _ = _walk(out, x, (axis,))
    group = stream.target.tuning.row_group
    macros = {"VEC": "1", "GROUP": str(group), "INDEX": PLAIN[out.dtype.name]}
    program = stream.target.programs.get("argmax", macros)
    return stream.launch(program, "argmax", (out.size * group,), (group,), (out, x), words)


def _walk(out: Arg, x: Arg, axes: Axes) -> tuple[list[int], int]:
    """The words of the kernels' parameters, and the step along the innermost reduced axis."""
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    x_strides = element_strides(x)
    outer, (out_outer, x_outer) = coalesce(out.shape, [element_strides(out), [x_strides[axis] for axis in kept]])
    shape, (steps,) = coalesce([x.shape[axis] for axis in axes], [[x_strides[axis] for axis in axes]])
    words = [len(outer), *padded(outer, 1), *padded(out_outer, 0), *padded(x_outer, 0)]
    words += [len(shape), *padded(shape, 1), *padded(steps, 0)]
    words += [element_offset(out), element_offset(x), prod(shape[1:])]
    return words, steps[0]
