"""A judge of memory plans. It replays a compiled program over a picture of memory and shares no code with the planner.

Time is counted in *moments*: feeding all inputs is one, each copy between memories is one, each group of steps is one
(a step that is not fused is a group of its own), fetching the outputs is one.

**Faults.** Every byte range of memory has one holder: the place that was written there last. A read of a place whose
bytes have since been written for another place is a fault: two live tensors overlapped. So are an output over a source
where that is not allowed, a place outside of its buffer, or not aligned, or over the memory of a leaf.

**The lower bound**, for each device: the largest sum, over all moments, of the bytes of the values that are live then,
each rounded up to the alignment of the memory it lies in. A value is live from the moment that writes it to the last
one that reads it; inputs from feeding on, outputs until fetching; a group's workspace at the group's moment. Where the
output of a step may lie over a source that ends with it, the two count once. It may where the operation allows it for
that source, the kernel opted in, both have one layout, the source is a temporary of the same device and no input, and
no other operand shows the same bytes (unless it is the same window and the operation works element by element). Values
that are made and read within one fused group count nothing. Leaves lie in memory of their own and are not counted. No
plan whatsoever needs less.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final, NamedTuple

from opweave.graph.opdef import OPS
from opweave.scheduler import Program
from opweave.scheduler.plan.splits import Partition, SplitStep, StorageView
from opweave.scheduler.program import MemoryMap, Region

__all__ = ["Judgement", "byte_range", "judge", "verify"]


class Judgement(NamedTuple):
    """What `verify` found.

    Attributes:
        planned: device -> bytes up to the end of the last temporary in each buffer.
        bound: device -> the lower bound in bytes.
        faults: one line each; empty for a right plan.
    """

    planned: dict[str, int]
    bound: dict[str, int]
    faults: list[str]

    @property
    def ratio(self) -> float:
        """Planned bytes over the bound, all devices together; 1 where there is nothing to plan."""
        bound = sum(self.bound.values())
        return sum(self.planned.values()) / bound if bound else 1.0


def verify(program: Program) -> Judgement:
    """Judge the memory plan of a compiled program."""
    return judge(program.partition, program.memory_map())


def judge(partition: Partition, where: MemoryMap) -> Judgement:
    """Judge a plan: ``where`` says where the places of ``partition`` lie."""
    replay = _Replay(partition, where)
    replay.run()
    return Judgement(replay.planned(), replay.bound(), replay.faults)


class _Moment(NamedTuple):
    """Places read and written at once, and the items behind them (none for feeds, copies and fetches)."""

    what: str
    reads: list[StorageView]
    writes: list[StorageView]
    items: list[SplitStep]
    target: int
    workspace: Region | None


class _Replay:
    def __init__(self, partition: Partition, where: MemoryMap) -> None:
        self.partition: Final = partition
        self.where: Final = where
        self.faults: Final[list[str]] = []
        self.moments: Final = self._moments()
        self.written: Final[dict[int, int]] = {}  # place -> first moment that writes it
        self.read: Final[dict[int, int]] = {}  # place -> last moment that reads it
        for at, moment in enumerate(self.moments):
            for operand in moment.writes:
                self.written.setdefault(operand.storage, at)
            for operand in moment.reads:
                self.read[operand.storage] = at

    # --- what happens -----------------------------------------------------------------------------------------------

    def _moments(self) -> list[_Moment]:
        parts = self.partition
        fed = [StorageView(p, 0, t.dtype, t.shape, t.strides) for t, p in parts.inputs.items()]
        result = [_Moment("feeding", [], fed, [], -1, None)]
        for split, grouping in zip(parts.splits, self.where.groups, strict=True):
            target = split.target.index
            what = f"copy for split {split.index}"
            result += [_Moment(what, [copy.src], [copy.dst], [], target, None) for copy in split.copies]
            for g, indices in enumerate(grouping):
                items = [split.steps[i] for i in indices]
                names = " + ".join(_name(i) for i in items)
                made: set[int] = set()
                reads = []
                for item in items:
                    reads += [s for s in item.srcs if s.storage not in made]
                    made.add(item.out.storage)
                workspace = self.where.workspaces.get((split.index, g))
                result.append(_Moment(names, reads, [i.out for i in items], items, target, workspace))
            what = f"write-back of split {split.index}"
            result += [_Moment(what, [copy.src], [copy.dst], [], target, None) for copy in split.write_backs]
        fetched = [o for o in parts.outputs if o is not None]
        return [*result, _Moment("fetching", fetched, [], [], -1, None)]

    # --- faults -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        memory = _Memory()
        self._check_places()
        for moment in self.moments:
            for operand in moment.reads:
                if self._is_temporary(operand.storage):
                    self._check_read(operand, moment, memory)
            self._check_operands(moment)
            for operand in moment.writes:
                if operand.storage in self.where.places and self._is_temporary(operand.storage):
                    memory.write(self.where.places[operand.storage], operand.storage)
            if moment.workspace is not None:
                memory.write(moment.workspace, -1)

    def _is_temporary(self, place: int) -> bool:
        return self.partition.arena_of[place] >= 0

    def _check_places(self) -> None:
        leaves = _Memory()
        for place, region in self.where.places.items():
            if not self._is_temporary(place):
                leaves.cover(region)
        targets = self.partition.assignment.targets
        temporaries = [(f"place {p}", self.partition.arena_of[p], r) for p, r in self.where.places.items()]
        for (split, group), region in self.where.workspaces.items():
            target = self.partition.splits[split].target.index
            temporaries.append((f"workspace {group} of split {split}", target, region))
        for name, target, region in temporaries:
            if target < 0:
                continue
            if region.offset % targets[target].buffer_type.alignment:
                self.faults.append(f"{name} begins at {region.offset}, which is not aligned")
            if region.offset < 0 or region.offset + region.size > region.buffer.size:
                self.faults.append(f"{name} ends outside of its buffer")
            if leaves.overlaps(region):
                self.faults.append(f"{name} lies over the memory of a leaf")

    def _check_read(self, operand: StorageView, moment: _Moment, memory: _Memory) -> None:
        place = operand.storage
        region = self.where.places.get(place)
        if region is None:
            self.faults.append(f"{moment.what} reads place {place}, which has no memory")
        elif place not in memory.lost and not memory.holds(region, place):
            self.faults.append(f"{moment.what} reads place {place}, which was never written")
        elif place in memory.lost:
            by = memory.lost[place]
            tensors = self.partition.tensors
            taker = "a workspace" if by < 0 else f"place {by} ({tensors[by].name!r})"
            self.faults.append(
                f"{moment.what} reads place {place} ({tensors[place].name!r}), whose bytes {taker} has taken"
            )

    def _check_operands(self, moment: _Moment) -> None:
        """At one moment nothing may lie over anything else, except in place."""
        places = self.where.places
        results: list[tuple[int, StorageView | None, Region]] = []
        results += [(out.storage, out, places[out.storage]) for out in moment.writes if out.storage in places]
        if moment.workspace is not None:
            results.append((-1, None, moment.workspace))
        for i, (place, out, region) in enumerate(results):
            if any(other != place and _overlap(region, beside) for other, _, beside in results[:i]):
                self.faults.append(f"{moment.what}: two results, or a result and the workspace, overlap")
            for source in moment.reads:
                other = places.get(source.storage)
                if source.storage == place or other is None or not _overlap(region, other):
                    continue
                if out is None or not self._may_lie_over(moment, source, out):
                    what = "the workspace" if out is None else "the result"
                    self.faults.append(f"{moment.what}: {what} lies over source place {source.storage}")

    def _may_lie_over(self, moment: _Moment, source: StorageView, out: StorageView) -> bool:
        places = self.where.places
        a, b = places[source.storage], places[out.storage]
        exact = (a.buffer is b.buffer) and a.offset == b.offset
        return exact and len(moment.items) == 1 and source.storage in self._takeable(moment.items[0])

    def _takeable(self, item: SplitStep) -> set[int]:
        """Places of sources that the output of an unfused step may lie over, life times aside."""
        op, out = OPS[item.op], item.out
        if item.node is None or not item.support.inplace or op.writes:
            return set()
        parts, result = self.partition, set()
        fed = parts.inputs.values()
        for index in op.inplace:
            if index >= len(item.srcs):
                continue
            source = item.srcs[index]
            alike = (
                (source.shape, source.strides, source.dtype.itemsize) == (out.shape, out.strides, out.dtype.itemsize)
                and source.offset == 0
                and parts.sizes[source.storage] == parts.sizes[out.storage]
            )
            mine = parts.arena_of[source.storage] == parts.arena_of[out.storage] >= 0 and source.storage not in fed
            others = [s for k, s in enumerate(item.srcs) if k != index and s.storage == source.storage]
            if alike and mine and all(op.pointwise and s == source for s in others):
                result.add(source.storage)
        return result

    # --- sizes ------------------------------------------------------------------------------------------------------

    def planned(self) -> dict[str, int]:
        targets = self.partition.assignment.targets
        ends: list[dict[int, int]] = [{} for _ in targets]
        regions = [(self.partition.arena_of[p], r) for p, r in self.where.places.items()]
        regions += [(self.partition.splits[s].target.index, r) for (s, _), r in self.where.workspaces.items()]
        for target, region in regions:
            if target >= 0:
                end = region.offset + self._aligned(region.size, target)
                ends[target][id(region.buffer)] = max(ends[target].get(id(region.buffer), 0), end)
        return {target.name: sum(ends[target.index].values()) for target in targets}

    def bound(self) -> dict[str, int]:
        parts, count = self.partition, len(self.moments)
        targets = parts.assignment.targets
        changes = [[0] * (count + 1) for _ in targets]
        for place, first in self.written.items():
            arena = parts.arena_of[place]
            last = max(first, self.read.get(place, -1))
            if arena < 0 or (first == last and self._is_internal(place, first)):
                continue
            size = self._aligned(parts.sizes[place], arena)
            changes[arena][first] += size
            changes[arena][last + 1] -= size
        result = {}
        for target in targets:
            live = most = 0
            for at, moment in enumerate(self.moments):
                live += changes[target.index][at]
                here = live
                if moment.target == target.index:
                    if moment.workspace is not None:
                        here += self._aligned(moment.workspace.size, target.index)
                    here -= self._saved(moment, at)
                most = max(most, here)
            result[target.name] = most
        return result

    def _is_internal(self, place: int, at: int) -> bool:
        """Whether a value is made and read within one fused group."""
        items = self.moments[at].items
        return len(items) > 1 and any(s.storage == place for item in items for s in item.srcs)

    def _saved(self, moment: _Moment, at: int) -> int:
        """Bytes that the moment's output need not have of its own."""
        if len(moment.items) != 1:
            return 0
        item = moment.items[0]
        place = item.out.storage
        if self.partition.arena_of[place] < 0 or self.written[place] != at:
            return 0
        if any(self.read[p] == at and self.written.get(p, at) < at for p in self._takeable(item)):
            return self._aligned(self.partition.sizes[place], self.partition.arena_of[place])
        return 0

    def _aligned(self, size: int, target: int) -> int:
        step = self.partition.assignment.targets[target].buffer_type.alignment
        return (size + step - 1) // step * step


