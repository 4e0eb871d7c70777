"""`Future`: one of `concurrent.futures` that an interrupt of its user cannot make its worker hang.

Apart from `opweave.concurrency`, because importing opweave must not pay for importing `concurrent.futures`.
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

from opweave.concurrency import Event

__all__ = ["Future", "Task"]

T = TypeVar("T")

PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
CANCELLED: Final = "CANCELLED"
NOTIFIED: Final = "CANCELLED_AND_NOTIFIED"
FINISHED: Final = "FINISHED"

PATIENCE: Final = 0.25
"""Seconds for which the end of a future waits for `concurrent.futures.wait` and ``as_completed`` to have looked at it.
They need microseconds, unless an interrupt made them leave the future locked."""


class Future(concurrent.futures.Future[T]):
    """Of `concurrent.futures.Future` it keeps the interface and the states, but its waiting and its locking are its
    own: who waits shares no lock with who ends it. ``asyncio.wrap_future``, `concurrent.futures.wait` and
    ``as_completed`` work as with any other.

    One thread, which no interrupt reaches, begins and ends it; the other methods may be called from any thread.
    """

    def __init__(self) -> None:  # without super's, which makes the locks that are not used here
        self._state = PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None
        self._begun = allocate_lock()  # taken once, and never given back, by who begins or cancels it
        self._ended = Event()
        self._callbacks: deque[Callable[[Future[T]], object]] = deque()
        # What the functions of `concurrent.futures` use:
        self._condition: Any = RLock()
        self._waiters: list[Any] = []

    # --- for who waits ----------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """Have it not begun, if it has not; gives whether it is cancelled."""
        if self._begun.acquire(False):
            if self._state == PENDING:  # interrupted or held up before here, its worker says so
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
        """Have ``fn`` called with the future when it is done, by the thread that ends it; at once if it is done."""
        self._callbacks.append(fn)
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                fn = self._callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                fn(self)
            except Exception:
                logging.getLogger("opweave").exception("exception calling callback for %r", self)

    # --- for who does the work --------------------------------------------------------------------------------------

    def set_running_or_notify_cancel(self) -> bool:
        """Begin; ``False``: it was cancelled."""
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
        looked = self._condition.acquire(timeout=PATIENCE)
        self._state = state
        waiters = list(self._waiters)
        if looked:
            self._condition.release()
        self._ended.set()
        if waiters:  # with events of `threading`, on which an interrupt may have left a lock
            start_new_thread(_tell, (waiters, self))
        self._call_back()

    def abandon(self, error: BaseException) -> None:
        """In a forked child, where its worker is not: be done with ``error``, and tell nobody."""
        if not self.done():
            self._exception = error
            self._state = FINISHED
            self._ended.set()


def _tell(waiters: list[Any], future: Future[Any]) -> None:
    for waiter in waiters:
        with suppress(RuntimeError):  # about a lock of a waiter that an interrupt ended
            if future.cancelled():
                waiter.add_cancelled(future)
            elif future.exception() is not None:
                waiter.add_exception(future)
            else:
                waiter.add_result(future)


class Task(Generic[T]):
    """A call whose outcome becomes that of a future; a job for a `Worker`."""

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
