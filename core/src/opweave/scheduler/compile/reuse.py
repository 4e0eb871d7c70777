"""What is used again of a program that was built before: operands and calls, by a new one.

A decoder with a growing cache builds a graph for each token of which most steps are those of the token before, on
operands of the same sizes in the same memory. What was made of such steps when the earlier program was lowered, views
of memory and bound kernels, is taken over: the build takes 0.8 of the time on ``cpu``, 0.7 on ``opencl`` and
``torch:cpu`` (6 layers, AMD Zen 4). Everything else is planned
anew, so that devices, bytes and results are those of a build that takes nothing over. (Memory that
the scheduler has already is filled first; as it does not move, a later program may take more of it than the first one.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING

from opweave.runtime.stream import Stream
from opweave.runtime.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.scheduler.compile.run_list import Bindings, RunList
    from opweave.scheduler.plan.fuse import Groups
    from opweave.scheduler.plan.splits import Partition, Split

__all__ = ["EarlierProgram", "EarlierSlot"]


@dataclass(frozen=True, slots=True, eq=False)
class EarlierProgram:
    """What a program that was built before holds for later ones, whose graphs may differ from its graph in sizes."""

    partition: Partition
    groups: Groups
    lists: Sequence[RunList]

    def is_like(self, partition: Partition) -> bool:
        """Whether storages and steps of both have the same numbers on the same targets."""
        old, new = [[(s.target, len(s.steps)) for s in parts.splits] for parts in (self.partition, partition)]
        return self.partition.arena_of == partition.arena_of and old == new

    def leaves_of(self, partition: Partition) -> Set[int]:
        """The storages of leaves that both have, by the same storage ids and read in the same memory: as long as a
        program is current, its leaves have not moved."""
        old = self.partition
        if (old.unpacked, old.repacked, old.placed) != (partition.unpacked, partition.repacked, partition.placed):
            return frozenset()
        if old.owners is partition.owners:
            return old.owners.keys()
        return {storage for storage, owner in partition.owners.items() if old.owners.get(storage) == owner}

    def at(self, slot: int, bindings: Bindings) -> EarlierSlot | None:
        """What a slot of it holds; ``None`` if it has no such slot, or was closed."""
        before = self.lists[slot].bindings if slot < len(self.lists) else None
        if before is None:
            return None
        actions = self.lists[slot].actions.actions
        plans = {a.split.index: a.plan.calls for a in actions if a.plan is not None and a.split is not None}
        return EarlierSlot(self, before, bindings, plans)


@dataclass(eq=False)
class EarlierSlot:
    """What one slot of an earlier program holds.

    Attributes:
        bindings: its memory.
        now: that of the new program in that slot.
        plans: index of a split -> the calls of its plan.
    """

    earlier: EarlierProgram
    bindings: Bindings
    now: Bindings
    plans: Mapping[int, Sequence[Call] | None]

    @cached_property
    def same(self) -> Sequence[bool]:
        """By storage id, whether it lies where it lay."""
        before, now = self.bindings, self.now
        same = list(map(is_, before.buffers, now.buffers))
        for storage, (old, new) in enumerate(zip(before.offsets, now.offsets, strict=True)):
            if old != new or before.handles.get(storage) is not now.handles.get(storage):
                same[storage] = False
        return same

    def calls(self, split: Split, groups: Groups) -> list[Call | None] | None:
        """For every group of a split the call of the earlier program, where its operands, its kernel and its scratch
        memory are the same; ``None``: no call can be used again."""
        k, scratch, workspaces = split.index, self.bindings.workspaces, self.now.workspaces
        calls, stream = self.plans.get(k), split.target.stream
        made_by = stream.inner if isinstance(stream, WorkerStream) else stream
        plain = type(made_by)._compile is Stream._compile
        before, fused = self.earlier.partition.splits[k].steps, groups.of_split[k]
        fused_before = self.earlier.groups.of_split[k]
        if calls is None or not stream.shares_calls or not len(calls) == len(fused_before) == len(fused):
            return None
        if not any(old.support is new.support for old, new in zip(before, split.steps, strict=True)):
            return None  # all sizes have changed
        same = self.same
        same_step = [
            old.support is new.support and same[new.out.storage] and old.out == new.out and old.srcs == new.srcs
            and all(same[source.storage] for source in new.srcs)
            for old, new in zip(before, split.steps, strict=True)
        ]  # fmt: skip
        equal = [
            old == new and all(same_step[i] for i in new.indices) for old, new in zip(fused_before, fused, strict=True)
        ]
        if not plain:
            equal[-1] = False
        return [
            call if equal[g] and ((k, g) not in workspaces or scratch.get((k, g)) == workspaces[k, g]) else None
            for g, call in enumerate(calls)
        ]
