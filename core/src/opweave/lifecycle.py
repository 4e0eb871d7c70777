"""What happens to schedulers, streams and devices when the process forks, and when it ends.

**In a forked child** only one thread exists, and the queues of drivers belong to the parent. Schedulers and streams
that were made before the fork are closed in the child: using one raises `LifetimeError` at once. Their driver objects
are never freed there, because freeing them could wait for threads that do not exist. Objects that register here
implement this in ``after_fork``. Locks of `opweave.concurrency` are free in the child.

**At exit** `atexit` closes what is still open, while threads still run. If that waits for a kernel that never returns,
the process ends after `exit_timeout` seconds with a line on stderr that names the kernel. Later, during interpreter
shutdown, finalisers do nothing. A ``with`` block over a scheduler that an exception leaves is given as much time.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol
from weakref import WeakSet

from opweave.concurrency import Latch, Lock, Worker, start_thread

__all__ = [
    "INHERITED", "close_at_exit", "close_or_give_up", "exit_timeout", "keep_forever", "notify_after_fork",
    "start_exit_thread",
]  # fmt: skip

INHERITED: Final = "belongs to the process that this one was forked from; make a new one here"


class Inheritable(Protocol):
    def after_fork(self) -> None:
        """Called in a forked child: become unusable without waiting for anything."""


class Open(Protocol):
    def close(self) -> None: ...

    def describe_pending(self) -> str:
        """What closing it currently has to wait for, as text for people; ``""`` if that is not known."""


_INHERITABLE: Final[WeakSet[Any]] = WeakSet()
_OPEN: Final[tuple[WeakSet[Any], WeakSet[Any]]] = WeakSet(), WeakSet()
_LOCK: Final = Lock()
_closer: Worker | None = None


def notify_after_fork(thing: Inheritable) -> None:
    """Call ``thing.after_fork()`` in every forked child, as long as ``thing`` lives."""
    _INHERITABLE.add(thing)


def close_at_exit(thing: Open, *, first: bool = False) -> None:
    """Close ``thing`` at exit if it still lives. Objects that use other registered ones are closed ``first``."""
    _OPEN[not first].add(thing)


def start_exit_thread() -> None:
    """Start the thread that closes objects at exit; no thread can be started then.

    Called before something is made whose closing may wait for work that never returns. Calling twice does nothing.
    """
    global _closer
    with _LOCK:
        if _closer is None:
            _closer = Worker("opweave exit")


def exit_timeout() -> float:
    """Seconds for which the end of the process waits for work: ``OPWEAVE_EXIT_WAIT``, default 10."""
    try:
        return max(0.0, float(os.environ.get("OPWEAVE_EXIT_WAIT", "")))
    except ValueError:
        return 10.0


def close_or_give_up(thing: Open, parts: Iterable[Open]) -> bool:
    """Close ``thing`` on another thread; whatever that raises is dropped.

    Returns:
        Whether it is closed after `exit_timeout` seconds. If not, ``thing`` and its ``parts`` are left as they are, at
        exit too.
    """
    ended = Latch()
    start_thread(_close_all, ([thing],), [], ended, name="opweave close")
    if ended.wait(exit_timeout()):
        return True
    for things in _OPEN:
        things -= {thing, *parts}
    return False


def keep_forever(things: Iterable[object]) -> None:
    """Never free these objects, not even at the end of the process."""
    kept = list(things)
    if not kept:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _at_exit() -> None:
    closing: list[Open] = []
    ended = Latch()
    work = partial(_close_all, _OPEN, closing, ended)
    if _closer is None:
        work()
        return
    _closer.put(work)
    seconds = exit_timeout()
    if not ended.wait(seconds):
        what = next((text for thing in closing[-1:] if (text := describe_pending(thing))), "work in flight")
        print(f"opweave: {what} has not ended {seconds:g} s after the program (OPWEAVE_EXIT_WAIT); "
              "the process ends without it", file=sys.stderr, flush=True)  # fmt: skip


def _close_all(groups: Iterable[Iterable[Open]], closing: list[Open], ended: Latch) -> None:
    for things in groups:
        for thing in list(things):
            closing.append(thing)
            with suppress(Exception):  # failures of work that no one waited for
                thing.close()
    ended.set()


def describe_pending(thing: Open) -> str:
    try:
        return thing.describe_pending()
    except Exception:  # its state may change while it is read
        return repr(thing)


def _in_child() -> None:
    global _closer
    _closer = None
    for thing in list(_INHERITABLE):
        with suppress(Exception):
            thing.after_fork()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
