"""Fusing: groups of elementwise steps that one kernel can compute, and the check of what ``_fuse`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opweave.contract.step import Group
from opweave.errors import Broken
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Step

__all__ = ["check_fusion", "pointwise_groups"]


def pointwise_groups(
    steps: Sequence[Step], is_pointwise: Callable[[Step], bool] | None = None, limit: int = 16
) -> list[list[Step]]:
    """Divide steps into runs of consecutive steps that one elementwise kernel can compute. For a stream's ``_fuse``.

    A step is added to the current run if both are pointwise over the same output shape, and if memory that both use is
    accessed at the same position for each element. (``y + y.T`` cannot be in one run with the step that computes
    ``y``.) Every other step is a run of its own.

    Args:
        steps: unbound steps in order.
        is_pointwise: whether the author's fused kernel supports a step. Default: ``OpDef.pointwise``.
        limit: the largest number of steps in a run.
    """
    supports = is_pointwise or _is_pointwise
    runs: list[list[Step]] = []
    run: list[Step] = []  # the last one, while it is open; else empty
    accesses: _Accesses | None = None  # of that run, if it has several steps
    for step in steps:
        fits = supports(step)
        if fits and run and len(run) < limit and run[0].out.shape == step.out.shape:
            accesses = accesses or _Accesses(run[0])
            if accesses.add(step):
                run.append(step)
                continue
        runs.append([step])
        run, accesses = runs[-1] if fits else [], None
    return runs


def _is_pointwise(step: Step) -> bool:
    op = OPS.get(step.op)
    return op is not None and op.pointwise


class _Accesses:
    """What the steps of a run read and write, by memory, so that a step is compared only with those that share some."""

    def __init__(self, first: Step) -> None:
        self._reads: dict[int | tuple[int], list[Arg]] = {}
        self._writes: dict[int | tuple[int], list[Arg]] = {}
        self.add(first)

    def add(self, step: Step) -> bool:
        """Whether one elementwise kernel can compute the run and then ``step``, which has its shape. If so, its
        accesses are among them from now on."""
        reads, writes, out = self._reads, self._writes, step.out
        memory = _memory_key(out)
        sources = [(_memory_key(arg), arg) for arg in step.srcs]
        for key, arg in ((memory, out), *sources):
            for written in writes.get(key, ()):
                if _crosses(arg, written):
                    return False
        for read in reads.get(memory, ()):
            if _crosses(read, out):
                return False
        for key, arg in sources:
            reads.setdefault(key, []).append(arg)
        writes.setdefault(memory, []).append(out)
        return True


def _memory_key(arg: Arg) -> int | tuple[int]:
    """A key for the memory of an operand: the number of its value while it is unbound, else its buffer."""
    return arg.value if arg.buffer is None else (id(arg.buffer),)


def _crosses(a: Arg, b: Arg) -> bool:
    """Whether two operands in one memory share bytes other than element by element."""
    if a is b or (a.offset == b.offset and a.shape == b.shape and a.strides == b.strides and a.dtype is b.dtype):
        return False
    return a.offset < b.offset + b.span and b.offset < a.offset + a.span


def check_fusion(what: str, steps: Sequence[Step], groups: Sequence[Group]) -> None:
    """Check that ``groups`` contain every step once, and that each access to a value sees the same writes as before.

    Args:
        what: whose ``_fuse`` returned them, for messages.

    Raises:
        Broken: something is no `Group`; a step is missing, repeated or invented, or was moved across a step that it
            depends on.
    """
    wrong = next((type(group).__name__ for group in groups if not isinstance(group, Group)), None)
    if wrong is not None:
        raise Broken(f"{what} must return groups of steps, opweave.contract.Group, not {wrong}")
    index_of = {id(step): i for i, step in enumerate(steps)}
    order = [index_of.get(id(step), -1) for group in groups for step in group.steps]
    in_order = list(range(len(steps)))
    if order == in_order:
        return
    if sorted(order) != in_order:
        raise Broken(f"{what} must return each of the {len(steps)} steps it was given once, not {len(order)}")
    before, after = _writes_before(steps), _writes_before([steps[i] for i in order])
    for position, i in enumerate(order):
        if before[i] != after[position]:
            raise Broken(f"{what} put {steps[i].op} {steps[i].label!r} on the wrong side of a step that it depends on")


def _writes_before(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """For each operand of each step, how many earlier steps write its memory."""
    writes: dict[int | tuple[int], int] = {}
    counts = []
    for step in steps:
        counts.append(tuple([writes.get(_memory_key(arg), 0) for arg in (step.out, *step.srcs)]))
        key = _memory_key(step.out)
        writes[key] = writes.get(key, 0) + 1
    return counts
