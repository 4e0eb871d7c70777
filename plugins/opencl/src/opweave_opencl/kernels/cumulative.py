"""Cumulative sums along an axis."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.lines import launch_lines
from opweave_opencl.kernels.reduction import accumulator
from opweave_opencl.kernels.table import FLOATS, KERNELS
from opweave_opencl.tuning import limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

PARTS: Final = limit("cumulative_parts", 128, 1, 1 << 10)
"""The most parts of a line; each adds the sums of the parts before it to its own."""

LEAST: Final = limit("cumulative_part", 1024, 1, 1 << 16)
"""The fewest elements of a part."""


def _segment(n: int) -> int:
    return max(-(-n // PARTS.value), min(LEAST.value, n), 1)


def _partial_sums(step: Step) -> Arrays:
    """The sum of each part of each line."""
    x = step.srcs[0]
    n: int = x.shape[step.attrs["axis"]]
    return {"partials": (accumulator(x.dtype), (x.size // n, -(-n // _segment(n))))}


@KERNELS("cumsum", dtypes=f"{FLOATS} i64", workspace=_partial_sums)
def cumsum(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axis: int, partials: Arg) -> Call:
    program = stream.target.programs.get("cumulative", {"T": x.dtype.name, "ACC": partials.dtype.name})
    segment, segments = _segment(x.shape[axis]), partials.shape[1]
    launch = partial(launch_lines, stream, program, x=x, out=out, axis=axis, items=segments, words=(segment, segments))
    scan = launch("scan", (x, out, partials))
    if segments == 1:  # nothing comes before the first part
        return scan
    return in_order([launch("sums", (x, partials)), scan])
