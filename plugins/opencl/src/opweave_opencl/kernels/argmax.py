"""The index of the largest element along an axis."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call
from opweave_opencl.kernels.reduction import smallest, strips
from opweave_opencl.kernels.table import KERNELS, PLAIN
from opweave_opencl.kernels.words import access
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded
from opweave_opencl.tuning import limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

BLOCK: Final = limit("argmax_block", 16, 1, 16, bounds=(1, 16))
"""Vectors whose largest element is found before its index is searched for."""


@KERNELS("argmax", dtypes=PLAIN)
def argmax(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    kept = [a for a in range(len(x.shape)) if a != axis]
    strides = element_strides(x)
    outer, own = coalesce(out.shape, [element_strides(out), [strides[a] for a in kept]])
    words = [len(outer), *padded(outer, 1), *padded(own[0], 0), *padded(own[1], 0)]
    tuning, group = stream.target.tuning, stream.target.tuning.row_group
    vectors, rest = -(-outer[0] // tuning.vector), prod(outer[1:])
    most, strip = strips(tuning, vectors * rest)
    words += [x.shape[axis], strides[axis], element_offset(out), element_offset(x), out.size, strip]
    # A vector of neighbouring outputs where they lie closer than the elements of one.
    columns = vectors > 1 and abs(own[1][0]) < abs(strides[axis]) and x.shape[axis] < 1 << 31
    macros = {"COLUMNS": str(int(columns)), "A": x.dtype.name, "OUT": out.dtype.name, "START": smallest(x.dtype)}
    macros |= {"STRIP": str(most), "BLOCK": str(BLOCK.value)}
    macros |= {"VEC": str(tuning.vector), "ACCESSES": access(x.dtype, out.dtype)} | stream.target.sharing()
    program = stream.target.programs.get("argmax", macros)
    if columns:
        return stream.launch(program, "columns", (-(-vectors // strip), rest), (group, 1), (out, x), words)
    return stream.launch(program, "rows", (min(out.size, tuning.most_groups) * group,), (group,), (out, x), words)
