"""`BoundLaunch`: what a client runs again and again by one message: bytes are written, plans run, bytes read."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Buffer, Plan, Stream
from opweave.errors import FormatError, LifetimeError
from opweave_remote.wire import Kind, encode, fields

if TYPE_CHECKING:
    from opweave_remote.server.session import Session
    from opweave_remote.wire import FrameReader

__all__ = ["BoundLaunch"]


class BoundLaunch:
    """A launch that was bound for a stream. It can no longer be run once a buffer that it uses was freed.

    Args:
        session: of the client, whose buffers these are.
        stream: runs the plans.
        plans: what runs.
        writes, reads: rows of buffer, offset and number of bytes, from the wire.

    Attributes:
        size: bytes that come with each message.

    Raises:
        FormatError: rows of other types, or more bytes than one message takes.
        LifetimeError, BoundsError, HazardError: a range that cannot be written or read.
    """

    __slots__ = (
        "__weakref__",
        "_answer",
        "_ended",
        "_plans",
        "_reads",
        "_sources",
        "_stream",
        "_targets",
        "_writes",
        "size",
    )

    when_idle: Final = None

    def __init__(self, session: Session, stream: Stream, plans: Sequence[Plan], writes: Any, reads: Any) -> None:
        self._stream: Final = stream
        self._plans: Final = plans
        self._ended = ""
        self._answer: tuple[int, bytes] = -1, b""
        self._writes: Final = _ranges(session, writes, write=True)
        self._reads: Final = _ranges(session, reads, write=False)
        self.size: Final = sum([size for _, _, size in self._writes])
        # Memory that the process reaches is received into, and sent from, where it lies.
        straight = not stream.is_async and all(b.is_host for b, _, _ in (*self._writes, *self._reads))
        self._targets: list[memoryview] | None = None
        self._sources: list[memoryview] = []
        if straight:
            self._targets = [b.host_bytes(offset, size) for b, offset, size in self._writes]
            self._sources = [b.host_bytes(offset, size) for b, offset, size in self._reads]
        for buffer in {b for b, _, _ in (*self._writes, *self._reads)}:
            buffer.add_dependent(self)

    def run(self, reader: FrameReader) -> tuple[Sequence[memoryview], float]:
        """Take the message's data, run the plans, and wait for them. Returns what was read, and the seconds it took.

        Raises:
            LifetimeError: a buffer or a plan is gone.
            OpweaveError: of the plans.
        """
        if self._ended:
            reader.skip(self.size)
            raise LifetimeError(self._ended)
        if self._targets is not None:
            reader.scatter(self._targets)
            start = perf_counter()
            for plan in self._plans:
                plan.run()
            return self._sources, perf_counter() - start
        stream, staging = self._stream, [np.empty(size, np.uint8).data for _, _, size in self._writes]
        reader.scatter(staging)
        start = perf_counter()
        for (buffer, offset, _), data in zip(self._writes, staging, strict=True):
            stream.upload(buffer, offset, data)
        for plan in self._plans:
            plan.run()
        out = [np.empty(size, np.uint8).data for _, _, size in self._reads]
        for (buffer, offset, _), data in zip(self._reads, out, strict=True):
            stream.download(buffer, offset, data)
        stream.record().synchronize()
        return out, perf_counter() - start

    def answer(self, ticket: int) -> bytes:
        """The frame in front of what was read, as the answer to a message."""
        if self._answer[0] != ticket:
            self._answer = ticket, encode(Kind.DATA, ticket, size=sum([size for _, _, size in self._reads]))
        return self._answer[1]

    def invalidate(self, why: str) -> None:
        """Called by a buffer when its memory is given back."""
        self._ended = why
        self._targets, self._sources = None, []  # views of memory keep it

    keeps_copies: Final = False
    """The plans may do."""

    def refresh(self, token: object) -> None:
        """Called when read-only memory was written: the plans are dependents too, and do what is needed."""

    def give_up(self) -> None:
        """Called when the memory is replaced, after `invalidate`: there is nothing else to release."""


def _ranges(session: Session, rows: Any, *, write: bool) -> list[tuple[Buffer, int, int]]:
    if type(rows) is not list:
        raise FormatError("ranges of bytes are a list")
    found = []
    for row in rows:
        number, offset, size = fields(row, "uuu", "a range of bytes")
        buffer = session.buffer(number)
        buffer.check(offset, size, write=write)
        found.append((buffer, offset, size))
    if sum([size for _, _, size in found]) > session.limits.message:
        raise FormatError("these ranges are too many bytes for one message")
    return found
