"""`fuse`: asks the stream of each split which of its steps run as one call. `Partition` to `Groups`.

Steps are fused before memory is planned: a value that is used only inside of one group gets none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from opweave.contract.step import Arg, Step
from opweave.contract.stream import Stream
from opweave.graph.graph import location_of, overlapping_leaves

if TYPE_CHECKING:
    from opweave.scheduler.splits import Partition, PlannedStep, Split, StorageView

__all__ = ["FusedGroup", "Groups", "bound_step", "fuse", "unfused"]


class FusedGroup(NamedTuple):
    """Steps that run as one: their indices in the split, in the order in which they run, and bytes of workspace."""

    items: tuple[int, ...]
    workspace: int


class Groups(NamedTuple):
    """How the steps of a partition are grouped.

    Attributes:
        of_split: for every split its groups, ``None``: each step is a group of its own.
        internal: storage ids of values that live only inside of one group. They get no memory.
    """

    of_split: Sequence[Sequence[FusedGroup] | None]
    internal: Set[int]

    def items(self, split: Split) -> list[tuple[int, ...]]:
        """The item indices of every group of a split."""
        groups = self.of_split[split.index]
        return [(i,) for i in range(len(split.items))] if groups is None else [group.items for group in groups]


def unfused(partition: Partition) -> Groups:
    """Each step as a group of its own."""
    return Groups([None] * len(partition.splits), frozenset())


def fuse(partition: Partition) -> Groups:
    """Ask the stream of every split for its groups.

    Raises:
        Broken: a stream lost, repeated or invented a step, or put one before what it depends on.
    """
    if all(_fuses_nothing(split) for split in partition.splits):
        return unfused(partition)
    last_reader, same = _last_readers(partition), _same_memory(partition)
    grouped = [
        None if _fuses_nothing(split) else _groups(split, partition, last_reader, same) for split in partition.splits
    ]
    return Groups(grouped, _internal(partition, grouped))


def bound_step(item: PlannedStep, out: Arg, srcs: tuple[Arg, ...], *, live: bool = True) -> Step:
    """The step of an item with its operands."""
    node = item.node
    if node is None:
        return Step(item.op, out, srcs, {}, live, "pack")
    return Step(item.op, out, srcs, node.attrs, live, node.name, item.support.allowed)


def _fuses_nothing(split: Split) -> bool:
    return type(split.target.stream)._fuse is Stream._fuse and not split.target.stream.is_functional


def _groups(
    split: Split, partition: Partition, last_reader: dict[int, int], same: Mapping[int, tuple[int, int]]
) -> list[FusedGroup]:
    steps = []
    for item in split.items:
        out = item.out.storage
        live = last_reader.get(out, -1) > split.index or partition.arenas[out] < 0
        srcs = tuple([_source(source, partition, same) for source in item.srcs])
        steps.append(bound_step(item, _unbound(item.out, same), srcs, live=live))
    index_of = {id(step): i for i, step in enumerate(steps)}
    return [
        FusedGroup(tuple([index_of[id(step)] for step in group.steps]), group.workspace)
        for group in split.target.stream.fuse(steps)
    ]


def _same_memory(partition: Partition) -> dict[int, tuple[int, int]]:
    """Storage id of a leaf that lies over the bytes of others -> the id that stands for all of them, and its place
    there: what writes one of them must not be fused with what reads the same bytes at other positions."""
    storage_of = {tensor: storage for storage, (tensor, _) in partition.owners.items()}
    same = {}
    for leaf, group in overlapping_leaves(partition.graph.leaves).items():
        first = next((other for other in group if other in storage_of), leaf)
        here, start = location_of(leaf), location_of(first)
        if leaf in storage_of and here is not None and start is not None:
            same[storage_of[leaf]] = storage_of[first], here[1] - start[1]
    return same


def _unbound(operand: StorageView, same: Mapping[int, tuple[int, int]]) -> Arg:
    storage, shift = same.get(operand.storage, (operand.storage, 0))
    return Arg(None, operand.offset + shift, operand.dtype, operand.shape, operand.strides, None, storage)


def _source(operand: StorageView, partition: Partition, same: Mapping[int, tuple[int, int]]) -> Arg:
    """An operand before memory is planned, with the kind of memory that it is read in where that is special."""
    arg = _unbound(operand, same)
    prepared = partition.assignment.capabilities.prepared
    if operand.storage in partition.repacked:
        arg._type = partition.repacked[operand.storage]
    elif prepared and operand.storage in partition.owners and operand.storage not in partition.unpacked:
        arg._type = prepared.get(partition.owners[operand.storage][0])
    return arg


def _last_readers(partition: Partition) -> dict[int, int]:
    """Storage id -> index of the last split that reads it; one past the last split for outputs."""
    last: dict[int, int] = {}
    for split in partition.splits:
        for copy in split.copies:
            last.update(dict.fromkeys(copy.reads, split.index))
        for item in split.items:
            for source in item.srcs:
                last[source.storage] = split.index
        for copy in split.write_backs:
            last[copy.src.storage] = split.index + 1
        if split.observed is not None:
            last[split.observed[1].storage] = split.index + 1
    end = len(partition.splits)
    return last | {output.storage: end for output in partition.outputs if output is not None}


def _internal(partition: Partition, grouped: Sequence[Sequence[FusedGroup] | None]) -> set[int]:
    """Storage ids that only the group which makes them reads."""
    readers: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    makers: dict[int, tuple[int, int]] = {}
    for split, groups in zip(partition.splits, grouped, strict=True):
        alone = [FusedGroup((i,), 0) for i in range(len(split.items))] if groups is None else groups
        for g, (indices, _) in enumerate(alone):
            for index in indices:
                item = split.items[index]
                if len(indices) > 1 and partition.arenas[item.out.storage] >= 0:
                    makers[item.out.storage] = (split.index, g)
                for source in item.srcs:
                    readers[source.storage].add((split.index, g))
    outside = {storage for copy in partition.copies for storage in copy.reads}
    outside |= {split.observed[1].storage for split in partition.splits if split.observed is not None}
    outside |= {output.storage for output in partition.outputs if output is not None}
    return {s for s, group in makers.items() if s not in outside and readers[s] == {group}}
