"""Binding: places get their memory, operands their addresses, splits their plans.

With several slots, runs may be under way at once: what more than one queue touches (inputs, and values at the seams
between devices) then has memory of its own in each slot, and every slot has plans of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.buffer import Buffer
from opweave.contract.plan import Plan
from opweave.contract.space import HOST_SPACE, round_up
from opweave.contract.step import Arg, Call, Group, Step
from opweave.contract.stream import Stream
from opweave.errors import raise_backend_failure
from opweave.graph.dtypes import u8
from opweave.graph.tensor import Location, Placement, Tensor
from opweave.leaves import place_state, upload
from opweave.scheduler.allocate import Block, Lifetimes, lifetimes
from opweave.scheduler.partition import END, Item, Operand, Partition, Split

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.scheduler.arena import Arena, Lease

__all__ = ["Binder"]


class Binder:
    """Gives places their memory, binds operands, compiles plans: for one slot after the other (`select`).

    Attributes:
        slots: how many runs may be under way at once.
        show: what is called with each observed node and the call that gives its value.
        planned: target index -> bytes of temporaries.
        leases: what was taken from the arenas.
        scratch: (split, group) -> workspace; the same in every slot.
    """

    def __init__(
        self,
        partition: Partition,
        arenas: Sequence[Arena],
        host: Device,
        slots: int = 1,
        show: Callable[[Tensor, Call], None] | None = None,
    ) -> None:
        self.show: Final = show
        self.partition: Final = partition
        self.targets: Final = partition.assignment.targets
        self.arenas: Final = arenas
        self.host: Final = host
        self.slots: Final = slots
        n = len(self.partition.sizes)
        self.buffers: list[Buffer | None] = [None] * n
        self.offsets: list[int] = [0] * n
        self.handles: dict[int, Any] = {}
        self.args: list[Arg | None] = [None] * n
        self.bound: list[Operand | None] = [None] * n  # what `args` was made of
        self.windows: dict[tuple[int, int], Arg] = {}  # buffer and offset -> what was bound there last
        self.planned: dict[int, int] = {}
        self.leases: Final[list[Lease]] = []
        self.moves: list[dict[int, tuple[Buffer, int]]] = [{} for _ in range(slots)]  # what lies elsewhere in a slot
        self.fused: Final = [self._fuse(split) for split in partition.splits]
        groupings = [None if f is None else [g[0] for g in f] for f in self.fused]
        for split in partition.splits:
            if any(copy.cause == "stream" for copy in split.copies):
                split.target.open_copier()
        ahead = {target.index for target in self.targets if target.copier is not None}
        self.scratch: Final = self._plan_memory(lifetimes(partition, groupings, ahead), self.fused)
        self._own_places()

    def select(self, slot: int) -> None:
        """Let operands be bound and plans compiled for ``slot`` from here on."""
        for place, (buffer, offset) in self.moves[slot].items():
            self.buffers[place], self.offsets[place] = buffer, offset
        n = len(self.args)
        self.args, self.bound = [None] * n, [None] * n
        self.windows.clear()

    # --- fusing -----------------------------------------------------------------------------------------------------

    def _fuse(self, split: Split) -> list[tuple[list[int], int]] | None:
        """Item indices and workspace of each group; ``None`` where the stream does not fuse."""
        stream = split.target.stream
        if type(stream)._fuse is Stream._fuse:
            return None
        steps = []
        for item in split.items:
            live = self.last_reader.get(item.out.place, -1) > split.index or self.partition.arenas[item.out.place] < 0
            steps.append(_step(item, _unbound(item.out), tuple(map(self._source, item.srcs)), live))
        index_of = {id(step): i for i, step in enumerate(steps)}
        return [([index_of[id(step)] for step in group.steps], group.workspace) for group in stream.fuse(steps)]

    def _source(self, operand: Operand) -> Arg:
        """An operand before memory is planned, with the kind of memory that it is read in where that is special."""
        arg = _unbound(operand)
        prepared = self.partition.assignment.prepared
        if prepared and operand.place in self.partition.owners:
            arg._type = prepared.get(self.partition.owners[operand.place][0])
        return arg

    @cached_property
    def last_reader(self) -> dict[int, int]:
        """Place -> index of the last split that reads it; one past the last split for what the program hands out."""
        last: dict[int, int] = {}
        for split in self.partition.splits:
            for copy in split.copies:
                last[copy.src.place] = split.index
                if copy.ids is not None:
                    last[copy.ids.place] = split.index
            for item in split.items:
                for source in item.srcs:
                    last[source.place] = split.index
            for copy in split.write_backs:
                last[copy.src.place] = split.index + 1
            if split.observed is not None:
                last[split.observed[1].place] = split.index + 1
        end = len(self.partition.splits)
        return last | {o.place: end for o in self.partition.outputs if o is not None}

    # --- memory -----------------------------------------------------------------------------------------------------

    def _plan_memory(
        self, lives: Lifetimes, fused: Sequence[list[tuple[list[int], int]] | None]
    ) -> dict[tuple[int, int], Arg]:
        """Offsets for all temporaries; returns the workspace of (split, group)."""
        partition, (birth, death, alias, times) = self.partition, lives
        internal = self._internal_places(fused)
        arenas, sizes = partition.arenas, partition.sizes
        last = list(death)
        members: list[list[int]] = [[] for _ in self.targets]
        for place, owner_id in enumerate(alias):
            if owner_id != place:
                # What takes over a place begins when that one ends.
                last[owner_id] = max(last[owner_id], death[place])
            elif arenas[place] >= 0 and birth[place] >= 0 and place not in internal:
                members[arenas[place]].append(place)
        shared = {alias[place] for place in self._shared_places()} if self.slots > 1 else set()
        wanted = self._workspaces(times, fused)
        scratch: dict[tuple[int, int], Arg] = {}
        for target, places in zip(self.targets, members, strict=True):
            spaces = [w for w in wanted if w[0] == target.index]
            if not places and not spaces:
                continue
            # Runs overlap: what other queues touch has its memory to itself all the time, in every slot.
            seams = [p for p in places if p in shared] * self.slots
            places = [p for p in places if p not in shared]
            blocks = [tuple.__new__(Block, (sizes[p], birth[p], last[p])) for p in places]
            blocks += [Block(sizes[p], 0, END) for p in seams]
            blocks += [Block(size, moment, moment) for _, _, size, moment in spaces]
            plan, lease = self.arenas[target.index].take(blocks)
            self.leases.append(lease)
            chunks, alignment = lease.chunks, target.buffer_type.alignment
            self.planned[target.index] = _planned_bytes(blocks, plan.chunks, plan.offsets, alignment)
            buffers, offsets = self.buffers, self.offsets
            for place, chunk, offset in zip(places, plan.chunks, plan.offsets, strict=False):
                buffers[place] = chunks[chunk]
                offsets[place] = offset
            each = len(seams) // self.slots
            for i, (place, at) in enumerate(zip(seams, range(len(places), len(places) + len(seams)), strict=True)):
                self.moves[i // each][place] = (chunks[plan.chunks[at]], plan.offsets[at])
            for i, (_, key, size, _) in enumerate(spaces, len(places) + len(seams)):
                scratch[key] = Arg(chunks[plan.chunks[i]], plan.offsets[i], u8, (size,), (1,))
        for place, owner_id in enumerate(alias):
            if owner_id != place:
                self.buffers[place], self.offsets[place] = self.buffers[owner_id], self.offsets[owner_id]
                for moves in self.moves:
                    if owner_id in moves:
                        moves[place] = moves[owner_id]
        return scratch

    def _shared_places(self) -> set[int]:
        """Inputs, and temporaries that more than one target touches."""
        arenas = self.partition.arenas
        shared = set(self.partition.inputs.values())
        for split in self.partition.splits:
            target = split.target.index
            for copy in (*split.copies, *split.write_backs):
                places = (copy.src.place, copy.dst.place) if copy.ids is None else (copy.src.place, copy.ids.place)
                shared.update(p for p in places if arenas[p] >= 0 and arenas[p] != target)
            for item in split.items:
                shared.update(s.place for s in (item.out, *item.srcs) if arenas[s.place] not in (-1, target))
        return shared

    def _internal_places(self, fused: Sequence[list[tuple[list[int], int]] | None]) -> set[int]:
        """Places that live only inside one fused group: they get no memory."""
        result: set[int] = set()
        if all(f is None for f in fused):
            return result
        readers: dict[int, set[tuple[int, int]]] = {}
        makers: dict[int, tuple[int, int]] = {}
        for split, groups in zip(self.partition.splits, fused, strict=True):
            for copy in (*split.copies, *split.write_backs):
                readers.setdefault(copy.src.place, set()).add((-1, -1))
                if copy.ids is not None:
                    readers.setdefault(copy.ids.place, set()).add((-1, -1))
            if split.observed is not None:
                readers.setdefault(split.observed[1].place, set()).add((-1, -1))
            for g, (indices, _) in enumerate(groups or [([i], 0) for i in range(len(split.items))]):
                for index in indices:
                    item = split.items[index]
                    if groups is not None and len(indices) > 1 and self.partition.arenas[item.out.place] >= 0:
                        makers[item.out.place] = (split.index, g)
                    for source in item.srcs:
                        readers.setdefault(source.place, set()).add((split.index, g))
        kept = {o.place for o in self.partition.outputs if o is not None}
        for place, group in makers.items():
            if place not in kept and readers.get(place, set()) == {group}:
                result.add(place)
        return result

    def _workspaces(
        self, times: Sequence[int], fused: Sequence[list[tuple[list[int], int]] | None]
    ) -> list[tuple[int, tuple[int, int], int, int]]:
        """(target, (split, group), bytes, moment) of every workspace."""
        wanted = []
        for split, groups, start in zip(self.partition.splits, fused, times, strict=True):
            if groups is None:
                for g, item in enumerate(split.items):
                    if item[4].workspace:
                        wanted.append((split.target.index, (split.index, g), item[4].workspace, start + 1 + g))
            else:
                for g, (_, size) in enumerate(groups):
                    if size:
                        wanted.append((split.target.index, (split.index, g), size, start + 1 + g))
        return wanted

    def _own_places(self) -> None:
        """Memory of leaves: placed states and weights, and read-only leaves where they are wanted."""
        missing: dict[tuple[Device, int], list[Tensor]] = {}
        targets = self.targets
        for tensor, space in self.partition.owners.values():
            leaf = tensor.leaf
            if 0 in tensor.shape or leaf is None or leaf.placement is not None or space in leaf.copies:
                continue
            if leaf.kind == "state":
                place_state(tensor, targets[self.partition.assignment.target_of[tensor]].device)
                continue
            device = next((x.device for x in targets if x.device.space is space), None)
            if device is None or (space is HOST_SPACE and not device.caps.import_host):
                device = self.host
            # Weights of one mapping share buffers, and so do all constants (whose group is None).
            missing.setdefault((device, id(leaf.group)), []).append(tensor)
        for (device, _), tensors in missing.items():
            upload(tensors, device, copies=True)
        for index, (tensor, space) in self.partition.owners.items():
            if 0 in tensor.shape:
                self.buffers[index] = self.host.alloc(1)
                continue
            made: Placement | Location | None = self.partition.placed.get(tensor)
            if made is None:
                assert tensor.leaf is not None
                made = tensor.leaf.placement or tensor.leaf.copies[space]
            made.buffer.check(made.offset, 0)
            self.buffers[index], self.offsets[index] = made.buffer, made.offset
            if made.handle is not None:
                self.handles[index] = made.handle

    # --- operands ---------------------------------------------------------------------------------------------------

    def arg(self, operand: Operand) -> Arg:
        """The operand where it lies in the selected slot."""
        place, offset, dtype, shape, strides = operand
        known = self.args[place]
        if known is not None and (self.bound[place] is operand or self.bound[place] == operand):
            return known
        offset += self.offsets[place]
        buffer = self.buffers[place]
        arg = Arg(buffer, offset, dtype, shape, strides, self.handles.get(place), place)
        if self.partition.arenas[place] >= 0:
            # Values that take turns in one window share its array: fewer arrays stay in the processor's cache.
            at = (id(buffer), offset)
            twin = self.windows.get(at)
            if twin is not None and twin.dtype is dtype and twin.shape == shape and twin.strides == strides:
                arg._view = twin._view
            else:
                self.windows[at] = arg
        if known is None:
            self.args[place], self.bound[place] = arg, operand
        return arg

    # --- plans ------------------------------------------------------------------------------------------------------

    def compile(self, split: Split) -> Plan:
        """The steps of a split as a plan of its target's stream."""
        groups = self.fused[split.index]
        stream = split.target.stream
        arg = self.arg
        calls: list[Call]
        if groups is None and type(stream)._compile is Stream._compile and type(stream)._bind is Stream._bind:
            # The short way for streams that call kernels one by one: no steps are made.
            calls = []
            for g, item in enumerate(split.items):
                op, node, out, srcs, verdict = item
                kernel = verdict.kernel
                attrs = node.attrs if node is not None else {}
                args = [arg(s) for s in srcs]
                try:
                    if kernel is not None and kernel.workspace is None:
                        calls.append(kernel.factory(stream, op, arg(out), *args, **attrs))
                        continue
                    step, scratch = _step(item, arg(out), tuple(args), True), self.scratch.get((split.index, g))
                    if kernel is None:
                        calls.append(stream._bind(Group((step,), verdict.workspace, scratch)))
                    else:
                        calls.append(kernel.bind(stream, step, scratch))
                except Exception as error:
                    what = node.describe() if node is not None else op
                    raise_backend_failure(error, stream.device.name, "preparing a kernel", what)
            return Plan(stream, calls, len(calls), self._leaf_buffers(split))
        ready = []
        for g, (indices, size) in enumerate(
            groups if groups is not None else [([i], item.verdict.workspace) for i, item in enumerate(split.items)]
        ):
            steps = tuple(
                [
                    _step(split.items[i], arg(split.items[i].out), tuple(map(arg, split.items[i].srcs)), True)
                    for i in indices
                ]
            )
            ready.append(Group(steps, size, self.scratch.get((split.index, g))))
        return stream.compile(ready)

    def _leaf_buffers(self, split: Split) -> set[Buffer]:
        """The buffers of leaves that a split uses, which their owner may free while the program lives."""
        arenas = self.partition.arenas
        places = {s[0] for item in split.items for s in (item[2], *item[3]) if arenas[s[0]] < 0}
        return {buffer for place in places if (buffer := self.buffers[place]) is not None}


def _unbound(operand: Operand) -> Arg:
    return Arg(None, operand.offset, operand.dtype, operand.shape, operand.strides, None, operand.place)


def _step(item: Item, out: Arg, srcs: tuple[Arg, ...], live: bool) -> Step:
    node = item.node
    return Step(
        item.op, out, srcs, node.attrs if node is not None else {}, live, node.name if node is not None else "pack"
    )


def _planned_bytes(blocks: Sequence[Block], chunks: Sequence[int], offsets: Sequence[int], alignment: int) -> int:
    """Bytes of the chunks up to the end of the last block in each: what this program needs of the arena."""
    ends: dict[int, int] = {}
    for (size, _, _), chunk, offset in zip(blocks, chunks, offsets, strict=True):
        end = offset + size
        if end > ends.get(chunk, 0):
            ends[chunk] = end
    return sum([round_up(end, alignment) for end in ends.values()])
