"""`Event`: a point on a stream that other streams and the host can wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from opweave.errors import ExecutionError, OpweaveError

if TYPE_CHECKING:
    from opweave.runtime.stream import Stream

__all__ = ["Epoch", "Event"]


class Epoch:
    """The part of a stream's work between two calls of `Stream.recover`, and its failure if it failed.

    Attributes:
        first: sequence number of the first event that the failure concerns.
        failure: what was raised, or ``None``.
    """

    __slots__ = ("failure", "first")

    def __init__(self) -> None:
        self.first = 0
        self.failure: BaseException | None = None


class Event:
    """A point on a stream. Made by `Stream.record`; complete when all work submitted before it is complete.

    An event of a failed stream has failed, and stays failed after the stream recovers: waiting for it raises what the
    stream raised and never hangs. A failure that is discovered while waiting concerns every event that was not known
    to be complete. All methods may be called from any thread.

    Attributes:
        stream: the stream that recorded it.
        sequence: its number; a stream counts the work that is submitted to it, from 1 on.
    """

    __slots__ = ("__weakref__", "epoch", "handle", "sequence", "stream")

    def __init__(self, stream: Stream, sequence: int, handle: Any) -> None:
        self.stream: Final = stream
        self.sequence: Final = sequence
        self.epoch: Final = stream.progress.epoch
        self.handle = handle

    @property
    def failure(self) -> BaseException | None:
        """Why the work before this event failed, or ``None``."""
        epoch = self.epoch
        return epoch.failure if epoch.first <= self.sequence else None

    @property
    def done(self) -> bool:
        """Whether everything before the event is complete or has failed; does not wait."""
        stream = self.stream
        if self.sequence <= stream.progress.completed or self.failure is not None:
            return True
        try:
            complete = stream._query(self.handle)
        except Exception as error:
            stream.progress.fail(error, self.sequence, self.epoch)
            return True
        if complete:
            stream.progress.complete(self.sequence)
        return complete

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is complete.

        Raises:
            ExecutionError: that work failed; ``__cause__`` is what it raised.
        """
        self.raise_failure()
        stream = self.stream
        if self.sequence > stream.progress.completed:
            try:
                stream._join(self.handle)
            except Exception as error:
                # Which work failed is not known: the failure concerns every event that was not seen complete. Another
                # thread that waited for the same failure may already have made the stream recover.
                stream.progress.fail(error, min(stream.progress.completed + 1, self.sequence), self.epoch)
                if isinstance(error, OpweaveError):
                    raise
                device = stream.device.name
                raise ExecutionError(f"work on {device} failed: {error}", device=device) from error
            stream.progress.complete(self.sequence)
        self.raise_failure()

    def raise_failure(self) -> None:
        failure = self.failure
        if failure is not None:
            raise ExecutionError(
                f"work on {self.stream!r} before this event failed: {failure}", device=self.stream.device.name
            ) from failure

    def __repr__(self) -> str:
        complete = self.sequence <= self.stream.progress.completed
        state = "failed" if self.failure else "done" if complete else "pending"
        return f"<Event {self.sequence} of {self.stream.device.name}, {state}>"
