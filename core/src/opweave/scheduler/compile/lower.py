"""`lower`: `Bindings` to the `RunList` of each slot: plans, copies, and the events that keep queues in order.

Everything that can be decided is decided here; a run only makes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract.step import Group, scratch_args
from opweave.errors import raise_backend_failure
from opweave.graph.layout import array_shape, is_dense, nbytes
from opweave.runtime.host.operands import (
    CallSequence,
    bind_copy,
    bind_keep,
    bind_read,
    bind_read_ahead,
    bind_selected_copy,
    bind_write,
)
from opweave.runtime.host.sums import bind_collective
from opweave.runtime.plan import Plan
from opweave.runtime.stream import Stream
from opweave.runtime.worker import WorkerStream
from opweave.scheduler.compile.bind import operands
from opweave.scheduler.compile.hazards import HOST_QUEUE, Access, Act, Need, find_waits
from opweave.scheduler.compile.launch import bind_launch
from opweave.scheduler.compile.listing import Lister
from opweave.scheduler.compile.run_list import Action, Bindings, CallList, Feed, Fetch, RunList, unread
from opweave.scheduler.plan.fuse import bound_step
from opweave.scheduler.plan.splits import StorageView

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call
    from opweave.graph.tensor import Tensor
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.submission import Event
    from opweave.scheduler.compile.reuse import EarlierProgram, EarlierSlot
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.fuse import Groups
    from opweave.scheduler.plan.splits import Copy, Partition, Split

__all__ = ["lower"]

Events = list["Event | None"]
Show = Callable[["Tensor", "Arg"], None]


def lower(
    partition: Partition,
    groups: Groups,
    bindings: Sequence[Bindings],
    *,
    overlapping: bool,
    count: Callable[[int], object],
    show: Show | None = None,
    earlier: EarlierProgram | None = None,
) -> list[RunList]:
    """The run list of every slot.

    Args:
        earlier: a program that is like this one; operands and calls are taken where neither sizes nor memory differ.
        overlapping: a run may begin before the last one has ended.
        count: called with the bytes of each copy whose size is known only when it is made.
        show: called with each observed node and its value where it lies.
    """
    slots = [None if earlier is None else earlier.at(k, slot) for k, slot in enumerate(bindings)]
    lists = [
        _Lowering(partition, groups, slot, count, show, old, overlapping)
        for slot, old in zip(bindings, slots, strict=True)
    ]
    orders: list[list[list[Need]]]
    if len({entry.queue for made in lists for entry in made.entries}) > 1:
        queues = 2 * len(partition.assignment.targets)
        orders = find_waits([[made.act(entry) for entry in made.entries] for made in lists], queues, overlapping)
    else:  # the order of the only queue is enough
        orders = [[[] for _ in made.entries] for made in lists]
    awaited: list[set[int]] = [set() for _ in lists]
    for order in orders:
        for needs in order:
            for slot, index in needs:
                awaited[slot].add(index)
    for made in lists:
        made.result.events += [None] * len(made.entries)
    for slot, made in enumerate(lists):
        made.assemble(orders[slot], awaited[slot], lists)
    return [made.result for made in lists]


class _Entry(NamedTuple):
    """What one queue does at one point of a run, with its call (feeds are called by the run itself).

    Attributes:
        reads, writes: the storages that it accesses beside those of ``action``, which for a plan or a copy says them.
    """

    queue: int
    call: Call | None
    action: Action | None
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()


class _Lowering:
    """Makes the entries of one slot's list, and puts waits and events between them."""

    def __init__(
        self,
        partition: Partition,
        groups: Groups,
        bindings: Bindings,
        count: Callable[[int], object],
        show: Show | None,
        earlier: EarlierSlot | None,
        overlapping: bool,
    ) -> None:
        self.earlier: Final = earlier
        self.overlapping: Final = overlapping
        self.partition: Final = partition
        self.groups: Final = groups
        self.bindings: Final = bindings
        self.targets: Final = partition.assignment.targets
        numbered = any(target.stream.lists_operands for target in self.targets)
        self.arg: Final = operands(partition, bindings, earlier, numbered=numbered)
        self.count: Final = count
        self.show: Final = show
        states = [t.leaf for t in partition.graph.leaves if t.leaf is not None and t.leaf.kind == "state"]
        self.result: Final = RunList(
            states, sum([copy.nbytes for copy in partition.copies if copy.ids is None]), bindings
        )
        self.entries: list[_Entry] = []
        self.lister: Lister | None = None
        if numbered:
            self.lister = Lister(partition, groups, bindings)
        # Reads of leaves need no order, unless something writes into the same memory.
        self.leaves_matter: Final = bool(partition.placed) or bool(states)
        self._add_feeds()
        self.n_feeds: Final = len(self.entries)
        for split in partition.splits:
            self._add_split(split)
        self._add_fetches()

    # --- entries ----------------------------------------------------------------------------------------------------

    def act(self, entry: _Entry) -> Act:
        """What an entry reads and writes."""
        action = entry.action
        split, copy = (None, None) if action is None else (action.split, action.copy)
        reads, writes = dict.fromkeys(entry.reads), dict.fromkeys(entry.writes)
        accesses: list[Access | None] = []
        if copy is not None:
            views = [*[(view, False) for view in copy.sources], *[(view, True) for view in copy.writes]]
            alone = copy.cause == "gather"  # pieces of a value are under way independently of each other
            accesses = [self._access(view.storage, write, view if alone else None) for view, write in views]
        elif action is not None and action.plan is not None and split is not None:
            for item in split.steps:
                reads.update((source.storage, None) for source in item.srcs)
                writes[item.out.storage] = None
            accesses = [_bytes_of(a.buffer, a.offset, a.size, True) for a in self.scratch.get(split.index, ())]
        accesses += [self._access(storage, False) for storage in reads]
        accesses += [self._access(storage, True) for storage in writes]
        return Act(entry.queue, [access for access in accesses if access is not None])

    @cached_property
    def scratch(self) -> Mapping[int, Sequence[Arg]]:
        """Index of a split -> the scratch memory of its groups."""
        found: dict[int, list[Arg]] = {}
        for (index, _), arg in self.bindings.workspaces.items():
            found.setdefault(index, []).append(arg)
        return found

    def _access(self, storage: int, write: bool, view: StorageView | None = None) -> Access | None:
        """The bytes of a storage, or those that a dense window of it shows."""
        buffer = self.bindings.buffers[storage]
        if buffer is None or (self.partition.arena_of[storage] < 0 and not self.leaves_matter):
            return None
        if view is not None and buffer.type.is_raw and is_dense(view.shape, view.strides, view.dtype):
            size = nbytes(view.shape, view.dtype)
            return _bytes_of(buffer, self.bindings.offsets[storage] + view.offset, size, write)
        return _bytes_of(buffer, self.bindings.offsets[storage], self.partition.sizes[storage], write)

    @staticmethod
    def _queue(target: Target) -> int:
        return target.index if target.stream.is_async else HOST_QUEUE

    def _target_of(self, storage: int, default: Target) -> Target:
        """The target whose stream works on a value's memory."""
        arena = self.partition.arena_of[storage]
        if arena >= 0:
            return self.targets[arena]
        buffer = self.bindings.buffers[storage]
        assert buffer is not None
        for target in self.targets:
            if target.device is buffer.device:
                return target
        return default

    def _add_feeds(self) -> None:
        for tensor in self.partition.graph.leaves:
            leaf = tensor.leaf
            if leaf is None or leaf.kind != "input":
                continue
            shape = array_shape(tensor.shape, tensor.dtype)
            storage = self.partition.inputs.get(tensor)
            feed = Feed(tensor, shape, tensor.dtype.numpy, None, unread, False, None)
            if storage is not None:
                arg = self.arg(StorageView.of(tensor, storage))
                target = self.targets[self.partition.arena_of[storage]]
                stream = target.stream
                if isinstance(stream, WorkerStream) and not self.overlapping and not stream.inner.is_async:
                    stream = stream.inner  # nothing is under way: fed at once, no device waits for another one's thread
                view, put, queued = bind_write(arg, stream)
                feed = replace(feed, view=view, put=put or unread, queued=queued, target=target)
                queue = target.index if queued else HOST_QUEUE
                self.entries.append(_Entry(queue, None, None, writes=(storage,)))
            self.result.feeds[tensor.key] = feed

    def _add_split(self, split: Split) -> None:
        target = split.target
        for copy in split.copies:
            self._add_copy(copy, split, target)
        if split.steps:
            plan = self._compile(split)
            self.result.plans.append(plan)
            action = Action("plan", target, split, groups=self.groups.of_split[split.index], plan=plan)
            self.entries.append(_Entry(self._queue(target), plan.run, action))
        for copy in split.write_backs:
            self._add_copy(copy, split, self._target_of(copy.dst.storage, target))
        if split.observed is not None:
            node, operand = split.observed
            assert self.show is not None
            look = partial(self.show, node, self.arg(operand))
            self.entries.append(_Entry(HOST_QUEUE, look, Action("observe", target, split), (operand.storage,)))

    def _add_copy(self, copy: Copy, split: Split, target: Target) -> None:
        beside = copy.cause == "weight-fetch" and target.copier is not None
        stream = target.copier if beside and target.copier is not None else target.stream
        dst, src = self.arg(copy.dst), self.arg(copy.src)
        if copy.kind is not None:
            parts = [self.arg(view) for view in (copy.src, *copy.terms, copy.bias) if view is not None]
            outs = [self.arg(view) for view in copy.writes]
            call, queued = bind_collective(copy.kind, copy.provider, stream, outs, parts)
        elif copy.ids is None:
            call, queued = bind_copy(dst, stream, src)
        else:
            call, queued = bind_selected_copy(dst, stream, src, self.arg(copy.ids), self.count)
        queue = HOST_QUEUE if not queued else target.index + len(self.targets) if beside else target.index
        self.entries.append(_Entry(queue, call, Action("copy", target, split, copy)))

    def _stream(self, queue: int) -> Stream:
        """Queues are the targets' streams in order, and then their copiers."""
        target = self.targets[queue % len(self.targets)]
        stream = target.copier if queue >= len(self.targets) else target.stream
        assert stream is not None
        return stream

    def _add_fetches(self) -> None:
        for output, operand in zip(self.partition.graph.outputs, self.partition.outputs, strict=True):
            if operand is None:
                empty = np.empty(array_shape(output.shape, output.dtype), output.dtype.numpy)
                self.result.fetches.append(Fetch(output, empty.copy, None, None, empty.copy))
                continue
            target = self._target_of(operand.storage, self.targets[-1])
            stream = target.stream
            queued = stream if isinstance(stream, WorkerStream) else None
            arg = self.arg(operand)
            ahead = bind_read_ahead(arg, stream)
            fetch = Fetch(output, bind_read(arg, queued), queued, target, bind_keep(arg, queued), ahead)
            self.result.fetches.append(fetch)
            if queued is not None or ahead is not None:
                self.entries.append(_Entry(target.index, None, None, (operand.storage,)))

    # --- plans ------------------------------------------------------------------------------------------------------

    def _compile(self, split: Split) -> Plan:
        """The steps of a split as a plan of its target's stream."""
        workspaces, planned, arg = self.bindings.workspaces, split.steps, self.arg
        stream, kind = split.target.stream, type(split.target.stream)
        earlier = None if self.earlier is None else self.earlier.calls(split, self.groups)
        fused = self.groups.of_split[split.index]

        def group_of(g: int) -> Group:
            indices, size, _ = fused[g]
            items = [planned[i] for i in indices]
            steps = tuple([bound_step(item, arg(item.out), tuple(map(arg, item.srcs))) for item in items])
            nodes = tuple([item.node for item in items if item.node is not None])
            same = None if earlier is None else earlier[g]
            return Group(steps, size, workspaces.get((split.index, g)), nodes, call=same)

        if stream.lists_operands or kind._compile is not Stream._compile or kind._compiled is not Stream._compiled:
            ready = [group_of(g) for g in range(len(fused))]
            if self.lister is not None and stream.lists_operands:
                ready = [self.lister.listed(group, split, g) for g, group in enumerate(ready)]
            return stream.compile(ready)
        # Kernels that are called one by one mostly need no `Step`: without them, plans are made much faster.
        shares = stream.shares_calls
        # What a kernel was bound to -> its call, which equal steps share; and the operands, whose ids are in the key.
        bound: dict[tuple[Any, ...], tuple[Call, Sequence[Arg]]] = {}
        calls: list[Call] = []
        for g, (indices, _, kernel) in enumerate(fused):
            op, node, out, srcs, support = planned[indices[0]]
            same = earlier[g] if earlier is not None else None
            if same is not None:
                calls.append(same)
                continue
            try:
                if kernel is None:
                    calls.append(stream._bind(group_of(g)))
                    continue
                scratch = workspaces.get((split.index, g)) if kernel.workspace is not None else None
                args = (arg(out), *map(arg, srcs))
                key = (id(kernel), support, *map(id, args), scratch and (id(scratch.buffer), scratch.offset))
                equal = bound.get(key) if shares else None
                if equal is None:
                    attrs = node.attrs if node is not None else {}
                    if kernel.workspace is not None:
                        assert support.choice is not None
                        attrs = {**scratch_args(support.choice.scratch.arrays, scratch), **attrs}
                    equal = bound[key] = kernel.factory(stream, op, *args, **attrs), args
                calls.append(equal[0])
            except BaseException as error:
                what = group_of(g).describe() if node is not None else op
                raise_backend_failure(error, stream.device.name, "preparing a kernel", what)
        return Plan(stream, calls, len(calls), self._leaf_buffers(split))

    def _leaf_buffers(self, split: Split) -> set[Buffer]:
        """The buffers of leaves that a split uses, which their owner may free while the program lives."""
        leaves: Collection[int] = self.partition.owners.keys()
        if len(self.partition.splits) > 1:
            arena_of, planned = self.partition.arena_of, split.steps
            leaves = {view.storage for item in planned for view in item.srcs if arena_of[view.storage] < 0}
            leaves |= {item.out.storage for item in planned if arena_of[item.out.storage] < 0}
        return {buffer for storage in leaves if (buffer := self.bindings.buffers[storage]) is not None}

    # --- the list ---------------------------------------------------------------------------------------------------

    def assemble(self, order: list[list[Need]], awaited: set[int], lists: Sequence[_Lowering]) -> None:
        """Make the list of calls: each entry behind the waits that it needs, and before the event that others await."""
        result = self.result
        queues = {entry.queue for entry in self.entries} - {HOST_QUEUE}
        result.streams += [self._stream(queue) for queue in sorted(queues)]
        calls: list[Call] = []
        actions: list[Action] = []
        splits = self.partition.splits
        for index in range(self.n_feeds):
            queue = self.entries[index].queue
            result.before += [self._wait(queue, need, lists)[0] for need in order[index]]
            if index in awaited:
                calls.append(self._record(queue, index))
                actions.append(Action("event", self.targets[queue % len(self.targets)], splits[0]))
        sequence = range(self.n_feeds, len(self.entries))
        for index in sequence:
            queue, call, action, *_ = self.entries[index]
            last = action.split if action is not None else splits[-1] if splits else None
            for need in order[index]:
                wait, target = self._wait(queue, need, lists)
                if last is not None:
                    calls.append(wait)
                    actions.append(Action("sync", target, last))
            if call is not None and action is not None:
                calls.append(call)
                actions.append(action)
            if index in awaited and call is None:
                # A fetch, which is queued when all calls are made.
                result.after.append(self._record(queue, index))
            elif index in awaited and last is not None:
                calls.append(self._record(queue, index))
                actions.append(Action("event", self.targets[queue % len(self.targets)], last))
        self._choose_calls(calls, actions, single=len(lists) == 1)

    def _choose_calls(self, calls: list[Call], actions: list[Action], *, single: bool) -> None:
        """Take the list of calls into the result: as it is, flattened, or as one call."""
        result = self.result
        result.actions = CallList(calls, actions)
        # Where nothing is queued, not even an upload, each call is complete when it returns.
        flat = None if result.streams else _flattened(calls, actions)
        if result.streams and single and self.show is None:
            flat = bind_launch(result, self.partition, actions, self.arg)
            if flat is not None:
                result.streams.clear()
                result.actions = flat
        result.calls = result.actions if flat is None else flat
        for buffer in {self.bindings.buffers[storage] for storage in self.partition.owners}:
            assert buffer is not None
            buffer.add_dependent(result)

    def _record(self, queue: int, index: int) -> Call:
        return partial(_record, self._stream(queue), self.result.events, index)

    def _wait(self, queue: int, need: Need, lists: Sequence[_Lowering]) -> tuple[Call, Target]:
        """A wait for an event, and the target on whose stream that is."""
        slot, index = need
        events = lists[slot].result.events
        target = self.targets[lists[slot].entries[index].queue % len(self.targets)]
        if queue == HOST_QUEUE:
            return partial(_wait_here, events, index), target
        return partial(_wait_in, self._stream(queue), events, index), target


