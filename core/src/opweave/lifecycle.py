"""What becomes of schedulers, streams and devices when the process forks, and when it ends.

**In a forked child** there is one thread, and the queues of drivers belong to the parent. What was made before the fork
is used up there: it raises `LifetimeError` at once, is closed without anybody being asked, and its driver's objects are
never given back, which could wait for threads that are gone. Whoever tracks something here sees to that in
``_inherit``. Locks of `opweave.concurrency` are free again in the child.

**At exit** what is still open is closed, by `atexit`, while threads still work. Who then waits for a kernel that never
returns is given up after `patience` seconds, with a line on stderr that names it. Afterwards, while the interpreter
takes itself apart, finalisers do nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol
from weakref import WeakSet

from opweave.concurrency import Event, Lock, Worker

__all__ = ["INHERITED", "closed_at_exit", "expect_waiting", "keep_for_ever", "patience", "told_of_forks"]

INHERITED: Final = "belongs to the process that this one was forked from; make a new one here"


class Inheritable(Protocol):
    def _inherit(self) -> None:
        """The process is a forked child: be unusable, and wait for nothing."""


class Open(Protocol):
    def close(self) -> None: ...

    def _under_way(self) -> str:
        """What closing it has to wait for at present, for people; ``""``: nothing in particular."""


_INHERITABLE: Final[WeakSet[Any]] = WeakSet()
_OPEN: Final[tuple[WeakSet[Any], WeakSet[Any]]] = WeakSet(), WeakSet()
_LOCK: Final = Lock()
_closer: Worker | None = None


def told_of_forks(thing: Inheritable) -> None:
    """Have ``thing`` told, while it lives, that it is in a forked child."""
    _INHERITABLE.add(thing)


def closed_at_exit(thing: Open, *, first: bool = False) -> None:
    """Have ``thing`` closed at exit if it still lives; those that close others ``first``."""
    _OPEN[not first].add(thing)


def expect_waiting() -> None:
    """Closing at exit may have to wait for something that never returns, from now on.

    The thread that waits is started now: at exit none can be.
    """
    global _closer
    with _LOCK:
        if _closer is None:
            _closer = Worker("opweave exit")


def patience() -> float:
    """Seconds for which the end of the process waits: ``OPWEAVE_EXIT_WAIT``, else 10."""
    try:
        return max(0.0, float(os.environ.get("OPWEAVE_EXIT_WAIT", "")))
    except ValueError:
        return 10.0


def keep_for_ever(things: Iterable[object]) -> None:
    """Have objects never collected, not even at the end of the process."""
    kept = list(things)
    if not kept:
        return
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _at_exit() -> None:
    closing: list[Open] = []
    ended = Event()
    work = partial(_close_all, closing, ended)
    if _closer is None:
        work()
        return
    _closer.put(work)
    seconds = patience()
    if not ended.wait(seconds):
        what = next((text for thing in closing[-1:] if (text := _under_way(thing))), "work that is under way")
        print(f"opweave: {what} has not ended {seconds:g} s after the program (OPWEAVE_EXIT_WAIT); "
              "the process ends without it", file=sys.stderr, flush=True)  # fmt: skip


def _close_all(closing: list[Open], ended: Event) -> None:
    for things in _OPEN:
        for thing in list(things):
            closing.append(thing)
            with suppress(Exception):  # of work that failed, and nobody asked
                thing.close()
    ended.set()


def _under_way(thing: Open) -> str:
    try:
        return thing._under_way()
    except Exception:  # what it looks at goes on meanwhile
        return repr(thing)


def _in_child() -> None:
    global _closer
    _closer = None
    for thing in list(_INHERITABLE):
        with suppress(Exception):
            thing._inherit()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
