"""`fuse`: asks the stream of each split which of its steps run as one call. `Partition` to `Groups`.

Steps are fused before memory is planned: a value that is used only inside of one group gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property
from itertools import count, islice, repeat
from operator import and_, attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from opweave.contract.step import Arg, Single, Step
from opweave.graph.graph import location_of, overlapping_leaves
from opweave.runtime.stream import Stream

if TYPE_CHECKING:
    from opweave.contract.kernels import Kernel
    from opweave.scheduler.plan.splits import Partition, Split, SplitStep, StorageView

__all__ = ["FusedGroup", "Groups", "bound_step", "fuse", "unfused"]


class FusedGroup(NamedTuple):
    """Steps that run as one.

    Attributes:
        indices: where they are in the split, in the order in which they run.
        workspace: bytes.
        kernel: for a single step that the core binds itself; see `Group.kernel`.
    """

    indices: tuple[int, ...]
    workspace: int
    kernel: Kernel | None = None


class Groups(NamedTuple):
    """How the steps of a partition are grouped.

    Attributes:
        of_split: for every split its groups.
        internal: storage ids of values that live only inside of one group. They get no memory.
    """

    of_split: Sequence[Sequence[FusedGroup]]
    internal: Set[int]


def unfused(partition: Partition) -> Groups:
    """Each step as a group of its own."""
    return Groups([_alone(split) for split in partition.splits], frozenset())


def _alone(split: Split) -> list[FusedGroup]:
    plain = type(split.target.stream)._bind is Stream._bind
    choices = [support.choice if plain else None for support in map(_SUPPORT, split.steps)]
    kernels = [None if choice is None else choice.kernel for choice in choices]
    return _singles_as_groups([item.support.workspace for item in split.steps], kernels)


def _singles_as_groups(workspaces: Iterable[int], kernels: Iterable[Kernel | None]) -> list[FusedGroup]:
    fields = zip(zip(count()), workspaces, kernels, strict=False)
    return list(map(tuple.__new__, repeat(FusedGroup), fields))


def fuse(partition: Partition) -> Groups:
    """Ask the stream of every split for its groups.

    Raises:
        Broken: a stream lost, repeated or invented a step, or put one before what it depends on.
    """
    if all(_fuses_nothing(split) for split in partition.splits):
        return unfused(partition)
    asked = _Asked(partition)
    grouped = [_alone(s) if _fuses_nothing(s) else _groups(s, partition, asked) for s in partition.splits]
    return Groups(grouped, _internal(partition, grouped))


def bound_step(item: SplitStep, out: Arg, srcs: tuple[Arg, ...], *, live: bool = True) -> Step:
    """A planned step with its operands."""
    op, node, _, _, support = item
    attrs, label = ({}, "pack") if node is None else (node.attrs, node.name)
    return tuple.__new__(Step, (op, out, srcs, attrs, live, label, support.allowed, support.choice))


def _fuses_nothing(split: Split) -> bool:
    return type(split.target.stream)._fuse is Stream._fuse and not split.target.stream.is_functional


class _Asked:
    """What questions to streams need, made when the first is asked: most streams know most steps already."""

    def __init__(self, partition: Partition) -> None:
        self._partition: Final = partition

    @cached_property
    def last_readers(self) -> dict[int, int]:
        """Storage id -> index of the last split that reads it; one past the last split for outputs."""
        last: dict[int, int] = {}
        for split in self._partition.splits:
            for copy in split.copies:
                last.update(dict.fromkeys(copy.reads, split.index))
            for item in split.steps:
                for source in item.srcs:
                    last[source.storage] = split.index
            for copy in split.write_backs:
                last[copy.src.storage] = split.index + 1
            if split.observed is not None:
                last[split.observed[1].storage] = split.index + 1
        end = len(self._partition.splits)
        return last | {output.storage: end for output in self._partition.outputs if output is not None}

    @cached_property
    def unbound(self) -> Callable[[StorageView], Arg]:
        """A function that makes operands as they are before memory is planned, with the kind of memory in which they
        are read where that is special. The first operand of each storage is made once."""
        partition = self._partition
        same = _same_memory(partition)
        prepared = partition.assignment.capabilities.prepared
        kinds = {
            storage: prepared.get(tensor)
            for storage, (tensor, _) in (partition.owners.items() if prepared else ())
            if storage not in partition.unpacked
        } | dict(partition.repacked)
        made: dict[int, tuple[StorageView, Arg]] = {}

        def unbound(operand: StorageView) -> Arg:
            storage, offset, dtype, shape, strides = operand
            known = made.get(storage)
            if known is not None and (known[0] is operand or known[0] == operand):
                return known[1]
            memory, shift = same.get(storage, (storage, 0))
            arg = Arg(None, offset + shift, dtype, shape, strides, None, memory, kinds.get(storage))
            if known is None:
                made[storage] = operand, arg
            return arg

        return unbound


def _groups(split: Split, partition: Partition, asked: _Asked) -> list[FusedGroup]:
    stream, planned, arena_of = split.target.stream, split.steps, partition.arena_of
    groups: list[FusedGroup] = []
    new = tuple.__new__

    def add(run: Sequence[int]) -> None:
        """Have the stream group steps that may share groups."""
        steps, last_reader, unbound = [], asked.last_readers, asked.unbound
        for i in run:
            out = planned[i].out.storage
            live = arena_of[out] < 0 or last_reader.get(out, -1) > split.index
            steps.append(_step(planned[i], unbound, live))
        index_of = {id(step): i for i, step in zip(run, steps, strict=True)}
        for group in stream.fuse(steps):
            indices = tuple([index_of[id(step)] for step in group.steps])
            groups.append(FusedGroup(indices, group.workspace, group.kernel))

    if type(stream)._single is Stream._single:
        add(range(len(planned)))
        return groups
    singles = _singles(split, asked, uniform=not partition.copies)
    loose = [single is None or single.fuses for single in singles]
    joins = [single is None or single.fuses or bool(single.follows) for single in singles]
    if None not in singles and not any(map(and_, loose, islice(joins, 1, None))):
        return _singles_as_groups(map(_WORKSPACE, singles), map(_KERNEL, singles))
    run: list[int] = []  # steps in a row that may share groups

    def end() -> None:
        first = singles[run[0]] if run else None
        if len(run) == 1 and first is not None:
            groups.append(new(FusedGroup, ((run[0],), first.workspace, first.kernel)))
        elif run:
            add(run)
        run.clear()

    for i, single in enumerate(singles):
        if single is None or single.fuses or (single.follows and any(planned[j].op in single.follows for j in run)):
            run.append(i)
            continue
        end()
        groups.append(new(FusedGroup, ((i,), single.workspace, single.kernel)))
    end()
    return groups


def _singles(split: Split, asked: _Asked, *, uniform: bool) -> list[Single | None]:
    """What the stream of a split says of each step by itself, asked once for its kind and layout; ``None`` where it is
    not asked.

    Args:
        uniform: no operand is a copy, so that operands are laid out as the signature says to which a `Support` belongs.
    """
    stream, planned = split.target.stream, split.steps
    kind = type(stream)

    def ask(item: SplitStep) -> Single | None:
        _, _, out, srcs, support = item
        if support.choice is None:
            return None
        kept, layout = support.choice.kept, (kind, out[4], *map(_STRIDES, srcs))
        single: Single | None = kept.get(layout)
        if single is None:
            single = kept[layout] = stream._single(_step(item, asked.unbound))
        return single

    supports = list(map(_SUPPORT, planned))
    if not uniform or any(support.packed for support in set(supports)):
        return list(map(ask, planned))
    found = {support: ask(item) for support, item in dict(zip(supports, planned, strict=True)).items()}
    return list(map(found.__getitem__, supports))


_SUPPORT: Final = itemgetter(4)  # of a `SplitStep`
_WORKSPACE, _KERNEL = attrgetter("workspace"), attrgetter("kernel")  # of a `Single`
_STRIDES: Final = itemgetter(4)  # of a `StorageView`


def _step(item: SplitStep, unbound: Callable[[StorageView], Arg], live: bool = True) -> Step:
    return bound_step(item, unbound(item.out), tuple(map(unbound, item.srcs)), live=live)


def _same_memory(partition: Partition) -> dict[int, tuple[int, int]]:
    """Storage id of a leaf that lies over the bytes of others -> the id that stands for all of them, and its place
    there: what writes one of them must not be fused with what reads the same bytes at other positions."""
    same: dict[int, tuple[int, int]] = {}
    if not any(leaf.leaf is not None and leaf.leaf.kind == "state" for leaf in partition.graph.leaves):
        return same  # nothing is written
    storage_of = {tensor: storage for storage, (tensor, _) in partition.owners.items()}
    for leaf, group in overlapping_leaves(partition.graph.leaves).items():
        first = next((other for other in group if other in storage_of), leaf)
        here, start = location_of(leaf), location_of(first)
        if leaf in storage_of and here is not None and start is not None:
            same[storage_of[leaf]] = storage_of[first], here[1] - start[1]
    return same


def _internal(partition: Partition, grouped: Sequence[Sequence[FusedGroup]]) -> set[int]:
    """Storage ids that only the group which makes them reads."""
    made = {
        split.steps[i].out.storage: group
        for split, groups in zip(partition.splits, grouped, strict=True)
        for group in groups if len(group.indices) > 1
        for i in group.indices if partition.arena_of[split.steps[i].out.storage] >= 0
    }  # fmt: skip
    if not made:
        return set()
    inside: set[int] = set()
    outside = {storage for copy in partition.copies for storage in copy.reads}
    outside |= {split.observed[1].storage for split in partition.splits if split.observed is not None}
    outside |= {output.storage for output in partition.outputs if output is not None}
    for split, groups in zip(partition.splits, grouped, strict=True):
        for group in groups:
            for i in group.indices:
                for source in split.steps[i].srcs:
                    storage = source.storage
                    if storage in made:
                        (inside if made[storage] is group else outside).add(storage)
    return inside - outside
