"""Memory spaces, what memory is used for, and waiting for the work that may use a memory space."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from threading import local
from typing import TYPE_CHECKING, Final
from weakref import ref

from opweave.concurrency import Lock
from opweave.lifecycle import start_exit_thread

if TYPE_CHECKING:
    from opweave.contract.memory import MemorySpace, Usage
    from opweave.graph.leaf import Location
    from opweave.graph.tensor import Tensor
    from opweave.runtime.stream import Stream

__all__ = ["CHANGES", "WORKING", "Placements", "add_queue", "settle", "unfinished_streams"]


class Changes:
    """A counter of changes that make built programs outdated: the memory of a leaf, the usage of a buffer.

    Attributes:
        latest: a new object after each change. A program keeps the object that was there when it was built.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Record a change."""
        self.latest = object()


CHANGES: Final = Changes()
"""The changes of this process."""


class Placements:
    """The memory of leaves, and its usage, at the time when this object is made.

    Attributes:
        seen: the change after which this was last known to hold (`CHANGES`).
    """

    __slots__ = ("_known", "_leaves", "seen")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.seen = CHANGES.latest
        self._leaves: Final = [t.leaf for t in tensors if t.leaf is not None and t.leaf.kind != "input"]
        self._known: Final = self._look()

    def hold(self) -> bool:
        """Whether nothing has changed. Leaves are only checked after a change of the leaves of any program."""
        latest = CHANGES.latest
        if latest is not self.seen:
            if not all(map(is_, self._look(), self._known)):
                return False
            self.seen = latest
        return True

    def _look(self) -> list[Location | Usage | None]:
        found: list[Location | Usage | None] = []
        for leaf in self._leaves:
            placement = leaf.placement
            found += (placement, None if placement is None else placement.buffer.usage)
        return found


_QUEUES: tuple[ref[Stream], ...] = ()  # replaced, never modified: finalisers read it without a lock
_QUEUES_LOCK: Final = Lock()


def add_queue(stream: Stream) -> None:
    """Register an asynchronous stream, so that memory is freed only after its work that may use it."""
    global _QUEUES
    start_exit_thread()
    with _QUEUES_LOCK:
        _QUEUES = (*(known for known in _QUEUES if (other := known()) is not None and not other.closed), ref(stream))


def _queues(space: MemorySpace) -> list[Stream]:
    """The open asynchronous streams whose work may use ``space``."""
    streams = [stream for known in _QUEUES if (stream := known()) is not None]
    return [s for s in streams if not s.closed and (s.transferring or s.device.reaches(space))]


def unfinished_streams(space: MemorySpace) -> list[Stream]:
    """The streams with submitted work that may use ``space`` and is not known to be complete or failed."""
    return [stream for stream in _queues(space) if stream.progress.unfinished]


class Working(local):
    """Whether this thread is that of a `WorkerStream`. Such a thread must not wait for others, which may wait for
    it."""

    active = False


WORKING: Final = Working()


def settle(space: MemorySpace) -> None:
    """Wait for all queued work that may use ``space``. Failures are not raised here; they stay on their streams."""
    for stream in _queues(space):
        if not (WORKING.active and stream.has_thread):
            stream.settle()