class _Memory:
    """Who holds which bytes. ``lost`` maps a holder whose bytes were written by another to that other one."""

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}
        self._ranges: dict[object, list[tuple[int, int, int]]] = {}  # sorted, disjoint (start, end, holder)

    def write(self, region: Region, holder: int) -> None:
        key, start, end = byte_range(region)
        ranges = self._ranges.setdefault(key, [])
        first, last = self._touched(ranges, start, end)
        for _, _, other in ranges[first:last]:
            if other != holder:
                self.lost[other] = holder
        ranges[first:last] = [(start, end, holder)]

    def cover(self, region: Region) -> None:
        """Count bytes as used, whoever else uses them: leaves may lie over one another."""
        key, start, end = byte_range(region)
        ranges = self._ranges.setdefault(key, [])
        first, last = self._touched(ranges, start, end)
        if first < last:
            start, end = min(start, ranges[first][0]), max(end, ranges[last - 1][1])
        ranges[first:last] = [(start, end, -1)]

    def holds(self, region: Region, holder: int) -> bool:
        key, start, end = byte_range(region)
        ranges = self._ranges.get(key, [])
        first, last = self._touched(ranges, start, end)
        return any(other == holder for _, _, other in ranges[first:last])

    def overlaps(self, region: Region) -> bool:
        key, start, end = byte_range(region)
        first, last = self._touched(self._ranges.get(key, []), start, end)
        return first < last

    @staticmethod
    def _touched(ranges: list[tuple[int, int, int]], start: int, end: int) -> tuple[int, int]:
        """Indices of the ranges that share a byte with ``start .. end``."""
        first = bisect_left(ranges, (start, -1, -1))
        if first and ranges[first - 1][1] > start:
            first -= 1
        return first, bisect_left(ranges, (end, -1, -1), first)


def byte_range(region: Region) -> tuple[Any, int, int]:
    """Where a region lies: by address where memory has addresses, else by buffer."""
    buffer = region.buffer
    if buffer.address is None:
        return id(buffer), region.offset, region.offset + region.size
    start = buffer.address + region.offset
    return id(buffer.space), start, start + region.size


def _overlap(a: Region, b: Region) -> bool:
    (a_key, a_start, a_end), (b_key, b_start, b_end) = byte_range(a), byte_range(b)
    return a_key == b_key and a_start < b_end and b_start < a_end


def _name(item: SplitStep) -> str:
    return f"{item.op} {item.node.name!r}" if item.node is not None else f"packing ({item.op})"
