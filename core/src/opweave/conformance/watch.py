"""A limit on how long a check may take: what waits for ever is found, named and left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import Thread
from traceback import extract_stack
from types import FrameType
from typing import TYPE_CHECKING, Final

from opweave.conformance.result import Result

if TYPE_CHECKING:
    from opweave.contract.device import Device

__all__ = ["HANGS", "SECONDS", "leave", "within"]

SECONDS: Final = 60.0
"""How long a check may take if nobody says otherwise."""

HANGS: Final = "it hangs"
"""How the reason of a check that did not end begins."""

_WAITING: Final = frozenset({"threading", "queue", "concurrent"})


def within(seconds: float, device: Device, ask: Callable[[], Result]) -> Result:
    """What ``ask`` results, on a thread of its own; after ``seconds`` that it hangs, and where.

    Streams of ``device`` that were opened meanwhile are given up: nobody waits for their work any more.
    """
    known = set(device._streams)
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
    for stream in set(device._streams) - known:
        stream._closed = True
    return Result("failed", f"{HANGS}: after {seconds:g} s it is still in {_place(frame)}")


def _place(frame: FrameType | None) -> str:
    """Where a thread waits, without the machinery of waiting itself."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WAITING:
        frame = frame.f_back
    if frame is None:
        return "nothing that Python knows"
    place = extract_stack(frame, 1)[-1]
    return f"{place.name} ({os.path.basename(place.filename)}, line {place.lineno})"


def leave(status: int) -> None:
    """End the process at once: what hangs would keep it from ending."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
