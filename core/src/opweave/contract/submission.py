"""`Submission`: whose turn it is to submit to a stream, and what is still to be submitted."""

from __future__ import annotations

import sys
from threading import RLock
from typing import Any, Final

__all__ = ["Submission"]


class Submission:
    """Whose turn it is to submit, and which calls are still to be made. Streams that are never used at the same time
    can share one.

    Attributes:
        lock: held by the thread whose turn it is.
        rest: the iterator over the calls that are still to be made, ``None``: nothing is being submitted.
        cut: why they were ended early, ``""``: they were not.
    """

    # One small object: among kernels that fill the caches, each place in memory that a run touches takes its time.
    __slots__ = ("cut", "lock", "rest")

    def __init__(self) -> None:
        self.lock: Final = RLock()
        self.rest: Any = None
        self.cut = ""

    def end(self, why: str) -> None:
        """Let the call that is being made be the last one; from any thread."""
        rest = self.rest
        if rest is not None:
            self.cut = self.cut or why
            # Asking a flag before each call would cost more than many a call; an iterator that is at its end is free.
            rest.__setstate__(sys.maxsize)
