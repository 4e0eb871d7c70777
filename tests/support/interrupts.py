"""Storms of interrupts: `KeyboardInterrupt` at random moments, by a timer, as Ctrl-C raises it."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import opweave as ow

__all__ = ["USES", "interrupted", "interrupted_everywhere", "needs_timer", "storm"]

_LIMIT = 30
"""Seconds after which a call hangs."""

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
        # pytest-timeout uses the same timer, so that this function has to notice what hangs.
        signal.setitimer(signal.ITIMER_REAL, _LIMIT)
        if not armed:
            raise AssertionError(f"hangs for {_LIMIT} s after interrupt {arrived}")
        armed = False
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    started = time.monotonic()
    arrived = 0
    try:
        while arrived < times:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, longest))
                deadline = time.monotonic() + _LIMIT
                while armed:
                    with contextlib.suppress(*unharmed):
                        do()
                    # A signal that the system has given to another thread is noticed when this one takes the
                    # interpreter's lock again, which short runs never do.
                    time.sleep(0)
                    assert time.monotonic() < deadline, "no interrupt arrived"
            except KeyboardInterrupt:
                pass
            arrived += 1
            if arrived % every == 0:
                signal.setitimer(signal.ITIMER_REAL, _LIMIT)
                check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1))
    return arrived


def interrupted_everywhere(do: Callable[[], object], check: Callable[[], object]) -> int:
    """Call ``do`` with an interrupt after its first call of a function, then after its second one, and so on until it
    ends without, and ``check`` after each; gives how many interrupts arrived.

    Interrupts come after calls into C and at the beginning of functions written in Python (and where loops jump back,
    which this leaves to `interrupted`). A profile function raises there, always in the same order.
    """
    assert threading.current_thread() is threading.main_thread()
    for count in itertools.count(1):
        left = count

        def interrupt(_: object, event: str, __: object) -> None:
            nonlocal left
            if event in {"call", "c_return"}:
                left -= 1
                if not left:
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            do()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if left > 0:
            return count - 1
        check()
    raise AssertionError


USES = ("run", "submit", "several", "both", "build")
"""How `storm` uses its scheduler."""


def storm(devices: Sequence[str], use: str, times: int, *, parallel: bool = False, seed: int = 0) -> None:
    """Runs on ``devices`` with ``times`` interrupts; now and then, and at the end, all of it must work.

    Args:
        use: one of `USES`.
    """
    x = ow.input("x", (64,))
    ones = np.ones(64, np.float32)
    middle = (x + 1) * 2
    pins = {middle: devices[-1]}
    with ow.Scheduler(devices, parallel=parallel) as scheduler:
        program = scheduler.build(middle - x, pins=pins)
        count = 0

        def do() -> None:
            nonlocal count
            if use == "run":
                program.run(x=ones)
            elif use == "submit":
                program.submit(x=ones).result(30)
            elif use == "several":
                for future in [program.submit(x=ones) for _ in range(3)]:
                    future.result(30)
            elif use == "both":
                future = program.submit(x=ones)
                program.run(x=ones)
                future.result(30)
            else:
                count += 1
                other = scheduler.build(middle - count % 100, pins=pins)
                other.run(x=ones)
                other.close()

        def check() -> None:
            np.testing.assert_array_equal(program.run(x=ones), 3 * ones)
            np.testing.assert_array_equal(program.submit(x=ones).result(30), 3 * ones)
            scheduler.synchronize()

        longest = 3e-3 if use == "build" else 4e-4
        interrupted(times, do, check, every=50, longest=longest, seed=seed)
        check()
