"""`CallerRuns`: the thread that asks for a run's outputs does the work of one stream, in place of that stream's thread.

It would else queue the work of all streams and wait: one thread more than devices that compute, and two more hand-overs
in each run, of which each takes as long as it takes to wake a thread. For the same reason the other threads are woken
when everything is queued, and the calling thread is about to compute: a thread that wakes earlier waits a second time,
for the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from opweave.processors import current_processor
from opweave.runtime.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.runtime.stream import Stream

__all__ = ["CallerRuns", "caller_runs"]

MOST_CALLS: Final = 32
"""A run of more calls saves little by it, and would begin late: when all of them are queued."""


class CallerRuns(NamedTuple):
    """Which streams' work waits until all of a run is queued.

    Attributes:
        stream: the one whose work the calling thread does.
        others: the others that have a thread.
    """

    stream: WorkerStream
    others: tuple[WorkerStream, ...]

    def hold(self) -> None:
        """Begin to queue a run."""
        for stream in (self.stream, *self.others):
            stream.hold()

    def do(self) -> None:
        """Let the others do their work, and do that of the own stream; raises an interrupt of the calling thread."""
        self.stream.expect_help()
        here = current_processor()
        for stream in self.others:
            stream.go_on(here)
        self.stream.help()


def caller_runs(streams: Sequence[Stream], fetching: Sequence[Stream | None], count: int) -> CallerRuns | None:
    """The work of the stream of the last output, or any other, of those that have a thread and compute in it.

    Args:
        fetching: the stream of each output, ``None`` where none is waited for.
        streams: the asynchronous ones of the run. The calling thread must not wait for one before all is queued.
        count: how many calls queue their work.
    """
    if count > MOST_CALLS or len(streams) < 2:
        return None
    threaded = [stream for stream in streams if isinstance(stream, WorkerStream)]
    found = [s for s in (*reversed(fetching), *threaded) if s in threaded and not s.inner.is_async]
    return CallerRuns(found[0], tuple([s for s in threaded if s is not found[0]])) if found else None
