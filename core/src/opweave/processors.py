"""`Apart`: keeps a thread off the processor of the one that woke it, where both compute at once.

Linux lets a woken thread go on where it ran last, unless another processor is idle. Where other programs use these, two
threads that should compute at once may take turns on one processor in every run: both were once there, and nothing
moves them, because neither of them runs for long. On processors of their own they get their part of each.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from time import perf_counter
from typing import Final

__all__ = ["NOWHERE", "Apart", "current_processor"]

NOWHERE: Final = -1
"""The number of the processor where the system does not tell it."""

AGAIN: Final = 1e-2
"""Seconds between two moves at least: one takes about 50 us, so that even those that do not help cost little."""


class Apart:
    """Keeps the calling thread, which others wake, off their processors."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0.0

    def move_off(self, processor: int) -> None:
        """Move the calling thread to any other processor that it may use, if it runs on this one."""
        if processor == NOWHERE or processor != current_processor() or perf_counter() < self._next:
            return
        self._next = perf_counter() + AGAIN
        with suppress(OSError):  # no right to choose, or processors that were taken from the process meanwhile
            usable = os.sched_getaffinity(0)
            if len(usable) > 1:
                os.sched_setaffinity(0, usable - {processor})
                os.sched_setaffinity(0, usable)


def current_processor() -> int:
    """The number of the processor on which the calling thread runs; `NOWHERE` where the system does not tell it."""
    return _finder()()


@cache
def _finder() -> Callable[[], int]:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            found = ctypes.PyDLL(None).sched_getcpu  # keeps the interpreter's lock: 0.1 us
            found.argtypes = ()
            return found
    return lambda: NOWHERE
