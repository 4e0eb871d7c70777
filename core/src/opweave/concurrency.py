"""`Lock`, `Latch` and `Worker`: means to work with threads that stay consistent when Ctrl-C interrupts the main thread.

Ctrl-C raises `KeyboardInterrupt` in the main thread after any call and at the beginning of any function written in
Python. The conditions, events and semaphores of `threading` are written in Python: an interrupt inside of their
``__enter__`` leaves their inner lock acquired, and the next thread that needs it hangs. The classes here, and the code
that uses them, therefore follow these rules:

- A lock is acquired and released by one call into C each: ``with lock:`` on a `Lock`. Neither ``@contextmanager`` nor a
  class with ``__enter__`` and ``__exit__`` in Python is placed around the lock: an interrupted generator holds the lock
  as long as something keeps the traceback, and an ``__exit__`` in Python may be interrupted before its first line.
- A thread that waits holds no lock that others need (`Latch`).
- Work is passed to a thread by one ``append`` and one ``put``, both in C. If an interrupt comes between them, the work
  is done together with the next one (`Worker`). Its amount is read from the queue and not counted separately.
- State that has to be undone is set in a ``try`` whose ``finally`` undoes it by assignments only, before any call.

All waiting is done by the operating system; nothing polls, but for the first `SPIN` seconds of `Latch.wait_soon`.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from queue import SimpleQueue
from threading import Thread, get_ident
from time import perf_counter
from typing import Any, Final
from weakref import WeakSet, ref
from zlib import crc32

__all__ = ["Latch", "Lock", "Worker", "start_thread"]


class Lock(RLock):  # type: ignore[misc]  # final in the stubs, not in Python
    """A reentrant lock, used by ``with`` only.

    An interrupt comes either before the lock is acquired, or inside of the ``with`` block, which releases it. In a
    forked child the lock is free even if another thread of the parent held it; if the forking thread held it, the
    child's thread holds it.
    """

    def __init__(self) -> None:
        _LOCKS.add(self)

    if sys.version_info >= (3, 14):  # before 3.14 no interrupt can come between a method in C and the block

        def __enter__(self) -> bool:
            try:
                return self.acquire()
            except BaseException as interrupt:
                try:  # not by `contextlib.suppress`, which could be interrupted itself
                    self.release()
                except RuntimeError:  # interrupted before it acquired the lock
                    raise interrupt from None
                raise


SPIN: Final = 1e-4
"""Seconds for which `Latch.wait_soon` looks before it sleeps. Measured: a thread that sleeps goes on 25 to 130 us after
it was woken, one that looks after 2 to 10."""

PAUSE: Final = bytes(1 << 15)
"""What `Latch.wait_soon` sums up between two looks, which takes 5 to 30 us without the interpreter's lock. With half of
it the threads get into each other's way more often."""


class Latch:
    """A flag that one thread sets once and any number of threads wait for.

    Like `threading.Event` without ``clear``; an interrupt of one waiting thread does not affect the others.
    """

    __slots__ = ("_gate", "_set")

    def __init__(self) -> None:
        self._gate: Final = allocate_lock()
        self._gate.acquire()
        self._set = False

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def set(self) -> None:
        """Release all threads that wait, now or later. Setting twice does nothing."""
        if not self._set:
            # No interrupt and no thread switch comes between these two lines: both come only after calls.
            self._set = True
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set, at most ``timeout`` seconds. Returns whether it is set."""
        if not self._set:
            # Each waiting thread acquires the gate and releases it for the next one. Both happen in one call into C:
            # an interrupt between two calls would leave the gate closed.
            gate = self._gate
            enter = gate.acquire if timeout is None else partial(gate.acquire, True, max(timeout, 0))
            steps: tuple[Callable[[], object], ...] = (enter, gate.release)
            all(map(call, steps))  # the second one only if the first one returns True
        return self._set

    def wait_soon(self) -> None:
        """Wait until the latch is set, which is expected at any moment: look for `SPIN` seconds, then sleep.

        Between two looks other threads need the interpreter's lock, and find it free only if this one is without it for
        longer than with it. ``sleep(0)`` takes 30 to 70 us on Linux, where it waits for a timer, and giving the
        processor away takes milliseconds where other programs want it; so the thread computes what no one needs.
        """
        end = perf_counter() + SPIN
        while not self._set:
            if perf_counter() > end:
                self.wait()
                return
            crc32(PAUSE)


Job = Callable[[], Callable[[], object] | None]
"""A function for a `Worker`. It returns ``None``, or a function to call once the job no longer counts as running."""


class Worker:
    """A daemon thread that does jobs one after the other, in the order of `put`. It ends with `close`, or with the
    worker itself, which an interrupt may keep from its owner.

    A job must not raise. If it returns a function, the thread removes the job from ``jobs`` and then calls that
    function, which typically releases threads that wait for the job.

    Args:
        name: name of the thread.
        begin: a function that the thread calls first.

    Attributes:
        jobs: the jobs that were put and have not ended, the running one first. Whoever appends here calls
            `wake`.
        ended: set when the thread has ended.
    """

    __slots__ = ("__weakref__", "_thread", "_wake", "ended", "jobs")

    def __init__(self, name: str, begin: Callable[[], object] | None = None) -> None:
        self.jobs: Final[deque[Job]] = deque()
        self.ended: Final = Latch()
        self._wake: Final[SimpleQueue[object]] = SimpleQueue()
        # When the worker is gone its weak reference wakes the thread, in one call into C that no interrupt can break.
        gone = ref(self, self._wake.put)
        # A daemon, so that work nobody waits for does not keep the process alive. It has no reference to this object or
        # to what puts jobs.
        self._thread: Final = start_thread(_work, begin, self.jobs, self._wake, self.ended, gone, name=name)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return self._thread.ident == get_ident()

    def put(self, job: Job) -> None:
        """Queue ``job`` behind the jobs that were put before. May be called from any thread; never waits.

        If an interrupt comes inside of this method, the job is either done in its order or not at all.
        """
        self.jobs.append(job)
        self._wake.put(True)

    def wake(self) -> None:
        """Let the thread do ``jobs``: those that were appended there directly, or that an interrupt left."""
        self._wake.put(True)

    def close(self) -> None:
        """End the thread after the jobs that were put. Does not wait for that (see ``ended``)."""
        self._wake.put(None)


def _work(
    begin: Callable[[], object] | None,
    jobs: deque[Job],
    wake: SimpleQueue[object],
    ended: Latch,
    gone: ref[Worker],
) -> None:
    if begin is not None:
        begin()
    while True:
        going = wake.get() is True  # ``None``: closed; ``gone``: there is no worker any more
        while jobs:
            notify = jobs[0]()
            jobs.popleft()  # may drop the last reference to the job, and with it to the stream that it works for
            if notify is not None:
                notify()
            del notify
        if not going:
            break
    ended.set()


def start_thread(work: Callable[..., object], *args: object, name: str) -> Thread:
    """Start a daemon thread that calls ``work(*args)``; returns without waiting for it to begin.

    ``Thread.start`` waits for the new thread by an event of `threading`; an interrupt there would make the new thread
    hang before its first line. So it is called by another thread, which interrupts never reach.
    """
    thread = Thread(target=work, args=args, name=name, daemon=True)
    start_new_thread(thread.start, ())
    return thread


_LOCKS: Final[WeakSet[Lock]] = WeakSet()


def _free_locks() -> None:
    for lock in list(_LOCKS):
        state: Any = lock  # the stubs do not know these two methods
        if not state._is_owned():
            state._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)
