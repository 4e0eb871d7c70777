"""Sorting along an axis, and cumulative sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.reduction import accumulator
from opweave_opencl.kernels.table import FLOATS, KERNELS, PLAIN
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

RUN: Final = 64
"""Elements that are sorted by counting, each against all others."""

MOST: Final = 1 << 31
"""Elements of an axis whose positions fit into 32 bits."""


# --- sorting ---------------------------------------------------------------------------------------------------------


def _orders(step: Step) -> Arrays:
    """Two orders of 32-bit positions, where more than one pass is needed."""
    x = step.srcs[0]
    order = ("i32", (x.size,))
    return {"order": order, "merged": order} if x.shape[step.attrs["axis"]] > RUN else {}


def _why_not(step: Step) -> str | None:
    n = step.srcs[0].shape[step.attrs["axis"]]
    return f"an order of {n} elements needs positions of 64 bits" if n >= MOST else None


@KERNELS("argsort", dtypes=PLAIN, workspace=_orders, when=_why_not)
def argsort(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    axis: int,
    descending: bool,
    stable: bool,
    **orders: Arg,
) -> Call:
    """The order is always stable."""
    return _order(stream, out, x, axis, x.shape[axis], descending, **orders)


@KERNELS("top_k", dtypes=PLAIN, workspace=_orders, when=_why_not)
def top_k(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, k: int, axis: int, **orders: Arg) -> Call:
    return _order(stream, out, x, axis, k, True, **orders)


def _order(
    stream: OpenCLStream,
    out: Arg,
    x: Arg,
    axis: int,
    k: int,
    descending: bool,
    order: Arg | None = None,
    merged: Arg | None = None,
) -> Call:
    program = stream.target.programs.get("sorting", {"T": x.dtype.name, "OUT": out.dtype.name})
    n, down = x.shape[axis], int(descending)
    # A work-item of a processor does much: finding where its chunk begins costs as much as some elements.
    chunk = 8 if stream.target.tuning.row_group > 1 else 512

    def few(items: int) -> int:
        return items if chunk == 8 else -(-items // chunk)

    if order is None or merged is None:
        return _launch(stream, program, "order", (x, out), x, out, axis, few(n), k=k, descending=down)
    calls = [_launch(stream, program, "rank", (x, order), x, out, axis, few(n), run=RUN, descending=down)]
    run = RUN
    while run < n:
        length = min(chunk, 2 * run)
        merge = _launch(
            stream, program, "merge", (x, order, merged), x, out, axis, -(-n // length), run=run, chunk=length,
            descending=down,
        )  # fmt: skip
        calls.append(merge)
        order, merged = merged, order
        run *= 2
    calls.append(_launch(stream, program, "pick", (order, out), x, out, axis, few(k), k=k))
    return in_order(calls)


# --- cumulative sums ------------------------------------------------------------------------------------------------

PARTS: Final = 128
"""The most parts of a line; each adds the sums of the parts before it to its own."""

LEAST: Final = 1024
"""Elements of a part."""


def _segment(n: int) -> int:
    return max(-(-n // PARTS), LEAST)


def _partial_sums(step: Step) -> Arrays:
    """The sum of each part of each line."""
    x = step.srcs[0]
    n: int = x.shape[step.attrs["axis"]]
    return {"partials": (accumulator(x.dtype), (x.size // n, -(-n // _segment(n))))}


@KERNELS("cumsum", dtypes=f"{FLOATS} i64", workspace=_partial_sums)
def cumsum(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axis: int, partials: Arg) -> Call:
    program = stream.target.programs.get("sorting", {"T": x.dtype.name, "ACC": partials.dtype.name})
    segment, segments = _segment(x.shape[axis]), partials.shape[1]
    launch = partial(_launch, stream, program, segment=segment, segments=segments)
    scan = launch("scan", (x, out, partials), x, out, axis, segments)
    if segments == 1:  # nothing comes before the first part
        return scan
    sums = launch("sums", (x, partials), x, out, axis, segments)
    return in_order([sums, scan])


# --- launching ------------------------------------------------------------------------------------------------------


def _launch(
    stream: OpenCLStream,
    program: cl.Program,
    kernel: str,
    operands: Sequence[Arg],
    x: Arg,
    out: Arg,
    axis: int,
    items: int,
    *,
    run: int = 1,
    chunk: int = 1,
    k: int = 1,
    segment: int = 1,
    segments: int = 1,
    descending: int = 0,
) -> Call:
    """The call of a kernel with ``items`` work-items for each line.

    Operands other than ``x`` and ``out`` are scratch memory.
    """
    kept = [a for a in range(len(x.shape)) if a != axis]
    strides = [element_strides(x), element_strides(out)]
    lead: list[Axes]
    shape, lead = coalesce([x.shape[a] for a in kept], [[own[a] for a in kept] for own in strides])
    lines = prod(shape)
    words = [lines, len(shape), *padded(shape, 1), x.shape[axis], run, chunk, k]
    words += [element_offset(x), element_offset(out), strides[0][axis], strides[1][axis]]
    for own in lead:
        words += padded(own, 0)
    scratch = [element_offset(arg) for arg in operands if arg is not x and arg is not out]
    words += [segment, segments, descending, *padded(scratch, 0, 2)]
    group = min(stream.target.tuning.row_group, 1 << (items - 1).bit_length())
    return stream.launch(program, kernel, (items, min(lines, 65535)), (group, 1), operands, words)
