"""`allocate`: where every value lies and when, in as few bytes as possible. `Groups` to `MemoryPlan`.

A plan takes no memory: it says how large the chunks of each device's arena have to be, and where in them values lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from opweave.graph.layout import round_up
from opweave.scheduler.place.prediction import MemoryUse
from opweave.scheduler.plan.chunks import Block, ChunkPlan, plan_chunks
from opweave.scheduler.plan.splits import Partition, SplitStep

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.plan.fuse import FusedGroup, Groups
    from opweave.scheduler.plan.splits import Copy, Split

__all__ = ["END", "Lifetimes", "MemoryPlan", "Scratch", "allocate", "memory_use"]

END: Final = 1 << 60
"""A moment after the last one, until which the memory of outputs is in use."""


class Scratch(NamedTuple):
    """The workspace of a group: the target, and where it lies in the chunks of the target's arena."""

    target: int
    chunk: int
    offset: int
    size: int


class MemoryPlan(NamedTuple):
    """Where everything lies.

    Attributes:
        arenas: for every target the sizes of the chunks that its arena must have; ``None``: the program uses no memory
            of the arena.
        chunks, offsets: for every storage id the chunk of its target's arena (-1: it lies in none) and where in it.
        slots: for every slot the storage ids that lie elsewhere in it: what more than one queue touches, so that runs
            that overlap do not meet there. With one slot: none.
        workspaces: (index of the split, index of the group) -> its scratch memory, the same in every slot.
        nbytes: target index -> bytes of temporaries.
    """

    arenas: list[ChunkPlan | None]
    chunks: list[int]
    offsets: list[int]
    slots: list[dict[int, tuple[int, int]]]
    workspaces: dict[tuple[int, int], Scratch]
    nbytes: dict[int, int]


def memory_use(partition: Partition, temporaries: Mapping[int, int]) -> dict[str, MemoryUse]:
    """Bytes by device of a partition: its leaves, and ``temporaries``, the planned bytes by index of the target."""
    columns = {target.name: [temporaries.get(target.index, 0), 0, 0] for target in partition.assignment.targets}
    for storage, (tensor, _) in partition.owners.items():
        holder = partition.holder(storage) if tensor.leaf is not None else None
        if tensor.leaf is not None and holder is not None:
            columns[holder.name][2 if tensor.leaf.kind == "state" else 1] += partition.sizes[storage]
    return {name: MemoryUse(*column) for name, column in columns.items()}


def allocate(
    partition: Partition,
    groups: Groups,
    capacities: Sequence[Sequence[int]],
    n_slots: int = 1,
    *,
    tight: bool = False,
) -> MemoryPlan:
    """Plan the memory of all temporaries.

    Args:
        capacities: for every target the sizes of the chunks that its arena has already.
        n_slots: how many runs may be under way at once.
        tight: as in `plan_chunks`.
    """
    targets = partition.assignment.targets
    n = len(partition.sizes)
    live = Lifetimes(partition, groups)
    members, last = _members(partition, groups, live)
    shared = {live.alias[storage] for storage in _shared(partition)} if n_slots > 1 else set()
    wanted = _workspaces(partition, groups, live.times)
    result = MemoryPlan([], [-1] * n, [0] * n, [{} for _ in range(n_slots)], {}, {})
    sizes, births, chunk_of, offset_of = partition.sizes, live.birth, result.chunks, result.offsets
    new = tuple.__new__  # takes half the time of calling the class
    for target, storages in zip(targets, members, strict=True):
        scratch = wanted.get(target.index, [])
        if not storages and not scratch:
            result.arenas.append(None)
            continue
        # What several queues touch shares its memory with nothing, in every slot.
        apart = [s for s in storages if s in shared] if shared else []
        storages = [s for s in storages if s not in shared] if shared else storages
        blocks = [new(Block, (sizes[s], births[s], last[s])) for s in storages]
        blocks += [Block(sizes[s], 0, END) for s in apart] * n_slots
        blocks += [new(Block, (size, moment, moment)) for _, size, moment in scratch]
        kind = target.buffer_type
        plan = plan_chunks(blocks, kind.alignment, capacities[target.index], kind.max_size, tight=tight)
        result.arenas.append(plan)
        fresh = not capacities[target.index]
        result.nbytes[target.index] = plan.nbytes if fresh else _bytes_up_to_last(blocks, plan, kind.alignment)
        for storage, chunk, offset in zip(storages, plan.chunks, plan.offsets, strict=False):
            chunk_of[storage] = chunk
            offset_of[storage] = offset
        where = iter(zip(plan.chunks[len(storages) :], plan.offsets[len(storages) :], strict=True))
        for slot in result.slots:
            slot.update(zip(apart, where, strict=False))
        for (key, size, _), (chunk, offset) in zip(scratch, where, strict=True):
            result.workspaces[key] = new(Scratch, (target.index, chunk, offset, size))
    for storage, owner in enumerate(live.alias):
        if owner != storage:
            chunk_of[storage], offset_of[storage] = chunk_of[owner], offset_of[owner]
            for slot in result.slots:
                if owner in slot:
                    slot[storage] = slot[owner]
    return result


