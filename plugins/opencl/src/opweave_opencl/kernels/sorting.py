"""Sorting along an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.lines import launch_lines
from opweave_opencl.kernels.table import KERNELS, PLAIN
from opweave_opencl.tuning import limit, processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

RUN: Final = limit("counted_run", 64, 1, 1 << 10)
"""Elements that are sorted by counting, each against all others."""

KEPT: Final = processor_limit("kept_positions", 64, 1, 64, bounds=(1, 64))
"""Up to so many first positions, a work-item of a processor keeps the best elements so far in order while it passes
over a line (measured: eight of 4,096 in a 120th of the time of sorting the line, 40 of 128,000 in a 250th)."""

CHUNK: Final = processor_limit("merged_chunk", 512, 1, 1 << 14)
"""Elements that a work-item of a processor merges: finding where its chunk begins costs as much as some elements."""

MOST: Final = 1 << 31
"""Elements of an axis whose positions fit into 32 bits."""


def _orders(step: Step) -> Arrays:
    """Two orders of 32-bit positions, where more than one pass is needed."""
    x = step.srcs[0]
    order = ("i32", (x.size,))
    return {"order": order, "merged": order} if x.shape[step.attrs["axis"]] > RUN.value else {}


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
    macros = {"T": x.dtype.name, "OUT": out.dtype.name, "KEPT": str(KEPT.largest)}
    n = x.shape[axis]
    alone = stream.target.tuning.row_group == 1
    chunk = CHUNK.value if alone else 8

    def launch(kernel: str, operands: tuple[Arg, ...], items: int, run: int = 1, length: int = 1) -> Call:
        program = stream.target.programs.get("sorting", {kernel.upper(): "1", **macros})
        words = (run, length, k, int(descending))
        return launch_lines(stream, program, kernel, operands, x, out, axis, items, words)

    def few(items: int) -> int:
        return -(-items // chunk) if alone else items

    if alone and k <= KEPT.value:
        return launch("keep", (x, out), 1)
    if order is None or merged is None:
        return launch("order", (x, out), few(n))
    run = RUN.value
    calls = [launch("rank", (x, order), few(n), run)]
    while run < n:
        length = min(chunk, 2 * run)
        pairs, items = -(-n // (2 * run)), -(-2 * run // length)
        calls.append(launch("merge", (x, order, merged), pairs * items, run, length))
        order, merged = merged, order
        run *= 2
    calls.append(launch("pick", (order, out), few(k)))
    return in_order(calls)
