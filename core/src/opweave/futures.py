"""`Future`: a future of `concurrent.futures` whose worker cannot hang when Ctrl-C interrupts a thread that waits for
it.

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

__all__ = ["Future", "Task"]

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


class Task(Generic[T]):
    """A call whose result or exception becomes that of ``future``; a job for a `Worker`."""

    __slots__ = ("_args", "_work", "future")

    def __init__(self, work: Callable[..., T], *args: Any) -> None:
        self.future: Final[Future[T]] = Future()
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
