"""Fusing: chains of pointwise steps become one generated kernel each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Group, Step, pointwise_groups
from opweave_opencl.kernels.pointwise import FORMULAS, window
from opweave_opencl.tuning import limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["fuse"]

WORDS: Final = limit("fused_words", 128, 1, 128, bounds=(1, 128))
"""Words of eight bytes of the parameters of a kernel, of which every device takes 128: 12 for the walk, ten for each
operand (with its address), and one for each number."""


def fuse(stream: OpenCLStream, steps: Sequence[Step]) -> list[Group]:
    """The steps with chains of pointwise ones as groups; the others with the workspace of their kernels."""
    doubles = stream.target.has_f64

    def fits(step: Step) -> bool:
        return step.op in FORMULAS and all(
            arg.dtype.block == 1 and (doubles or arg.dtype.name != "f64") for arg in (step.out, *step.srcs)
        )

    readers: dict[Hashable, int] = {}
    for step in steps:
        for src in step.srcs:
            readers[_value(src)] = readers.get(_value(src), 0) + 1
    groups: list[Group] = []
    for run in pointwise_groups(steps, fits):
        while len(run) > 1:
            count = _most(run, readers)
            groups.append(Group(tuple(run[:count])))
            run = run[count:]
        groups += [Group((step,), stream.device._workspace(step)) for step in run]
    return groups


def _value(arg: Arg) -> Hashable:
    return arg.value if arg.buffer is None else id(arg.buffer)


def _most(run: Sequence[Step], readers: dict[Hashable, int]) -> int:
    """How many steps of a run one kernel can take: at least one."""
    best = 1
    for count in range(2, len(run) + 1):
        steps = run[:count]
        numbers = sum(len(FORMULAS[step.op].numbers) for step in steps)
        if 12 + 10 * _operands(steps, readers) + numbers <= WORDS.value:
            best = count
    return best


def _operands(steps: Sequence[Step], readers: dict[Hashable, int]) -> int:
    """The operands of a kernel for these steps: what it reads, and what others need of its results."""
    made: set[Hashable] = set()
    read: set[Hashable] = set()
    inside: dict[Hashable, int] = {}
    for step in steps:
        for src in step.srcs:
            inside[_value(src)] = inside.get(_value(src), 0) + 1
            if window(src) not in made:
                read.add(window(src))
        made.add(window(step.out))
    kept = [s for s in steps if s.live or inside.get(_value(s.out), 0) < readers.get(_value(s.out), 0)]
    return len(read) + len(kept)
