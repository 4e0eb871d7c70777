"""Memory spaces, what memory is used for, and waiting for the work that may use a memory space."""

from __future__ import annotations

import enum
from threading import local
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np

from opweave.concurrency import Lock
from opweave.errors import LayoutError
from opweave.lifecycle import start_exit_thread

if TYPE_CHECKING:
    from opweave.contract.stream import Stream

__all__ = [
    "CHANGES", "HOST_SPACE", "Handle", "MemorySpace", "Usage", "add_queue", "as_bytes", "round_up", "settle",
    "unfinished_streams",
]  # fmt: skip

Handle = Any
"""Whatever the author's ``_alloc`` returned: an address, an object of the driver, an array."""


class Usage(enum.Enum):
    """What a buffer is used for. A device may choose memory by it; the scheduler keeps work near weights."""

    ANY = "any"
    """Anything."""
    WEIGHTS = "weights"
    """Read-only leaves."""
    COMPUTE = "compute"
    """Inputs, temporaries and results."""


class MemorySpace:
    """A set of addresses. Two devices share memory when both can reach one space.

    Attributes:
        name: shown to people; spaces are compared by identity.
        host: whether the process itself can read and write there.
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


def round_up(n: int, to: int) -> int:
    """The smallest multiple of ``to`` that is not below ``n``."""
    return -(-n // to) * to


def as_bytes(data: Any, *, writable: bool = False) -> memoryview:
    """The bytes of any contiguous buffer-protocol object as a flat memoryview.

    Raises:
        LayoutError: ``data`` has no buffer, is not C-contiguous, or is read-only although ``writable`` is set.
    """
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or (writable and not data.flags.writeable):
            raise LayoutError(f"needs a C-contiguous{', writable' * writable} array, not strides {data.strides}")
        try:
            return data.data.cast("B")  # takes a fifth of the time
        except (TypeError, ValueError):  # an array without elements, or of a type that Python does not have
            return data.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(data)
    except TypeError:
        raise LayoutError(f"needs an array or another object with a buffer, not {type(data).__name__}") from None
    if not view.c_contiguous or (writable and view.readonly):
        raise LayoutError(f"needs a contiguous{', writable' * writable} buffer, not {type(data).__name__}")
    return view.cast("B")


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
    return [stream for stream in _queues(space) if stream._finished < stream._sequence]


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
