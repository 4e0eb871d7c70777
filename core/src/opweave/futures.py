"""`Future`: a future of `concurrent.futures` whose worker cannot hang when Ctrl-C interrupts a thread that waits for
it; `RunFuture`: that of a run, which can be cancelled at any time before its end.

A module of its own, so that ``import opweave`` does not import `concurrent.futures`.
"""

from __future__ import annotations

import concurrent.futures
import logging
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Any, Final, Generic, TypeVar

from opweave.concurrency import Latch
from opweave.errors import Cancelled

__all__ = ["Future", "RunCancelled", "RunFuture", "RunTask", "Task"]

T = TypeVar("T")

PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
CANCELLED: Final = "CANCELLED"
NOTIFIED: Final = "CANCELLED_AND_NOTIFIED"
FINISHED: Final = "FINISHED"

OBSERVER_TIMEOUT: Final = 0.25
"""Seconds for which ending a future waits for `concurrent.futures.wait` and ``as_completed`` to release its condition.
They hold it for microseconds, unless an interrupt made them leave it locked."""


class Future(concurrent.futures.Future[T]):
    """A `concurrent.futures.Future` with the same interface and states, but its own waiting and locking: a thread that
    waits shares no lock with the thread that ends the future. ``asyncio.wrap_future``, `concurrent.futures.wait` and
    ``as_completed`` work as usual.

    One thread, which interrupts never reach, begins and ends it; the other methods may be called from any thread.
    """

    def __init__(self) -> None:  # does not call super's, which makes a condition that is not used here
        self._state = PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None
        self._begun = allocate_lock()  # acquired once, by the thread that begins or cancels it, and never released
        self._ended = Latch()
        self._callbacks: deque[Callable[[Future[T]], object]] = deque()
        # What the functions of `concurrent.futures` use:
        self._condition: Any = RLock()
        self._waiters: list[Any] = []

    # --- for threads that wait --------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """Cancel the work if it has not begun. Returns whether the future is cancelled."""
        if self._begun.acquire(False):
            if self._state == PENDING:  # if this thread is interrupted before this line, the worker sets the state
                self._state = CANCELLED
            self._ended.set()
            self._call_back()
        return self.cancelled()

    def cancelled(self) -> bool:
        return self._state in (CANCELLED, NOTIFIED)

    def running(self) -> bool:
        return self._state == RUNNING

    def done(self) -> bool:
        return self._state in (CANCELLED, NOTIFIED, FINISHED)

    def result(self, timeout: float | None = None) -> T:
        """What the work returned or raised; waits for it.

        Raises:
            TimeoutError: it has not ended in ``timeout`` seconds.
            CancelledError: it was cancelled.
        """
        error = self.exception(timeout)
        if error is None:
            return self._result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del self, error  # the traceback holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the work raised, or ``None``; waits for it, and raises, as `result`."""
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._state != FINISHED:
            raise CancelledError
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn(future)`` when the future is done, in the thread that ends it; at once if it is already done."""
        self._callbacks.append(fn)
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                fn = self._callbacks.popleft()
            except IndexError:  # another thread removed it
                return
            try:
                fn(self)
            except Exception:
                logging.getLogger("opweave").exception("exception calling callback for %r", self)

    # --- for the thread that does the work --------------------------------------------------------------------------

    def set_running_or_notify_cancel(self) -> bool:
        """Begin the work. Returns ``False`` if it was cancelled and must not be done."""
        if self._begun.acquire(False):
            self._state = RUNNING
            return True
        if self._state in (PENDING, CANCELLED):
            self._end(NOTIFIED)
        return False

    def set_result(self, result: T) -> None:
        self._check_not_done()
        self._result = result
        self._end(FINISHED)

    def set_exception(self, exception: BaseException | None) -> None:
        self._check_not_done()
        self._exception = exception
        self._end(FINISHED)

    def _check_not_done(self) -> None:
        if self.done():
            raise InvalidStateError(f"{self._state}: {self!r}")

    def _end(self, state: str) -> None:
        acquired = self._condition.acquire(timeout=OBSERVER_TIMEOUT)
        self._state = state
        waiters = list(self._waiters)
        if acquired:
            self._condition.release()
        self._ended.set()
        if waiters:  # on a thread of its own: they use events of `threading`, which an interrupt may have left locked
            start_new_thread(_notify_waiters, (waiters, self))
        self._call_back()

    def abandon(self, error: BaseException) -> None:
        """In a forked child, where its worker does not exist: end with ``error``, without calling callbacks."""
        if not self.done():
            self._exception = error
            self._state = FINISHED
            self._ended.set()


def _notify_waiters(waiters: list[Any], future: Future[Any]) -> None:
    for waiter in waiters:
        with suppress(RuntimeError):  # from the lock of a waiter that was ended by an interrupt
            if future.cancelled():
                waiter.add_cancelled(future)
            elif future.exception() is not None:
                waiter.add_exception(future)
            else:
                waiter.add_result(future)


class RunCancelled(Cancelled, CancelledError):
    """`opweave.Cancelled`, which those who know the futures of `concurrent.futures` alone catch too."""


class RunFuture(Future[T]):
    """The future of a run. Unlike that of other work it can be cancelled after the work has begun: it is done at once,
    and what the work still returns or raises is dropped.

    Args:
        interrupt: called with the future when `cancel` has cancelled it: ends the work early, as far as that is
            possible. What it changes has changed before anybody who waits for the future goes on.
    """

    def __init__(self, interrupt: Callable[[RunFuture[T]], object]) -> None:
        super().__init__()
        self._interrupt: Callable[[RunFuture[T]], object] | None = interrupt
        self._decided = allocate_lock()  # acquired once, by whoever cancels the future or sets its result
        self._dropped_state = ""  # the final state, once it was cancelled

    @property
    def decided(self) -> bool:
        """Whether it was cancelled, or has its result."""
        return self._decided.locked()

    def cancel(self) -> bool:
        """Cancel the run, whether it has begun or not; `result` then raises `opweave.Cancelled`. Returns whether it is
        cancelled: ``False`` where it had ended before."""
        if self.drop():
            try:
                if self._interrupt is not None:
                    self._interrupt(self)
            finally:
                self._end_dropped(NOTIFIED, "the run was ended by Future.cancel()")
        return self.cancelled()

    def drop(self) -> bool:
        """Take the result away from the work. Returns whether it had none yet; the caller then calls `end_with`."""
        return self._decided.acquire(False)

    def end_with(self, reason: str) -> None:
        """End after `drop`, with the exception `opweave.Cancelled`."""
        self._end_dropped(FINISHED, reason)

    def _end_dropped(self, state: str, reason: str) -> None:
        self._begun.acquire(False)  # where it has not begun, it never will
        self._exception = RunCancelled(reason)
        self._dropped_state = state
        self._end(state)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the run raised, or ``None``; waits for it, and raises, as `result`."""
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._state != FINISHED:
            raise self._exception or CancelledError()
        return self._exception

    # --- for the thread that does the work --------------------------------------------------------------------------

    def set_running_or_notify_cancel(self) -> bool:
        """Begin the work. Returns ``False`` if it was cancelled and must not be done."""
        if not self._begun.acquire(False):
            return False
        self._state = RUNNING
        if self._dropped_state:  # meanwhile
            self._state = self._dropped_state
        return True

    def set_result(self, result: T) -> None:
        self._set(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        self._set(None, exception)

    def _set(self, result: T | None, exception: BaseException | None) -> None:
        self._interrupt = None  # a future that is kept keeps no executor alive
        if self._decided.acquire(False):
            self._result, self._exception = result, exception
            self._end(FINISHED)
        else:
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """End where an interrupt kept the thread that cancelled from it."""
        if not self._dropped_state and not self.done():
            self._end_dropped(NOTIFIED, "the run was ended by cancel()")


class Task(Generic[T]):
    """A call whose result or exception becomes that of ``future``; a job for a `Worker`."""

    __slots__ = ("_args", "_work", "future")

    def __init__(self, work: Callable[..., T], *args: Any) -> None:
        self.future: Future[T] = Future()
        self._work = work
        self._args = args

    def __call__(self) -> Callable[[], object] | None:
        future = self.future
        if not future.set_running_or_notify_cancel():
            return None
        try:
            return partial(future.set_result, self._work(*self._args))
        except BaseException as error:
            return partial(future.set_exception, error)
        finally:
            del self, future  # the error's traceback holds this frame


class RunTask(Task[T]):
    """A run, or the end of one: a call whose first argument is the future.

    Args:
        interrupt: of its `RunFuture`.

    Attributes:
        run: what the executor knows of it.
    """

    __slots__ = ("run",)
    future: RunFuture[T]

    def __init__(
        self, interrupt: Callable[[RunFuture[T]], object], run: object, work: Callable[..., T], *args: Any
    ) -> None:
        self.future = RunFuture(interrupt)
        self._work = work
        self._args = (self.future, *args)
        self.run: Final = run
