"""Where memory is: spaces of addresses, what memory is for, and waiting for work that may touch it."""

from __future__ import annotations

import enum
from threading import local
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np

from opweave.concurrency import Lock
from opweave.errors import LayoutError
from opweave.lifecycle import expect_waiting

if TYPE_CHECKING:
    from opweave.contract.execution import Stream

__all__ = ["CHANGES", "HOST_SPACE", "Handle", "MemorySpace", "Usage", "add_queue", "as_bytes", "round_up", "settle"]

Handle = Any
"""Whatever the author's ``_alloc`` returned: an address, an object of the driver, an array."""


class Usage(enum.Enum):
    """What a buffer is for; devices may choose a kind of memory by it, the scheduler reads it."""

    ANY = "any"
    WEIGHTS = "weights"
    COMPUTE = "compute"


class MemorySpace:
    """A set of addresses. Two devices share memory when both can reach one space.

    Attributes:
        name: for people; spaces are compared by identity.
        host: the process itself can read and write there.
    """

    __slots__ = ("__weakref__", "host", "name")

    def __init__(self, name: str, *, host: bool = False) -> None:
        self.name: Final = name
        self.host: Final = host

    def __repr__(self) -> str:
        return f"<MemorySpace {self.name}>"


HOST_SPACE: Final = MemorySpace("host", host=True)
"""The memory of this process."""


class Changes:
    """Whether something changed by which programs are planned: the memory of a leaf, what a buffer is for.

    Attributes:
        latest: another object after each change. Programs keep the one that they were built with.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Say that something changed."""
        self.latest = object()


CHANGES: Final = Changes()


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def as_bytes(data: Any, *, writable: bool = False) -> memoryview:
    """The bytes of any contiguous buffer-protocol object as a flat memoryview.

    Raises:
        LayoutError: it shows no bytes, they do not lie in one piece, or may not be written.
    """
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or (writable and not data.flags.writeable):
            raise LayoutError(f"needs a C-contiguous{', writable' * writable} array, not strides {data.strides}")
        return data.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(data)
    except TypeError:
        raise LayoutError(f"needs an array or another object with a buffer, not {type(data).__name__}") from None
    if not view.c_contiguous or (writable and view.readonly):
        raise LayoutError(f"needs a contiguous{', writable' * writable} buffer, not {type(data).__name__}")
    return view.cast("B")


_QUEUES: tuple[ref[Stream], ...] = ()  # replaced, never changed: finalisers look at it without a lock
_QUEUES_LOCK: Final = Lock()


def add_queue(stream: Stream) -> None:
    """Note an asynchronous stream, so that no memory is given back under its work."""
    global _QUEUES
    expect_waiting()
    with _QUEUES_LOCK:
        _QUEUES = (*(known for known in _QUEUES if (other := known()) is not None and not other.closed), ref(stream))


def _queues(space: MemorySpace) -> list[Stream]:
    """The open asynchronous streams whose work may touch ``space``."""
    streams = [stream for known in _QUEUES if (stream := known()) is not None]
    return [s for s in streams if not s.closed and (s.transferring or s.device.reaches(space))]


def busy(space: MemorySpace) -> list[Stream]:
    """Of the streams whose work may touch ``space`` those that are not known to be done with it."""
    return [stream for stream in _queues(space) if stream._over < stream._sequence]


class Working(local):
    """Whether this thread is that of a `WorkerStream`. Such a thread must not wait for others: they may wait for it."""

    active = False


WORKING: Final = Working()


def settle(space: MemorySpace) -> None:
    """Wait for all queued work that may touch ``space``. Failures stay on their streams, for their owners to see."""
    for stream in _queues(space):
        if not (WORKING.active and stream.has_thread):
            stream.settle()
