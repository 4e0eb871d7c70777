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


class _AccessHistory:
    """Who touched which bytes of one memory last: segments, each with its last writer and its readers since."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.writers: list[_Point | None] = []
        self.readers: list[dict[int, _Point]] = []

    def touch(self, access: Access, point: _Point) -> list[_Point]:
        """Record an access; returns the points that it must come after (those of its own queue too)."""
        first, last = self._cover(access.start, access.end)
        earlier: list[_Point] = []
        for i in range(first, last):
            writer = self.writers[i]
            if writer is not None:
                earlier.append(writer)
            if access.write:
                earlier.extend(self.readers[i].values())
            else:
                self.readers[i][point.queue] = point
        if access.write:
            # The segments have the same history from here on and become one.
            self._replace(first, last, [(access.start, access.end, point, {})])
        return earlier

    def _cover(self, start: int, end: int) -> tuple[int, int]:
        """The segments that make up exactly ``start .. end``, cut and added as needed."""
        first = bisect_right(self.ends, start)
        last = bisect_left(self.starts, end)
        pieces: list[tuple[int, int, _Point | None, dict[int, _Point]]] = []
        at, before, after = start, 0, 0
        for i in range(first, last):
            low, high, writer, readers = self.starts[i], self.ends[i], self.writers[i], self.readers[i]
            if at < low:
                pieces.append((at, low, None, {}))
            if low < start:
                pieces.append((low, start, writer, dict(readers)))
                before = 1
            pieces.append((max(low, start), min(high, end), writer, readers))
            if high > end:
                pieces.append((end, high, writer, dict(readers)))
                after = 1
            at = high
        if at < end:
            pieces.append((at, end, None, {}))
        if len(pieces) != last - first or before or after:
            self._replace(first, last, pieces)
        return first + before, first + len(pieces) - after

    def _replace(self, first: int, last: int, pieces: list[tuple[int, int, _Point | None, dict[int, _Point]]]) -> None:
        self.starts[first:last] = [p[0] for p in pieces]
        self.ends[first:last] = [p[1] for p in pieces]
        self.writers[first:last] = [p[2] for p in pieces]
        self.readers[first:last] = [p[3] for p in pieces]


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
