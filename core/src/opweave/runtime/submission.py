"""What a stream was given: `Submission`, which thread is submitting and which calls it still has to make; `Progress`,
how far the work is; and `Event`, a point of it that other streams and the host can wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from opweave.concurrency import Lock
from opweave.contract.stream import StreamHooks
from opweave.errors import Cancelled, ExecutionError, LifetimeError, OpweaveError
from opweave.lifecycle import INHERITED
from opweave.runtime.plan import Plan, StepError

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.runtime.stream import Stream

__all__ = ["Epoch", "Event", "StreamState", "Submission"]


class Submission:
    """The submission to a stream that is being made at present. Streams of one owner may share one object.

    A thread that submits holds ``lock`` and writes its identifier to ``thread``. Other threads look at ``thread`` first
    and are refused instead of waiting: a lock that is acquired without waiting, and not entered by ``with``, would stay
    locked if an interrupt arrived directly after that.

    Attributes:
        lock: held by the thread that is submitting.
        thread: identifier of that thread, 0 if there is none.
        calls: the calls that are being made; meaningless while ``remaining`` is ``None``.
        remaining: the iterator over those of them that are still to be made, ``None`` if there are none.
        cancel_reason: why the submission was ended early, ``""`` if it was not.
    """

    # One small object: among kernels that fill the caches, every cache line that a run touches costs time.
    __slots__ = ("calls", "cancel_reason", "lock", "remaining", "thread")

    def __init__(self) -> None:
        self.lock: Final = Lock()
        self.thread = 0
        self.calls: Sequence[Call] = ()
        self.remaining: Iterator[Call] | None = None
        self.cancel_reason = ""

    @property
    def busy(self) -> bool:
        """Whether another thread is submitting."""
        return self.thread not in (0, get_ident())

    def cancel(self, reason: str) -> None:
        """Make no more calls after the current one. May be called from any thread."""
        remaining = self.remaining
        if remaining is not None:
            self.cancel_reason = self.cancel_reason or reason
            # Takes the other calls away from the thread that makes them, within C. Testing a flag before each call
            # costs a tenth of a short one: each of 1,000 additions of 16 floats takes 160 ns by the iterator, 174 with
            # a flag that is tested, 185 by a generator that tests it (AMD Zen 5, Python 3.11).
            deque(remaining, maxlen=0)

    def latest(self) -> tuple[Sequence[Call], int] | None:
        """The calls that are being made and the index of the latest one, ``None`` if there is none. May be called from
        any thread; if a submission begins or ends meanwhile, the index may be that of another list."""
        calls, remaining = self.calls, self.remaining
        if remaining is None:
            return None
        index = len(calls) - sum(1 for _ in copy(remaining)) - 1
        return (calls, index) if index >= 0 else None


T = TypeVar("T")


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


class Progress:
    """How far the work of a stream is.

    Attributes:
        sequence: number of the latest event or other work that was submitted.
        completed: the latest of these that is known to be complete.
        finished: the latest of these that is known to be complete or failed.
        epoch: the work since the last `Stream.recover`, and its failure.
        pending: what queued transfers keep alive, by the number of the first event behind them.
        waiting: held until a failure was noted by those who wait, where each wait is for all work: a driver may tell an
            error once, to the first of them.
    """

    __slots__ = ("completed", "epoch", "finished", "pending", "sequence", "waiting")

    def __init__(self, waiting: AbstractContextManager[Any]) -> None:
        self.waiting: Final = waiting
        self.sequence = self.completed = self.finished = 0
        self.epoch = Epoch()
        self.pending: dict[int, list[Any]] = {}

    @property
    def unfinished(self) -> bool:
        """Whether submitted work is not known to be complete or failed."""
        return self.finished < self.sequence

    def fail(self, error: BaseException, first: int = 0, epoch: Epoch | None = None) -> None:
        """Keep a failure of an epoch (default: the current one). It concerns events from number ``first`` on (default:
        those that are recorded from now on)."""
        epoch = epoch or self.epoch
        if epoch.failure is None:
            epoch.first = first or self.sequence + 1
            epoch.failure = error
        elif first:
            epoch.first = min(epoch.first, first)

    def complete(self, sequence: int) -> None:
        """Everything up to number ``sequence`` is complete; release what its transfers kept alive."""
        self.completed = max(self.completed, sequence)
        self.finished = max(self.finished, sequence)
        if self.pending:
            for first in list(self.pending):  # several threads may be here; each removes only complete ones
                if first <= sequence:
                    self.pending.pop(first, None)


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
            with stream.progress.waiting:
                try:
                    stream._join(self.handle)
                except Exception as error:
                    # It concerns every event that was not seen complete, as which work failed is not known. Another
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


class StreamState(StreamHooks):
    """State of a stream, and the one way in which calls and transfers are submitted to it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # State lives here so that authors need not call super().__init__.
        self = super().__new__(cls)
        self.submission = Submission()
        self.closed = False
        self.progress = Progress(Lock() if type(self)._join is StreamHooks._join else nullcontext())
        self._staging_memory = memoryview(b"")
        self._inherited = False
        return self

    submission: Submission
    closed: bool
    progress: Progress
    _staging_memory: memoryview
    _inherited: bool  # from the parent process, see `opweave.lifecycle`

    @property
    def is_async(self) -> bool:
        """Whether work may still be in flight when a call returns."""
        return type(self)._synchronize is not StreamHooks._synchronize

    @property
    def ending(self) -> bool:
        """Whether the work that is being submitted was asked to end early: by `Stream.abort`, or ``Scheduler.cancel``.
        Calls that take long may look, from any thread."""
        return bool(self.submission.cancel_reason)

    def fail(self, error: Exception) -> None:
        """Note that queued work failed: all events that are not known to be complete have, and later ones do until
        `Stream.recover`. For an author's ``_join`` whose driver tells an error once, to the thread that asks first:
        asking and this happen under one lock, as what ``_join`` raises is noted only after it."""
        self.progress.fail(error, self.progress.completed + 1)

    @classmethod
    def uncancellable(cls) -> str:
        """What of its work cannot be ended early, in words; ``""`` where a plan ends after its present step."""
        if cls._abort is not StreamHooks._abort:
            return ""
        if cls._synchronize is not StreamHooks._synchronize:
            return "what was queued goes on to its end"
        if cls._compile_functional is not StreamHooks._compile_functional:
            return "steps that were compiled to one call go on to its end"
        return ""

    def _check_open(self) -> None:
        if self.closed:
            self.check_inherited()
            raise LifetimeError(f"{self!r} was closed")

    def check_inherited(self) -> None:
        if self._inherited:
            raise LifetimeError(f"{self!r} {INHERITED}")

    def after_fork(self) -> None:
        # This process cannot know whether queued work was done: events of it fail, so that nobody waits for them.
        self._inherited = self.closed = True
        self.progress.fail(LifetimeError(f"{self!r} {INHERITED}"), self.progress.completed + 1)

    def busy_error(self) -> LifetimeError:
        return LifetimeError(f"another thread is submitting to {self!r}; one thread at a time submits to a stream")

    def make_calls(self, plan: Plan, calls: list[Call]) -> None:
        """Make the calls of a plan. The caller holds the lock of ``submission``."""
        submission = self.submission
        before, outer, outer_calls = submission.thread, submission.remaining, submission.calls
        remaining = iter(calls)
        try:
            submission.thread = get_ident()
            if outer is None:  # else this plan is a part of a run
                submission.cancel_reason = ""
            submission.calls, submission.remaining = calls, remaining
            self._run(remaining)
            if submission.cancel_reason:
                raise Cancelled(submission.cancel_reason)
        except BaseException as error:
            if submission.cancel_reason and isinstance(error, Exception) and not isinstance(error, Cancelled):
                # A call that was ended in the middle raises what its library does.
                cancelled = Cancelled(submission.cancel_reason)
                self.progress.fail(cancelled)
                raise cancelled from error
            index = len(calls) - sum(1 for _ in remaining) - 1
            if not isinstance(error, Exception) or isinstance(error, Cancelled):
                self.progress.fail(error)
                raise
            known = len(calls) == plan.size and index >= 0 and not submission.cancel_reason
            failure = self.step_error(plan, index if known else None, error)
            self.progress.fail(failure.error)
            raise failure from failure.error
        finally:
            submission.calls, submission.remaining = outer_calls, outer
            submission.thread = before

    def step_error(self, plan: Plan, step: int | None, error: Exception) -> StepError:
        """The error to raise for what a call of ``plan`` raised."""
        translated = self._translate(error)
        if translated is not error:
            translated.__cause__ = error
        failure = StepError(step, translated, plan)
        failure.__cause__ = translated
        return failure

    def _check_can_submit(self) -> None:
        """Raise `LifetimeError` if the stream is closed, or busy with a submission of another thread."""
        self._check_open()
        if self.submission.busy:
            raise self.busy_error()

    def submit_work(self, work: Callable[[], T], *kept: object, submits: bool = True, counts: bool = True) -> T:
        """Call ``work``, which submits to the stream, and return its result.

        A function and not a context manager, whose ``__enter__`` and ``__exit__`` could be interrupted; see
        `opweave.concurrency`.

        Args:
            kept: objects to keep alive until the work is complete, if it was queued (``work`` did not return
                ``False``).
            submits: whether an exception puts the stream into the failed state.
            counts: whether to give the work the next sequence number.
        """
        self._check_can_submit()
        submission = self.submission
        keeps = bool(kept) and self.is_async
        with submission.lock:
            before = submission.thread
            try:
                submission.thread = get_ident()
                result = work()
                # Only after queueing: `settle` relies on everything in the table being queued.
                if keeps and result is not False:
                    self.progress.pending.setdefault(self.progress.sequence + 1, []).append(kept)
                return result
            except Exception as error:
                if not submits:
                    raise
                self.progress.fail(error)
                if isinstance(error, OpweaveError):
                    raise
                raise ExecutionError(f"{self.device.name} failed: {error}", device=self.device.name) from error
            except BaseException:  # an interrupt; whether the work was queued is not known
                if keeps:
                    self.progress.pending.setdefault(self.progress.sequence + 1, []).append(kept)
                raise
            finally:
                submission.thread = before
                self.progress.sequence += submits and counts
