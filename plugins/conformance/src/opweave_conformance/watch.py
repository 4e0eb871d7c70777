"""Timeouts for checks: a check that never ends fails and names the place where it waits; the suite goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import Thread
from traceback import extract_stack
from types import FrameType
from typing import TYPE_CHECKING, Final

from opweave_conformance.result import Result

if TYPE_CHECKING:
    from opweave.contract import Device

__all__ = ["HANGS", "SECONDS", "leave", "within"]

SECONDS: Final = 60.0
"""Default timeout of a check."""

HANGS: Final = "it hangs"
"""How the reason of a check that did not end begins."""

_WAITING: Final = frozenset({"threading", "queue", "concurrent"})


def within(seconds: float, device: Device, ask: Callable[[], Result]) -> Result:
    """The result of ``ask``, called in a thread of its own; if it has not ended after ``seconds``, a failed result that
    says where it waits.

    Streams of ``device`` that were opened meanwhile then count as closed, so that nothing waits for their work.
    """
    known = set(device.live_streams)
    results: list[Result] = []

    def perform() -> None:
        try:
            results.append(ask())
        except BaseException as error:  # a driver that ends the interpreter is no reason to wait for it
            results.append(Result("failed", f"{type(error).__name__}: {error}"))

    thread = Thread(target=perform, name="opweave conformance", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    frame = sys._current_frames().get(thread.ident or 0)
    for stream in set(device.live_streams) - known:
        stream.closed = True
    return Result("failed", f"{HANGS}: after {seconds:g} s it is still in {_location(frame)}")


def _location(frame: FrameType | None) -> str:
    """The innermost function of a thread outside of Python's own locks and queues."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WAITING:
        frame = frame.f_back
    if frame is None:
        return "nothing that Python knows"
    at = extract_stack(frame, 1)[-1]
    return f"{at.name} ({os.path.basename(at.filename)}, line {at.lineno})"


def leave(status: int) -> None:
    """End the process at once, without waiting for threads that hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
