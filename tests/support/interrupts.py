"""Storms of interrupts: `KeyboardInterrupt` at random moments, by a timer, as Ctrl-C raises it."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import opweave as ow

__all__ = ["USES", "interrupted", "needs_timer", "storm"]

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