def _flattened(calls: Sequence[Call], actions: Sequence[Action]) -> CallList | None:
    """The calls with plans replaced by their own calls, where one of the streams may make the calls of all of them.

    What a stream sets up for its calls (`Stream._run`) mostly suits the others too, and is then set up once a run, not
    once a split: 200 additions that change the device after every 5 and every 20 take 0.30 and 0.88 of the time (AMD
    Zen 4). Plans of streams that others may submit to are kept, as each submission to them is checked; so are
    those of observed runs, as an observer's callback must not run in the state that a stream sets up for kernels.
    """
    streams: dict[Stream, None] = {}
    for action in actions:
        stream = action.target.stream
        if action.kind not in ("plan", "copy") or not action.target.owned or stream.is_async:
            return None
        if action.plan is not None:
            streams[stream] = None
    leader = next((s for s in streams if all(other is s or s._inlines(other) for other in streams)), None)
    if leader is None:
        return None
    flat: list[Call] = []
    starts: list[int] = []
    for call, action in zip(calls, actions, strict=True):
        starts.append(len(flat))
        if action.plan is not None:
            flat += action.plan.calls
        elif isinstance(call, CallSequence):
            flat += call.calls
        else:
            flat.append(call)
    if type(leader)._merge is Stream._merge:
        return CallList(flat, actions, leader._run, starts)
    merged = leader._merge(flat)
    numbers = [*accumulate([count for _, count in merged], initial=0)]
    return CallList([call for call, _ in merged], actions, leader._run, starts, numbers)


# --- events ---------------------------------------------------------------------------------------------------------


def _bytes_of(buffer: Any, offset: int, size: int, write: bool) -> Access:
    memory, start = buffer.location(offset)
    return Access(memory, start, start + size, write)


def _record(stream: Stream, events: Events, index: int) -> None:
    events[index] = stream.record()


def _wait_in(stream: Stream, events: Events, index: int) -> None:
    event = events[index]
    if event is not None:
        stream.wait(event)


def _wait_here(events: Events, index: int) -> None:
    event = events[index]
    if event is not None:
        event.synchronize()
