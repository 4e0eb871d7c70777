"""Waiting for the work that may use memory, and freeing memory that no object refers to any more after that work.

A finaliser can run at any point of a program: during a build, on a thread that others wait for, or on the thread whose
next call some work waits for. So it never waits. Memory that queued work may use is kept in a list, together with the
sequence number that each stream has to finish first. The next call that allocates, compiles or waits for a stream
frees what can be freed by then.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from contextlib import suppress
from threading import local
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

from opweave.concurrency import Lock
from opweave.contract.memory import Handle, MemorySpace
from opweave.lifecycle import keep_forever, start_exit_thread

if TYPE_CHECKING:
    from opweave.runtime.memory import BufferType
    from opweave.runtime.stream import Stream

__all__ = ["WORKING", "Discarded", "add_queue", "discard", "reclaim", "reclaim_all", "settle"]


# --- the work -------------------------------------------------------------------------------------------------------


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


# --- memory that was discarded --------------------------------------------------------------------------------------


class Discarded(NamedTuple):
    """The memory of a buffer that was discarded and cannot be freed yet.

    Attributes:
        type, handle: the memory.
        owner: the object that keeps imported memory alive, or ``None``.
        waits: the streams whose work may use the memory, each with the sequence number of its latest work.
    """

    type: BufferType
    handle: Handle
    owner: Any
    waits: tuple[tuple[ref[Stream], int], ...]

    @property
    def unused(self) -> bool:
        """Whether all work that may use the memory is complete or has failed."""
        for stream, submitted in self.waits:
            found = stream()
            if found is not None and not found.closed and found.progress.finished < submitted:
                return False
        return True


_DISCARDED: Final[deque[Discarded]] = deque()  # append and popleft are atomic; no lock is needed


class _Reclaiming(local):
    """Whether this thread is inside of `reclaim`: an author's ``_free`` must not start it again."""

    active = False


_RECLAIMING: Final = _Reclaiming()


def discard(type: BufferType, handle: Handle, owner: Any) -> None:
    """Free memory now if no work in flight may use it, else keep it for `reclaim`. Never waits."""
    waits = tuple((ref(stream), stream.progress.sequence) for stream in unfinished_streams(type.space))
    if waits or _RECLAIMING.active:
        _DISCARDED.append(Discarded(type, handle, owner, waits))
    else:
        type._free(handle)


def reclaim() -> None:
    """Free discarded memory that no work uses any more. Exceptions of an author's ``_free`` are suppressed: the caller,
    who allocates or waits for something else, cannot handle them."""
    if _RECLAIMING.active or not _DISCARDED:
        return
    try:
        _RECLAIMING.active = True
        for _ in range(len(_DISCARDED)):
            try:
                memory = _DISCARDED.popleft()
            except IndexError:  # another thread removed it
                break
            if memory.unused:
                with suppress(Exception):
                    memory.type._free(memory.handle)
            else:
                _DISCARDED.append(memory)
    finally:
        _RECLAIMING.active = False


def reclaim_all(space: MemorySpace) -> bool:
    """Wait for the work that may use ``space``, then free the memory that was discarded there.

    Returns:
        Whether there was discarded memory. If not, this returns without waiting.
    """
    if _RECLAIMING.active or not any(memory.type.space is space for memory in _DISCARDED.copy()):
        return False
    settle(space)
    reclaim()
    return True


def _leave_to_parent() -> None:
    """In a forked child: keep the parent's memory referenced for ever, because dropping a handle may free it."""
    keep_forever(_DISCARDED)
    _DISCARDED.clear()


# At exit nothing allocates any more. The driver frees its memory with the process, but an author's ``_free`` may have
# to release something that outlives it.
atexit.register(reclaim)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
