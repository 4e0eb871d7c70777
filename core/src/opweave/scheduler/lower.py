"""The run list: what a run does, one call after another, with the waits and marks that keep queues in order.

Built once for each slot of a program; a run only goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract.worker import WorkerStream
from opweave.host.storage import array_shape, bind_copy, bind_read, bind_selected_copy, bind_write
from opweave.scheduler.actions import Action, Feed, Fetch
from opweave.scheduler.hazards import HOST_QUEUE, Access, Act, Need, find_waits
from opweave.scheduler.joint import Joint, join
from opweave.scheduler.partition import Operand

if TYPE_CHECKING:
    from opweave.contract.event import Event
    from opweave.contract.plan import Plan
    from opweave.contract.step import Arg, Call
    from opweave.contract.stream import Stream
    from opweave.scheduler.bind import Binder
    from opweave.scheduler.partition import Copy, Split
    from opweave.scheduler.target import Target

__all__ = ["RunList", "run_lists"]

Marks = list["Event | None"]


class RunList:
    """What a run in one slot does.

    Attributes:
        before: waits, before inputs are fed.
        feeds: how each input gets its values.
        calls, actions: what then happens, and what each of these calls is.
        fetches: how each output is brought back. Without a stream: once everything is done.
        after: marks, behind fetches that are queued.
        joint: the calls with the plans of synchronous streams taken apart, if there are any.
        plans: the compiled plans among the calls.
        marks: the latest marks of its acts, for other queues to wait for.
        streams: the asynchronous ones that a run uses.
        ended: why it can no longer be run.
    """

    __slots__ = (
        "__weakref__", "actions", "after", "before", "calls", "ended", "feeds", "fetches", "joint", "marks", "plans",
        "streams",
    )  # fmt: skip

    def __init__(self) -> None:
        self.joint: Joint | None = None
        self.ended = ""
        self.before: list[Call] = []
        self.feeds: dict[str, Feed] = {}
        self.calls: list[Call] = []
        self.actions: list[Action] = []
        self.fetches: list[Fetch] = []
        self.after: list[Call] = []
        self.plans: list[Plan] = []
        self.marks: Marks = []
        self.streams: list[Stream] = []

    def _invalidate(self, why: str) -> None:
        """Memory that the calls use is gone."""
        self.joint, self.ended = None, why

    def close(self) -> None:
        """Give up the plans and the calls, and with them all views of memory."""
        for plan in self.plans:
            plan.close()
        self.joint = None
        self.calls.clear()
        self.fetches.clear()
        for name, feed in self.feeds.items():
            self.feeds[name] = feed._replace(view=None, put=None)


class _Entry(NamedTuple):
    """One act of a run, with its call (feeds are called by the run itself)."""

    act: Act
    call: Call | None
    action: Action | None


def run_lists(binder: Binder, overlapping: bool, count: Callable[[int], object]) -> list[RunList]:
    """The run list of every slot.

    Args:
        overlapping: a run may begin before the last one has ended.
        count: called with the bytes of each copy of which that is known only when it is made.
    """
    lists = [_Lister(binder, slot, count) for slot in range(binder.slots)]
    orders: list[list[list[Need]]]
    if lists[0].ordered:
        orders = find_waits([[e.act for e in made.entries] for made in lists], 2 * len(binder.targets), overlapping)
    else:
        orders = [[[] for _ in made.entries] for made in lists]
    marked: list[set[int]] = [set() for _ in lists]
    for order in orders:
        for needs in order:
            for slot, index in needs:
                marked[slot].add(index)
    for made in lists:
        made.result.marks += [None] * len(made.entries)
    for slot, made in enumerate(lists):
        made.assemble(orders[slot], marked[slot], lists)
    return [made.result for made in lists]


class _Lister:
    """Makes the entries of one slot's list, and puts waits and marks between them."""

    def __init__(self, binder: Binder, slot: int, count: Callable[[int], object]) -> None:
        self.count: Final = count
        self.binder: Final = binder
        self.partition: Final = binder.partition
        self.targets: Final = binder.targets
        self.result: Final = RunList()
        self.entries: list[_Entry] = []
        self.ordered: Final = any(target.stream.is_async for target in self.targets)
        self.scratch: Final[dict[int, list[Arg]]] = {}
        if self.ordered:
            for (index, _), arg in binder.scratch.items():
                self.scratch.setdefault(index, []).append(arg)
        # Read-only leaves cannot be in anybody's way, unless somebody writes into the same memory.
        self.leaves_matter: Final = bool(self.partition.placed) or any(
            t.leaf is not None and t.leaf.kind == "state" for t in self.partition.graph.leaves
        )
        binder.select(slot)
        self._add_feeds()
        self.n_feeds: Final = len(self.entries)
        for split in self.partition.splits:
            self._add_split(split)
        self._add_fetches()

    # --- entries ----------------------------------------------------------------------------------------------------

    def _add(
        self,
        queue: int,
        reads: Iterable[int],
        writes: Iterable[int],
        call: Call | None,
        action: Action | None,
        further: Sequence[Access] = (),
    ) -> None:
        accesses = list(further)
        if self.ordered:
            accesses += [a for place in reads if (a := self._access(place, False)) is not None]
            accesses += [a for place in writes if (a := self._access(place, True)) is not None]
        self.entries.append(_Entry(Act(queue, accesses), call, action))

    def _access(self, place: int, write: bool) -> Access | None:
        buffer = self.binder.buffers[place]
        if buffer is None or (self.partition.arenas[place] < 0 and not self.leaves_matter):
            return None
        return _bytes_of(buffer, self.binder.offsets[place], self.partition.sizes[place], write)

    @staticmethod
    def _queue(target: Target) -> int:
        return target.index if target.stream.is_async else HOST_QUEUE

    def _target_of(self, place: int, default: Target) -> Target:
        """The target whose stream works on a place's memory."""
        arena = self.partition.arenas[place]
        if arena >= 0:
            return self.targets[arena]
        buffer = self.binder.buffers[place]
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
            place = self.partition.inputs.get(tensor)
            feed = Feed(tensor, shape, tensor.dtype.numpy, None, None, False, None)
            if place is not None:
                arg = self.binder.arg(Operand(place, 0, tensor.dtype, tensor.shape, tensor.strides))
                target = self.targets[self.partition.arenas[place]]
                view, put, queued = bind_write(arg, target.stream)
                feed = feed._replace(view=view, put=put, queued=queued, target=target)
                self._add(target.index if queued else HOST_QUEUE, (), (place,), None, None)
            self.result.feeds[tensor.name] = feed

    def _add_split(self, split: Split) -> None:
        target = split.target
        for copy in split.copies:
            self._add_copy(copy, split, target)
        if split.items:
            plan = self.binder.compile(split)
            self.result.plans.append(plan)
            groups = self.binder.fused[split.index]
            items = None if groups is None else tuple(tuple(g[0]) for g in groups)
            reads: dict[int, None] = {}
            writes: dict[int, None] = {}
            if self.ordered:
                for item in split.items:
                    reads.update((s[0], None) for s in item[3])
                    writes[item[2][0]] = None
            scratch = [_bytes_of(a.buffer, a.offset, a.size, True) for a in self.scratch.get(split.index, ())]
            action = Action("plan", target, split, items=items, plan=plan)
            self._add(self._queue(target), reads, writes, plan.run, action, scratch)
        for copy in split.write_backs:
            self._add_copy(copy, split, self._target_of(copy.dst.place, target))
        if split.observed is not None:
            node, operand = split.observed
            assert self.binder.show is not None
            look = partial(self.binder.show, node, bind_read(self.binder.arg(operand)))
            self._add(HOST_QUEUE, (operand.place,), (), look, Action("observe", target, split))

    def _add_copy(self, copy: Copy, split: Split, target: Target) -> None:
        beside = copy.cause == "stream" and target.copier is not None
        stream = target.copier if beside and target.copier is not None else target.stream
        dst, src = self.binder.arg(copy.dst), self.binder.arg(copy.src)
        reads: tuple[int, ...] = (copy.src.place,)
        if copy.ids is None:
            call, queued = bind_copy(dst, stream, src)
        else:
            call, queued = bind_selected_copy(dst, stream, src, self.binder.arg(copy.ids), self.count)
            reads = (copy.src.place, copy.ids.place)
        queue = HOST_QUEUE if not queued else target.index + len(self.targets) if beside else target.index
        self._add(queue, reads, (copy.dst.place,), call, Action("copy", target, split, copy))

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
                self.result.fetches.append(Fetch(output, empty.copy, None, None))
                continue
            target = self._target_of(operand.place, self.targets[-1])
            stream = target.stream
            queued = stream if isinstance(stream, WorkerStream) else None
            self.result.fetches.append(Fetch(output, bind_read(self.binder.arg(operand), queued), queued, target))
            if queued is not None:
                self._add(target.index, (operand.place,), (), None, None)

    # --- the list ---------------------------------------------------------------------------------------------------

    def assemble(self, order: list[list[Need]], marked: set[int], lists: list[_Lister]) -> None:
        """Put what was made in a row, with waits before and marks behind."""
        result, marks = self.result, self.result.marks
        queues = {entry.act.queue for entry in self.entries} - {HOST_QUEUE}
        result.streams += [self._stream(queue) for queue in sorted(queues)]
        calls, actions = result.calls, result.actions
        body = range(self.n_feeds, len(self.entries))
        for index in range(self.n_feeds):
            result.before += [self._wait(self.entries[index].act.queue, need, lists)[0] for need in order[index]]
        splits = self.partition.splits
        for index in range(self.n_feeds):
            if index in marked:
                self._mark(self.entries[index].act.queue, index, marks, splits[0])
        for index in body:
            act, call, action = self.entries[index]
            last = action.split if action is not None else splits[-1] if splits else None
            for need in order[index]:
                wait, target = self._wait(act.queue, need, lists)
                if last is not None:
                    calls.append(wait)
                    actions.append(Action("sync", target, last))
            if call is not None and action is not None:
                calls.append(call)
                actions.append(action)
            if index in marked and call is None:
                # A fetch, which is queued when all calls are made.
                result.after.append(partial(_mark, self._stream(act.queue), marks, index))
            elif index in marked and last is not None:
                self._mark(act.queue, index, marks, last)
        result.joint = join(calls, actions)
        for buffer in {self.binder.buffers[place] for place in self.partition.owners}:
            assert buffer is not None
            buffer._add_dependent(result)

    def _mark(self, queue: int, index: int, marks: Marks, split: Split) -> None:
        self.result.calls.append(partial(_mark, self._stream(queue), marks, index))
        self.result.actions.append(Action("mark", self.targets[queue % len(self.targets)], split))

    def _wait(self, queue: int, need: Need, lists: list[_Lister]) -> tuple[Call, Target]:
        """A wait for a mark, and the target that it is of."""
        slot, index = need
        marks = lists[slot].result.marks
        target = self.targets[lists[slot].entries[index].act.queue % len(self.targets)]
        if queue == HOST_QUEUE:
            return partial(_wait_here, marks, index), target
        return partial(_wait_in, self._stream(queue), marks, index), target


def _bytes_of(buffer: Any, offset: int, size: int, write: bool) -> Access:
    memory, start = buffer.location(offset)
    return Access(memory, start, start + size, write)


def _mark(stream: Stream, marks: Marks, index: int) -> None:
    marks[index] = stream.record()


def _wait_in(stream: Stream, marks: Marks, index: int) -> None:
    mark = marks[index]
    if mark is not None:
        stream.wait(mark)


def _wait_here(marks: Marks, index: int) -> None:
    mark = marks[index]
    if mark is not None:
        mark.synchronize()
