"""`WorkerStream`: a thread that does the work of another stream, so that any device computes while the caller goes
on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import is_finalizing
from typing import TYPE_CHECKING, Any, Final

from opweave.concurrency import Latch, Worker
from opweave.errors import Cancelled, ExecutionError, LifetimeError
from opweave.runtime.reclaim import WORKING
from opweave.runtime.stream import Stream

if TYPE_CHECKING:
    from opweave.contract.step import Call, Group, Step
    from opweave.contract.transfers import Rows
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.plan import Plan
    from opweave.runtime.submission import Event

__all__ = ["WorkerStream"]

ENDS_SECONDS: Final = 0.1
"""How often, in seconds, a thread that waits for a worker checks whether the worker has ended."""


class QueuedEvent:
    """The handle of an event of a `WorkerStream`.

    Attributes:
        sequence: the number of the event.
        passed: set when the thread has done or dropped everything that was queued before the event.
        error: the failure before the event, or ``None``; known once ``passed`` is set.
        inner: if the inner stream is asynchronous: its event for the work before this one.
    """

    __slots__ = ("error", "inner", "passed", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence: Final = sequence
        self.passed: Final = Latch()
        self.error: BaseException | None = None
        self.inner: Event | None = None


class WorkerStream(Stream):
    """Runs the work of another stream on a thread of its own. Made by ``device.open(worker=True)``.

    Submitting only queues. The thread submits to the inner stream, and waits for events of streams of any class. After
    a failure the thread drops queued work until `synchronize` has raised the failure.

    Args:
        inner: the stream that does the work. It must not be used by anything else from now on.

    Raises:
        LifetimeError: ``inner`` is itself a `WorkerStream`.
    """

    has_thread = True

    def __init__(self, inner: Stream) -> None:
        if isinstance(inner, WorkerStream):
            raise LifetimeError(f"{inner!r} already has a thread of its own")
        super().__init__(inner.device)
        self.inner: Final = inner
        self._broken: BaseException | None = None  # the failure since which queued work is dropped
        self._reported = False  # whether a caller has received that failure
        self.worker: Final = Worker(f"opweave {inner.device.name}", _begin)

    def __repr__(self) -> str:
        return f"<WorkerStream of {self.device.name}{', closed' if self.closed else ''}>"

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is that of this stream."""
        return self.worker.is_current

    def call(self, work: Callable[[], Any]) -> None:
        """Queue a function; the thread calls it in stream order. Its result is ignored; an exception fails the
        stream."""
        self.submit_work(partial(self._put, work))

    def wait(self, event: Event) -> None:
        """Make work submitted from now on wait for ``event``, which may be of a stream of any class.

        Raises:
            ExecutionError: the event has failed.
            LifetimeError: the stream is closed or busy.
        """
        self._check_open()
        event.raise_failure()
        if event.stream is not self and not event.done:
            self.call(partial(self._await, event))  # from here on a failure of it is one of this stream, told once
        else:
            event.raise_failure()

    def _await(self, event: Event) -> None:
        handle = event.handle
        if isinstance(handle, QueuedEvent):
            handle.passed.wait_soon()  # devices that compute parts of one value mostly end at the same time
            if handle.error is not None:
                self._raise_as_waiting(event)
            if handle.inner is not None:
                self.inner.wait(handle.inner)
        else:
            self.inner.wait(event)

    @staticmethod
    def _raise_as_waiting(event: Event) -> None:
        """Raise the failure of an event as one of its device, so that it is not taken for one of this stream."""
        try:
            event.synchronize()
        except Exception as error:
            other = event.stream.device.name
            raise ExecutionError(f"work on {other} failed, which this waited for: {error}", device=other) from error

    # --- the queue --------------------------------------------------------------------------------------------------

    def _put(self, work: Callable[[], Any]) -> None:
        self.worker.put(partial(self._do, work))

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            if self._broken is None:
                work()
        except Exception as error:
            self._break(error)
        except BaseException as error:  # does not end this thread; the submitter receives it, as an error like others
            failure = ExecutionError(f"work on {self.device.name} ended with {error!r}", device=self.device.name)
            failure.__cause__ = error
            self._break(failure)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._reported = False
            self._broken = error

    def make_calls(self, plan: Plan, calls: list[Call]) -> None:
        self._put(partial(self.inner.make_calls, plan, calls))

    def owns(self, buffer: Buffer) -> bool:
        return True  # the inner stream handles every buffer that its device reaches

    # --- hooks ------------------------------------------------------------------------------------------------------

    @property
    def lists_operands(self) -> bool:
        return self.inner.lists_operands

    @property
    def shares_calls(self) -> bool:
        return self.inner.shares_calls

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        self.inner.repack = self.repack
        return self.inner._fuse(steps)

    def _warm(self, call: Call) -> None:
        self.inner._warm(call)

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        return self.inner._compile(groups)

    def _compiled(self, plan: Plan) -> None:
        self.inner._compiled(plan)

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        self._put(partial(self.inner.upload, buffer, offset, data))

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        self._put(partial(self.inner.download, buffer, offset, out))

    def _upload_2d(self, buffer: Buffer, offset: int, pitch: int, rows: Rows) -> None:
        self._put(partial(self.inner.upload_2d, buffer, offset, pitch, rows))

    def _download_2d(self, buffer: Buffer, offset: int, pitch: int, out: Rows) -> None:
        self._put(partial(self.inner.download_2d, buffer, offset, pitch, out))

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        self._put(partial(self.inner.copy_from, dst, dst_offset, src, src_offset, size))
        return True

    def _record(self) -> QueuedEvent:
        event = QueuedEvent(self.progress.sequence)
        self.worker.put(partial(self._pass, event))
        return event

    def _pass(self, event: QueuedEvent) -> None:
        # Also after a failure, so that nobody waits for ever.
        event.error = self._broken
        if event.error is None:
            if not self.inner.is_async:
                self.progress.complete(event.sequence)  # so that a later failure does not concern it
            else:
                try:
                    event.inner = self.inner.record()
                except Exception as error:
                    self._break(error)
                    event.error = error
        event.passed.set()

    def _join(self, handle: QueuedEvent) -> None:
        handle.passed.wait()
        if handle.error is not None:
            self._reported = True
            raise handle.error
        if handle.inner is not None:
            handle.inner.synchronize()

    def _query(self, handle: QueuedEvent) -> bool:
        if not handle.passed.is_set():
            return False
        if handle.error is not None:
            self._reported = True
            raise handle.error
        return handle.inner is None or handle.inner.done

    def _synchronize(self) -> None:
        if self.is_current or is_finalizing():
            # The thread cannot wait for itself; what was queued before is done. At interpreter shutdown it has ended.
            return
        event = self._record()
        while not event.passed.wait(ENDS_SECONDS):
            if self.worker.ended.is_set():
                # Collected as garbage together with this stream, whose finalizer waits here; it did what was queued.
                return
        try:
            if event.error is None and event.inner is not None:
                event.inner.synchronize()
        finally:
            if event.error is not None or self.inner.failure is not None:
                self.inner.recover()
                self._broken = None
        if event.error is not None and not self._reported:
            self._reported = True
            raise event.error

    def _abort(self) -> None:
        # Events that are queued alone are no work to end.
        if any(isinstance(job, partial) and job.func == self._do for job in self.worker.jobs.copy()):
            self._break(Cancelled(f"queued work of {self.device.name} was ended by abort()"))
        self.inner.abort()

    def _close(self) -> None:
        self.worker.close()
        if not self.is_current and not is_finalizing():
            self.worker.ended.wait()
        self.inner.close()


def _begin() -> None:
    WORKING.active = True
