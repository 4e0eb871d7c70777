"""`Submission`: whose turn it is to submit to a stream, and what is still to be submitted."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Final

from opweave.concurrency import Lock

__all__ = ["Submission"]


class Submission:
    """Whose turn it is to submit, and which calls are still to be made. Streams of one owner can share one.

    Who submits holds ``lock`` and says so in ``thread``. Others look there first, to be refused and not to wait: a lock
    that is tried, and not entered by ``with``, stays locked when an interrupt arrives right behind it.

    Attributes:
        lock: held by the thread whose turn it is.
        thread: that thread, 0: it is nobody's turn.
        rest: the iterator over the calls that are still to be made, ``None``: none are.
        cut: why they were ended early, ``""``: they were not.
    """

    # One small object: among kernels that fill the caches, each place in memory that a run touches takes its time.
    __slots__ = ("cut", "lock", "rest", "thread")

    def __init__(self) -> None:
        self.lock: Final = Lock()
        self.thread = 0
        self.rest: Any = None
        self.cut = ""

    @property
    def taken(self) -> bool:
        """Whether it is another thread's turn."""
        return self.thread not in (0, get_ident())

    def end(self, why: str) -> None:
        """Let the call that is being made be the last one; from any thread."""
        rest = self.rest
        if rest is not None:
            self.cut = self.cut or why
            end_iterator(rest)


def end_iterator(calls: Any) -> None:
    """Bring an iterator over a list to its end. Asking a flag before each call would cost more than many a call."""
    calls.__setstate__(sys.maxsize)
