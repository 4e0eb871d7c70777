"""`WorkerStream`: a thread that works off another stream's work, so that any device can run beside the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import is_finalizing
from typing import TYPE_CHECKING, Any, Final

from opweave import concurrency
from opweave.concurrency import Worker
from opweave.contract.execution import Stream
from opweave.contract.space import WORKING
from opweave.errors import Cancelled, ExecutionError, LifetimeError

if TYPE_CHECKING:
    from opweave.contract.buffer import Buffer
    from opweave.contract.execution import Event, Plan
    from opweave.contract.step import Call, Group, Step

__all__ = ["WorkerStream"]


class Mark:
    """A place in a worker's queue: reached once everything before it was worked off or dropped."""

    __slots__ = ("error", "event", "reached", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence: Final = sequence
        self.reached: Final = concurrency.Event()
        self.error: BaseException | None = None
        self.event: Event | None = None  # where the inner stream is asynchronous too: its own mark


class WorkerStream(Stream):
    """Runs the work of another stream on a thread of its own. Made by ``device.open(worker=True)``.

    Submitting only queues; the thread submits to the inner stream and waits for other streams' marks, of whatever
    class. Behind a failure queued work is dropped until `synchronize` has told of it.

    Args:
        inner: what does the work. It belongs to the worker from now on.
    """

    has_thread = True

    def __init__(self, inner: Stream) -> None:
        if isinstance(inner, WorkerStream):
            raise LifetimeError(f"{inner!r} already has a thread of its own")
        super().__init__(inner.device)
        self.inner: Final = inner
        self._broken: BaseException | None = None
        self._told = False
        self._worker: Final = Worker(f"opweave {inner.device.name}", _begin)

    def __repr__(self) -> str:
        return f"<WorkerStream of {self.device.name}{', closed' if self._closed else ''}>"

    @property
    def is_current(self) -> bool:
        """Whether the caller is the worker's own thread."""
        return self._worker.is_current

    def call(self, work: Callable[[], Any]) -> None:
        """Queue any function; it is called on the thread, in stream order."""
        self._submit(partial(self._put, work))

    def wait(self, event: Event) -> None:
        """Let later work wait for ``event``, which may be of a stream of any class; raises at once if it has failed."""
        self._check_open()
        event._raise()
        if event.stream is not self and not event.done:
            self.call(partial(self._await, event))
        event._raise()

    def _await(self, event: Event) -> None:
        handle = event._handle
        if isinstance(handle, Mark):
            handle.reached.wait()
            if handle.error is not None:
                event.synchronize()  # which raises
            if handle.event is not None:
                self.inner.wait(handle.event)
        else:
            self.inner.wait(event)

    # --- the queue --------------------------------------------------------------------------------------------------

    def _put(self, work: Callable[[], Any]) -> None:
        self._worker.put(partial(self._do, work))

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            if self._broken is None:
                work()
        except Exception as error:
            self._break(error)
        except BaseException as error:  # it ends no thread of ours, and is the submitter's to hear of, once
            told = ExecutionError(f"work on {self.device.name} ended with {error!r}", device=self.device.name)
            told.__cause__ = error
            self._break(told)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._told = False
            self._broken = error

    def _launch(self, plan: Plan, calls: list[Call]) -> None:
        self._put(partial(self.inner._launch, plan, calls))

    def _owns(self, buffer: Buffer) -> bool:
        return True  # the inner stream takes whatever its device reaches

    # --- what a stream can do ---------------------------------------------------------------------------------------

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        return self.inner._fuse(steps)

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        return self.inner._compile(groups)

    def _compiled(self, plan: Plan) -> None:
        self.inner._compiled(plan)

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        self._put(partial(self.inner.upload, buffer, offset, data))

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        self._put(partial(self.inner.download, buffer, offset, out))

    def _record(self) -> Mark:
        mark = Mark(self._sequence)
        self._worker.put(partial(self._arrive, mark))
        return mark

    def _arrive(self, mark: Mark) -> None:
        # Reached also behind a failure: nobody hangs.
        mark.error = self._broken
        if mark.error is None:
            if not self.inner.is_async:
                self._reach(mark.sequence)  # a later failure does not concern it, whether somebody asked or not
            else:
                try:
                    mark.event = self.inner.record()
                except Exception as error:
                    self._break(error)
                    mark.error = error
        mark.reached.set()

    def _join(self, handle: Mark) -> None:
        handle.reached.wait()
        if handle.error is not None:
            self._told = True
            raise handle.error
        if handle.event is not None:
            handle.event.synchronize()

    def _query(self, handle: Mark) -> bool:
        if not handle.reached.is_set():
            return False
        if handle.error is not None:
            self._told = True
            raise handle.error
        return handle.event is None or handle.event.done

    def _synchronize(self) -> None:
        if self.is_current or is_finalizing():
            return  # it cannot wait for itself, where everything before is done; nor for a thread that has been ended
        mark = self._record()
        mark.reached.wait()
        try:
            if mark.error is None and mark.event is not None:
                mark.event.synchronize()
        finally:
            if mark.error is not None or self.inner.failure is not None:
                self.inner.recover()
                self._broken = None
        if mark.error is not None and not self._told:
            self._told = True
            raise mark.error

    def _abort(self) -> None:
        # Marks alone are nothing that could be ended.
        if any(isinstance(job, partial) and job.func == self._do for job in self._worker.jobs.copy()):
            self._break(Cancelled(f"queued work of {self.device.name} was ended by abort()"))
        self.inner.abort()

    def _close(self) -> None:
        self._worker.close()
        if not self.is_current and not is_finalizing():
            self._worker.ended.wait()
        self.inner.close()


def _begin() -> None:
    WORKING.active = True