def _members(partition: Partition, groups: Groups, live: Lifetimes) -> tuple[list[list[int]], list[int]]:
    """For every target the storage ids that need memory of its arena, and when each of them is in use last."""
    birth, death, alias = live.birth, live.death, live.alias
    arena_of, internal = partition.arena_of, groups.internal
    last = list(death)
    members: list[list[int]] = [[] for _ in partition.assignment.targets]
    for storage, owner in enumerate(alias):
        if owner != storage:
            # The owner's memory is in use until the last value that took it over ends.
            last[owner] = max(last[owner], death[storage])
        elif arena_of[storage] >= 0 and birth[storage] >= 0 and storage not in internal:
            members[arena_of[storage]].append(storage)
    return members, last


def _shared(partition: Partition) -> set[int]:
    """Inputs, and temporaries that more than one target touches."""
    arena_of = partition.arena_of
    shared = set(partition.inputs.values())
    for split in partition.splits:
        target = split.target.index
        for copy in (*split.copies, *split.write_backs):
            touched = (*copy.sources, *copy.writes) if copy.ids is None else copy.sources
            shared.update(o.storage for o in touched if arena_of[o.storage] >= 0 and arena_of[o.storage] != target)
        for item in split.steps:
            shared.update(o.storage for o in (item.out, *item.srcs) if arena_of[o.storage] not in (-1, target))
    return shared


def _workspaces(
    partition: Partition, groups: Groups, times: Sequence[int]
) -> dict[int, list[tuple[tuple[int, int], int, int]]]:
    """Target index -> ((split, group), bytes, moment) of every workspace."""
    wanted: dict[int, list[tuple[tuple[int, int], int, int]]] = {}
    for split, grouped, start in zip(partition.splits, groups.of_split, times, strict=True):
        sizes = [group.workspace for group in grouped]
        if any(sizes):
            wanted.setdefault(split.target.index, []).extend(
                [((split.index, g), size, start + 1 + g) for g, size in enumerate(sizes) if size]
            )
    return wanted


def _bytes_up_to_last(blocks: Sequence[Block], plan: ChunkPlan, alignment: int) -> int:
    """Bytes of the chunks up to the end of the last block in each: what this program needs of the arena."""
    ends: dict[int, int] = {}
    for (size, _, _), chunk, offset in zip(blocks, plan.chunks, plan.offsets, strict=True):
        end = offset + size
        if end > ends.get(chunk, 0):
            ends[chunk] = end
    return sum([round_up(end, alignment) for end in ends.values()])


