"""What threads share with the main thread: `Lock`, `Event` and `Worker`, which an interrupt cannot leave half used.

Ctrl-C raises `KeyboardInterrupt` in the main thread behind any call and at the beginning of any function written in
Python. The conditions, events and semaphores of `threading` are written in Python: an interrupt inside their
``__enter__`` leaves the lock within them taken, and the next thread that wants it hangs. What is here keeps to these
rules, and so does whoever builds on it:

- A lock is taken and given back by one call into C each: ``with lock:`` on a `Lock`. Neither ``@contextmanager`` nor a
  class with ``__enter__`` and ``__exit__`` in Python stands between the ``with`` and the lock: a generator that was
  interrupted on its way holds the lock for as long as somebody keeps the traceback, and an ``__exit__`` in Python may
  be interrupted before its first line.
- Who waits for something has no lock that others need (`Event`).
- Work is handed over by one ``append`` and one ``put``, both in C; what was appended and never announced is done
  together with what comes next (`Worker`). What has to be known about it, how much there is say, is read from there and
  not counted beside it.
- State that has to be undone is set in a ``try`` whose ``finally`` undoes it by assignments alone, before any call.

All waiting is done by the operating system; nothing here polls.
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
from typing import Any, Final
from weakref import WeakSet, ref

__all__ = ["Event", "Lock", "Worker", "start_thread"]


class Lock(RLock):  # type: ignore[misc]  # final in the stubs, not in Python
    """A reentrant lock, used by ``with`` only.

    An interrupt finds it either not taken, or inside of the ``with`` block that gives it back. In a forked child it is
    free, whichever thread of the parent had it, unless that is the thread that forked.
    """

    def __init__(self) -> None:
        _LOCKS.add(self)

    if sys.version_info >= (3, 14):  # before, nothing can happen between a method in C and the block

        def __enter__(self) -> bool:
            try:
                return self.acquire()
            except BaseException as interrupt:
                try:  # at once: `contextlib.suppress` could be interrupted itself
                    self.release()
                except RuntimeError:  # interrupted while it waited
                    raise interrupt from None
                raise


class Event:
    """Something that happens once: `set` by one thread, waited for by any number of others.

    Like `threading.Event` without ``clear``, and an interrupt of whoever waits has no effect on the others.
    """

    __slots__ = ("_gate", "_set")

    def __init__(self) -> None:
        self._gate: Final = allocate_lock()
        self._gate.acquire()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Let everybody go on who waits, now or later. Setting twice does nothing."""
        if not self._set:
            # No interrupt and no other thread comes between these two: both only come behind calls.
            self._set = True
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened, at most ``timeout`` seconds; gives whether it has."""
        if not self._set:
            # One after the other goes through the gate and opens it for the next. Both in one call into C: between two
            # calls an interrupt would leave it closed.
            gate = self._gate
            enter = gate.acquire if timeout is None else partial(gate.acquire, True, max(timeout, 0))
            steps: tuple[Callable[[], object], ...] = (enter, gate.release)
            all(map(call, steps))  # the second one only if the first one gives True
        return self._set


Job = Callable[[], Callable[[], object] | None]


class Worker:
    """A daemon thread that does jobs one after the other, in the order of `put`. It ends with `close`, or with the
    worker itself, which an interrupt may keep from its owner.

    A job raises nothing. What it returns, unless that is ``None``, is called when the job counts as ended: to tell
    those who wait for it, who then do not find it under way any more.

    Args:
        name: of the thread.
        begin: called in it first.

    Attributes:
        jobs: those that were put and have not ended, the present one first. To be read, not to be changed.
        ended: set when the thread has ended.
    """

    __slots__ = ("__weakref__", "_thread", "_wake", "ended", "jobs")

    def __init__(self, name: str, begin: Callable[[], object] | None = None) -> None:
        self.jobs: Final[deque[Job]] = deque()
        self.ended: Final = Event()
        self._wake: Final[SimpleQueue[object]] = SimpleQueue()
        # When the worker is gone its weak reference wakes the thread, in one call into C that no interrupt can break.
        gone = ref(self, self._wake.put)
        # A daemon: work that nobody waits for does not keep the process. It has no reference to whoever gives it jobs.
        self._thread: Final = start_thread(_work_off, begin, self.jobs, self._wake, self.ended, gone, name=name)

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return self._thread.ident == get_ident()

    def put(self, job: Job) -> None:
        """Have ``job`` called behind all that was put before. From any thread; never waits.

        Interrupted in here, the job is either done in its turn, or not at all.
        """
        self.jobs.append(job)
        self._wake.put(True)

    def close(self) -> None:
        """Let the thread end behind the jobs it has; does not wait for it (see `ended`)."""
        self._wake.put(False)


def _work_off(
    begin: Callable[[], object] | None, jobs: deque[Job], wake: SimpleQueue[object], ended: Event, gone: ref[Worker]
) -> None:
    if begin is not None:
        begin()
    going = True
    while going:
        going = wake.get() is True  # False: closed; ``gone``: there is no worker any more
        while jobs:
            tell = jobs[0]()
            jobs.popleft()  # here its last reference may go, and with it the stream that it works for
            if tell is not None:
                tell()
            del tell
    ended.set()


def start_thread(work: Callable[..., object], *args: object, name: str) -> Thread:
    """A daemon thread that calls ``work(*args)``; this returns without waiting for it to begin.

    ``Thread.start`` waits for the new thread by an event of `threading`: interrupted there, the thread hangs before its
    first line. So a thread that no interrupt reaches starts it.
    """
    thread = Thread(target=work, args=args, name=name, daemon=True)
    start_new_thread(thread.start, ())
    return thread


_LOCKS: Final[WeakSet[Lock]] = WeakSet()


def _free_locks() -> None:
    for lock in list(_LOCKS):
        state: Any = lock  # whose methods for this the stubs do not know
        if not state._is_owned():
            state._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)
