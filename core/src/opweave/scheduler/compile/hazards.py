"""Order between targets: which queue has to wait for which, found before anything runs.

Steps of one queue run in order. Different queues run independently, so a queue that accesses bytes which another one
has written (or writes bytes that another one still reads) has to wait for an event of that one. This is the only place
that finds these pairs; it looks at bytes, whatever they are used for: transfers, shared memory, states, reused
temporaries.

A run list is repeated, and with several slots runs overlap. The lists of all slots are therefore walked through twice:
the first round collects the accesses of earlier runs, the second one finds what to wait for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple

__all__ = ["HOST_QUEUE", "Access", "Act", "Need", "find_waits"]

HOST_QUEUE: Final = -1
"""The queue of whatever is done by the submitting thread itself: steps of synchronous targets, copies by the host."""


class Access(NamedTuple):
    """Bytes ``start .. end`` of one memory (any hashable name) that an act reads or writes."""

    memory: object
    start: int
    end: int
    write: bool


class Act(NamedTuple):
    """Something that one queue does at one point of a run: an entry of `lower`, by the bytes that it accesses."""

    queue: int
    accesses: Sequence[Access]


class Need(NamedTuple):
    """An act has to wait until ``slot``'s latest run has got past act number ``act``, which is of another queue."""

    slot: int
    act: int


class _Point(NamedTuple):
    """An act of one round: its number among the acts of its queue, and its position in the lists."""

    queue: int
    nth: int
    slot: int
    act: int


class _Segment(NamedTuple):
    """Bytes that have one history: their last writer, and since then the latest reader of each queue."""

    start: int
    end: int
    writer: _Point | None
    readers: dict[int, _Point]


class _AccessHistory:
    """Who touched which bytes of one memory last: segments in order, which do not overlap."""

    def __init__(self) -> None:
        self.segments: Final[list[_Segment]] = []

    def touch(self, access: Access, point: _Point) -> list[_Point]:
        """Record an access; returns the points that it must come after (those of its own queue too)."""
        first, last = self._cover(access.start, access.end)
        earlier: list[_Point] = []
        for segment in self.segments[first:last]:
            if segment.writer is not None:
                earlier.append(segment.writer)
            if access.write:
                earlier.extend(segment.readers.values())
            else:
                segment.readers[point.queue] = point
        if access.write:
            # The segments have the same history from here on and become one.
            self.segments[first:last] = [_Segment(access.start, access.end, point, {})]
        return earlier

    def _cover(self, start: int, end: int) -> tuple[int, int]:
        """The segments that make up exactly ``start .. end``, cut and added as needed."""
        first = bisect_right(self.segments, start, key=_END)
        last = bisect_left(self.segments, end, key=_START)
        pieces: list[_Segment] = []
        at, before, after = start, 0, 0
        for low, high, writer, readers in self.segments[first:last]:
            if at < low:
                pieces.append(_Segment(at, low, None, {}))
            if low < start:
                pieces.append(_Segment(low, start, writer, dict(readers)))
                before = 1
            pieces.append(_Segment(max(low, start), min(high, end), writer, readers))
            if high > end:
                pieces.append(_Segment(end, high, writer, dict(readers)))
                after = 1
            at = high
        if at < end:
            pieces.append(_Segment(at, end, None, {}))
        if len(pieces) != last - first or before or after:
            self.segments[first:last] = pieces
        return first + before, first + len(pieces) - after


_START, _END = itemgetter(0), itemgetter(1)  # of a `_Segment`


def _latest_touched(
    act: Act, point: _Point, memories: dict[object, _AccessHistory], clock: Sequence[int]
) -> dict[int, _Point]:
    """Of each other queue the latest act on the same bytes that this one does not know to be complete."""
    wanted: dict[int, _Point] = {}
    for access in act.accesses:
        history = memories.get(access.memory)
        if history is None:
            history = memories[access.memory] = _AccessHistory()
        for earlier in history.touch(access, point):
            other = earlier.queue
            if other != act.queue and other != HOST_QUEUE and earlier.nth > clock[other]:
                best = wanted.get(other)
                if best is None or best.nth < earlier.nth:
                    wanted[other] = earlier
    return wanted


def find_waits(slots: Sequence[Sequence[Act]], queues: int, overlapping: bool = True) -> list[list[list[Need]]]:
    """For every act of every slot's list, what it has to wait for.

    Runs use the slots in turn. Waits are left out where the order is given without them: by the queue, by an earlier
    wait, or because the host knew the other act to be complete before it submitted this one. A need may name an act of
    an earlier run, or of a slot that has not run yet; then there is nothing to wait for.

    Args:
        queues: queues are ``0 .. queues - 1`` and `HOST_QUEUE`.
        overlapping: a run may begin before the last one has ended; if not, a run need not wait for earlier ones.
    """
    memories: dict[object, _AccessHistory] = {}
    size = queues + 1  # the host's clock is the last one, at index -1
    clocks = [[0] * size for _ in range(size)]  # queue -> how many acts of every queue it knows to be complete
    counts = [0] * size
    known: dict[tuple[int, int], list[int]] = {}  # queue and count -> what it knew after so many acts
    result: list[list[list[Need]]] = []
    rounds = 2 if overlapping else 1
    for round_ in range(rounds):
        for slot, acts in enumerate(slots):
            found: list[list[Need]] = []
            for index, act in enumerate(acts):
                queue = act.queue
                clock = clocks[queue]
                if queue != HOST_QUEUE:
                    # It is submitted after everything that the host has done and waited for.
                    clock[:] = map(max, clock, clocks[HOST_QUEUE])
                counts[queue] += 1
                point = _Point(queue, counts[queue], slot, index)
                wanted = _latest_touched(act, point, memories, clock)
                needs: list[Need] = []
                # The latest first: waiting for it may make the others unnecessary.
                for earlier in sorted(wanted.values(), key=lambda p: -sum(known[p.queue, p.nth])):
                    if earlier.nth > clock[earlier.queue]:
                        needs.append(Need(earlier.slot, earlier.act))
                        clock[:] = map(max, clock, known[earlier.queue, earlier.nth])
                clock[queue] = counts[queue]
                known[queue, counts[queue]] = list(clock)
                found.append(needs)
            if round_ == rounds - 1:
                result.append(found)
    return result
