"""Fusing: runs of steps that one kernel can compute, and the check of what an author's ``_fuse`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from opweave.errors import Broken
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.contract.execution import Stream
    from opweave.contract.step import Arg, Group, Step

__all__ = ["check_fusion", "pointwise_groups"]


def pointwise_groups(
    steps: Sequence[Step], is_pointwise: Callable[[Step], bool] | None = None, limit: int = 16
) -> list[list[Step]]:
    """Cut steps into runs that can become one kernel each, which computes all of them element by element.

    A step joins the run before it if both are pointwise over one output shape, and if what it shares with the run is
    read and written at the same place for every element. (``y + y.T`` cannot join the step that makes ``y``.) Other
    steps stand alone. For a stream's ``_fuse``.

    Args:
        is_pointwise: whether the author's fused kernel can take part in a step. Default: the operation's definition.
        limit: the most steps of a run.
    """
    takes = is_pointwise or _is_pointwise
    runs: list[list[Step]] = []
    open_run = False
    for step in steps:
        fits = takes(step)
        if fits and open_run and len(runs[-1]) < limit and _joins(step, runs[-1]):
            runs[-1].append(step)
        else:
            runs.append([step])
        open_run = fits
    return runs


def _is_pointwise(step: Step) -> bool:
    op = OPS.get(step.op)
    return op is not None and op.pointwise


def _joins(step: Step, run: Sequence[Step]) -> bool:
    if step.out.shape != run[0].out.shape:
        return False
    for other in run:
        if any(_crosses(arg, other.out) for arg in (step.out, *step.srcs)):
            return False
        if any(_crosses(arg, step.out) for arg in other.srcs):
            return False
    return True


def _memory_key(arg: Arg) -> tuple[str, int]:
    return ("value", arg.value) if arg.buffer is None else ("buffer", id(arg.buffer))


def _crosses(a: Arg, b: Arg) -> bool:
    """Whether two operands share bytes other than element by element."""
    if _memory_key(a) != _memory_key(b):
        return False
    if a.offset == b.offset and a.shape == b.shape and a.strides == b.strides and a.dtype is b.dtype:
        return False
    return a.offset < b.offset + b.span and b.offset < a.offset + a.span


def check_fusion(stream: Stream, steps: Sequence[Step], groups: Sequence[Group]) -> None:
    """Every step once, in an order in which each access to a value has as many writes before it as it had.

    Raises:
        Broken: it is not so.
    """
    index_of = {id(step): i for i, step in enumerate(steps)}
    order = [index_of.get(id(step), -1) for group in groups for step in group.steps]
    what = f"{type(stream).__name__}._fuse of {stream.device.name}"
    if sorted(order) != list(range(len(steps))):
        raise Broken(f"{what} must return each of the {len(steps)} steps it was given once, not {len(order)}")
    if all(a < b for a, b in pairwise(order)):
        return
    before, after = _writes_before(steps), _writes_before([steps[i] for i in order])
    for position, i in enumerate(order):
        if before[i] != after[position]:
            raise Broken(f"{what} put {steps[i].op} {steps[i].label!r} on the wrong side of a step that it depends on")


def _writes_before(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """For each operand of each step how often its memory was written before."""
    writes: dict[tuple[str, int], int] = {}
    counts = []
    for step in steps:
        counts.append(tuple([writes.get(_memory_key(arg), 0) for arg in (step.out, *step.srcs)]))
        key = _memory_key(step.out)
        writes[key] = writes.get(key, 0) + 1
    return counts