class Lifetimes:
    """When each value is made and read last, and which values lie over a source.

    Moments are counted from the first split on: one for the start of each split, one for each group, one for its end.
    The first mention of a storage id is its writer: sources are written before they are read. Where a target fetches
    the weights of a split while the one before it runs, both splits need their memory.

    Attributes:
        birth, death: by storage id the moments of its first and its last use, -1: it is never used.
        alias: by storage id the one whose memory it takes over, itself if none.
        times: the moment of each split's start, after which those of its groups follow.
    """

    def __init__(self, partition: Partition, groups: Groups) -> None:
        self.birth: Final = [-1] * len(partition.sizes)
        self.death: Final = [-1] * len(partition.sizes)
        self.alias: Final = list(range(len(partition.sizes)))
        self.times: Final[list[int]] = []
        self._partition: Final = partition
        self._moment = 0
        self._inplace: Final[list[tuple[int, SplitStep]]] = []  # steps that may write over a source, with their moments
        self._started: Final[dict[int, int]] = {}  # target -> when its last split started
        self._summed: Tensor | None = None  # whose partial sums were added last
        self._added: Final[set[int]] = set()  # the storages of those
        fed = set(partition.inputs.values())
        for storage in fed:
            self.birth[storage] = self.death[storage] = 0
        for split in partition.splits:
            self._start(split)
            self._run(split, groups.of_split[split.index])
            self._end(split)
        for output in partition.outputs:
            if output is not None:
                self.death[output.storage] = END
        for moment, item in self._inplace:
            taken = self._taken_over(item, moment, fed)
            if taken >= 0:
                self.alias[item.out.storage] = self.alias[taken]

    def _start(self, split: Split) -> None:
        """The copies before a split, all in one moment."""
        self._moment += 1
        self.times.append(self._moment)
        for copy in split.copies:
            self._copy(copy, split)
        self._started[split.target.index] = self._moment

    def _copy(self, copy: Copy, split: Split) -> None:
        moment, birth, death = self._moment, self.birth, self.death
        for view in copy.sources:
            death[view.storage] = moment
        for view in copy.writes:
            dst = view.storage
            if birth[dst] < 0:
                early = copy.cause == "weight-fetch" and split.target.fetches_ahead
                birth[dst] = self._started.get(split.target.index, moment) if early else moment
            death[dst] = moment
        if copy.terms:
            if copy.tensor is not self._summed:
                # Writing over parts right after the sum would make their device wait until the others have read
                # them; at the next sum it knows that they have.
                for read in self._added:
                    death[read] = max(death[read], moment)
                self._summed = copy.tensor
                self._added.clear()
            self._added.update([view.storage for view in (copy.src, *copy.terms)])

    def _run(self, split: Split, groups: Sequence[FusedGroup]) -> None:
        """The groups of a split, each in one moment."""
        moment, birth, death, planned = self._moment, self.birth, self.death, split.steps
        for indices, _, _ in groups:
            moment += 1
            for index in indices:
                item = planned[index]
                out = item.out.storage
                if birth[out] < 0:
                    birth[out] = moment
                death[out] = moment
                for source in item.srcs:
                    death[source.storage] = moment
            if len(indices) == 1 and item.support.inplace:
                self._inplace.append((moment, item))
        self._moment = moment

    def _end(self, split: Split) -> None:
        """What is read of a split's results when its steps are done."""
        self._moment += 1
        for copy in split.write_backs:
            self.death[copy.src.storage] = self._moment
        if split.observed is not None:
            self.death[split.observed[1].storage] = self._moment

    def _taken_over(self, item: SplitStep, at: int, fed: set[int]) -> int:
        """The storage id whose memory the output of a step at a moment may take over, or -1.

        It must be a temporary of the same target that ends here, lie exactly as the output will, and no other operand
        may lie over it other than element by element. Memory that is fed is not taken over.
        """
        node, out, srcs = item.node, item.out, item.srcs
        if node is None or node.op is None or self.birth[out.storage] != at:
            return -1
        arena_of, sizes = self._partition.arena_of, self._partition.sizes
        for index in node.op.inplace:
            if index >= len(srcs):
                continue
            source = srcs[index]
            storage = source.storage
            if (
                self.death[storage] == at != self.birth[storage]
                and arena_of[storage] == arena_of[out.storage] >= 0
                and (source.strides, source.shape) == (out.strides, out.shape)
                and source.dtype.itemsize == out.dtype.itemsize
                and sizes[storage] == sizes[out.storage]
                and storage not in fed
                and all(
                    other.storage != storage or k == index or (node.op.pointwise and other == source)
                    for k, other in enumerate(srcs)
                )
            ):
                return storage
        return -1
