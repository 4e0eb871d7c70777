"""Kernels that work along one axis, line by line: the parameters that ``lines.cl`` declares."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded, padded_strides
from opweave_opencl.tuning import GROUPS

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.stream import OpenCLStream

__all__ = ["launch_lines"]


def launch_lines(
    stream: OpenCLStream,
    program: cl.Program,
    kernel: str,
    operands: Sequence[Arg],
    x: Arg,
    out: Arg,
    axis: int,
    items: int,
    words: Sequence[int],
) -> Call:
    """The call of a kernel with ``items`` work-items for each line along ``axis``; ``words`` follow ``LINES``.

    Operands other than ``x`` and ``out`` are scratch memory.
    """
    kept = [a for a in range(len(x.shape)) if a != axis]
    strides = [element_strides(x), element_strides(out)]
    lead: list[Axes]
    shape, lead = coalesce([x.shape[a] for a in kept], [[own[a] for a in kept] for own in strides])
    lines = prod(shape)
    head = [lines, len(shape), *padded(shape, 1), x.shape[axis]]
    head += [element_offset(x), element_offset(out), strides[0][axis], strides[1][axis]]
    head += padded_strides(lead)
    head += padded([element_offset(arg) for arg in operands if arg is not x and arg is not out], 0, 2)
    group = min(stream.target.tuning.row_group, 1 << (items - 1).bit_length())
    return stream.launch(program, kernel, (items, min(lines, GROUPS.value)), (group, 1), operands, [*head, *words])
