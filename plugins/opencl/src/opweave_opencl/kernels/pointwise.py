"""An expression over every element: what elementwise operations, activations, casts and copies have in common."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["pointwise", "spread"]


def pointwise(
    stream: OpenCLStream,
    expression: str,
    out: Arg,
    srcs: Sequence[Arg],
    *,
    types: tuple[str, str] = ("float", "float"),
    alpha: float = 0.0,
    beta: float = 0.0,
) -> Call:
    """The call for ``out[...] = expression`` of one or two sources of the output's shape, whatever the strides.

    Args:
        expression: OpenCL C over ``x``, ``y``, ``alpha`` and ``beta``, right for scalars and vectors; ``T`` is the
            type of ``x`` and ``y``, ``TO`` converts to the output's.
        types: OpenCL's names for the types of the output and of the sources.
    """
    operands = (out, *srcs)
    shape, strides = coalesce(out.shape, [element_strides(arg) for arg in operands])
    loads = [_LOADS.get(own[0], "STEP") for own in strides]
    wide = loads[0] == "EACH" and "STEP" not in loads and shape[0] > 1
    tuning = stream.target.tuning
    vector = tuning.vector if wide else 1
    macros = {
        "OUT": types[0],
        "IN": types[1],
        "VEC": str(vector),
        "SOURCES": str(len(srcs)),
        "A_LOAD": loads[1],
        "B_LOAD": loads[-1],
        "F(T, TO, x, y)": expression,
    }
    words = [len(shape), *padded(shape, 1), *map(element_offset, operands)]
    for own in strides:
        words += padded(own, 0)
    size, group = spread((-(-shape[0] // vector), prod(shape[1:2]), prod(shape[2:])), tuning.group)
    program = stream.target.programs.get("pointwise", macros)
    return stream.launch(program, "pointwise", size, group, operands, words, (alpha, beta))


_LOADS = {0: "SAME", 1: "EACH"}


def spread(size: tuple[int, int, int], limit: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """A range of work-items with a group for it: along the first axis, then the second, never much more than needed.

    Group lengths are powers of eight, so that drivers which compile for each group size do so rarely.
    """
    first = _power_of_eight(size[0], limit)
    second = _power_of_eight(size[1], limit // first)
    return size, (first, second, 1)


def _power_of_eight(n: int, limit: int) -> int:
    length = 1
    while length * 8 <= min(n, limit):
        length *= 8
    return length
