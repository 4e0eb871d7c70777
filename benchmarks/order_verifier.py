"""A judge of the order between queues. It plays the run lists of an overlapping program and shares no code with what
made them.

Every target of such a program has a thread and so is a queue, and so has its copier. The judge keeps for each
queue how far it knows every other one to be done (a vector clock): events remember what their queue knew, waits take it
Each access to bytes (of temporaries, workspaces and leaves) has to come after every earlier access of another queue to
the same bytes, unless both only read. The lists are played several times, each run in the next slot, as runs overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.memory_verifier import byte_range
from opweave.contract import Stream, WorkerStream
from opweave.graph.layout import span
from opweave.scheduler import Program
from opweave.scheduler.plan.splits import StorageView
from opweave.scheduler.program import MemoryMap, Region

__all__ = ["races"]

Clock = dict[int, int]


class _Past(NamedTuple):
    """An access: of the how-manieth act of which queue, to which bytes."""

    queue: int
    nth: int
    start: int
    end: int
    write: bool
    what: str


class _Play:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.clocks: dict[int, Clock] = {}
        self.events: dict[tuple[int, int], Clock] = {}  # the list of events and the index in it
        self.past: dict[object, list[_Past]] = {}
        self.found: list[str] = []

    def act(self, stream: Stream, what: str, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        queue = id(stream)
        clock = self.clocks.setdefault(queue, {})
        clock[queue] = clock.get(queue, 0) + 1
        for regions, write in ((reads, False), (writes, True)):
            for region in regions:
                self._access(queue, clock, region, write, what)

    def _access(self, queue: int, clock: Clock, region: Region, write: bool, what: str) -> None:
        memory, start, end = byte_range(region)
        past = self.past.setdefault(memory, [])
        for other in past:
            apart = other.end <= start or end <= other.start or not (write or other.write)
            if not apart and other.queue != queue and other.nth > clock.get(other.queue, 0):
                self.found.append(f"{what} is not ordered behind {other.what}")
        past.append(_Past(queue, clock[queue], start, end, write, what))

    def wait(self, stream: Stream, events: list[Any], index: int) -> None:
        clock = self.clocks.setdefault(id(stream), {})
        for queue, nth in self.events.get((id(events), index), {}).items():
            clock[queue] = max(clock.get(queue, 0), nth)

    def record(self, stream: Stream, events: list[Any], index: int) -> None:
        self.events[id(events), index] = dict(self.clocks.setdefault(id(stream), {}))


def races(program: Program, runs: int = 5) -> list[str]:
    """Pairs of accesses that nothing orders, over so many runs; empty for a right program.

    Raises:
        ValueError: not a program of a ``Scheduler(parallel=True)``.
    """
    targets = program.partition.assignment.targets
    if not all(isinstance(target.stream, WorkerStream) for target in targets):
        raise ValueError("only programs whose targets all have threads of their own are played")
    play = _Play(program)
    maps = [program.memory_map(slot) for slot in range(program.slots)]
    for run in range(runs):
        slot = run % program.slots
        _one_run(play, program, maps[slot], slot, f"run {run}: ")
    return play.found


def _one_run(play: _Play, program: Program, where: MemoryMap, slot: int, prefix: str) -> None:
    parts, run_list = program.partition, program.run_lists[slot]
    targets = parts.assignment.targets

    def regions(places: Iterable[int]) -> list[Region]:
        return [where.places[p] for p in dict.fromkeys(places) if p in where.places]

    def windows(*views: StorageView) -> list[Region]:
        # The pieces of a concat are copied one by one, each from and to a part of a storage.
        return [
            Region(where.places[v.storage].buffer, where.places[v.storage].offset + v.offset, size)
            for v in views
            if v.storage in where.places and (size := span(v.shape, v.strides, v.dtype))
        ]

    for wait in run_list.before:
        _apply(play, wait)
    for tensor, place in parts.inputs.items():
        stream = targets[parts.arena_of[place]].stream
        play.act(stream, f"{prefix}feeding {tensor.name}", (), regions([place]))
    for call, action in zip(run_list.actions.calls, run_list.actions.actions, strict=True):
        target, split = action.target, action.split
        assert split is not None
        if action.kind in ("event", "sync"):
            _apply(play, call)
        elif action.copy is not None:
            copy = action.copy
            stream = target.copier if copy.cause == "weight-fetch" and target.copier is not None else target.stream
            play.act(stream, f"{prefix}copy of {copy.tensor.name}", windows(*copy.sources), windows(*copy.writes))
        elif action.kind == "plan":
            reads = [s.storage for item in split.steps for s in item.srcs]
            writes = regions([item.out.storage for item in split.steps])
            scratch = [region for (index, _), region in where.workspaces.items() if index == split.index]
            play.act(target.stream, f"{prefix}split {split.index}", regions(reads), writes + scratch)
    for output, operand in zip(parts.graph.outputs, parts.outputs, strict=True):
        if operand is not None:
            fetch = next(f for f in run_list.fetches if f.tensor is output)
            assert fetch.stream is not None
            play.act(fetch.stream, f"{prefix}fetching {output.name}", regions([operand.storage]), ())


def _apply(play: _Play, call: Any) -> None:
    """The recording of an event, or a wait for one, as the run list has bound it."""
    assert isinstance(call, partial)
    stream, events, index = call.args
    assert isinstance(stream, Stream)
    {"_record": play.record, "_wait_in": play.wait}[call.func.__name__](stream, events, index)
