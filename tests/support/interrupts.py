"""Storms of interrupts: `KeyboardInterrupt` at random moments, by a timer, as Ctrl-C raises it."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

__all__ = ["interrupted", "needs_timer"]

needs_timer = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")


def interrupted(
    times: int,
    do: Callable[[], object],
    check: Callable[[], object],
    *,
    every: int,
    longest: float = 2e-4,
    seed: int = 0,
    unharmed: tuple[type[BaseException], ...] = (),
) -> int:
    """Call ``do`` over and over, with ``times`` interrupts at random moments of it, and ``check`` without any after
    each ``every`` of them; gives how many arrived.

    Must be called in the main thread, which is where interrupts arrive.

    Args:
        longest: seconds within which the next interrupt comes.
        unharmed: what ``do`` may raise besides, because a run before was interrupted.
    """
    assert threading.current_thread() is threading.main_thread()
    rng = random.Random(seed)
    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    arrived = 0
    try:
        while arrived < times:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, longest))
                deadline = time.monotonic() + 30
                while armed:
                    with contextlib.suppress(*unharmed):
                        do()
                    assert time.monotonic() < deadline, "no interrupt arrived"
            except KeyboardInterrupt:
                pass
            arrived += 1
            if arrived % every == 0:
                check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return arrived
