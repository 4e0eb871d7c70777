"""`trace`: records a timeline, as a file for Perfetto (https://ui.perfetto.dev) and other viewers of Chrome's traces.

The format is the JSON object form of Google's "Trace Event Format": complete events (``"X"``) with times in
microseconds, counters (``"C"``) and names of threads (``"M"``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from opweave.tools.writable import check_writable
from opweave.tracing import TRACE, TraceEvent

__all__ = ["Timeline", "trace"]

MEMORY: Final = ("alloc", "free")


class Timeline:
    """The recorded events.

    Attributes:
        events: the events, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def to_json(self) -> dict[str, Any]:
        """The timeline in Chrome's format: a track for each stream, one for events of no stream, counters of memory."""
        tracks: dict[str, int] = {}
        rows: list[dict[str, Any]] = []
        allocated: dict[str, int] = {}
        begin = min((e.start for e in self.events), default=0)
        for event in sorted(self.events, key=lambda e: e.start):
            device = str(event.data.get("device", ""))
            row: dict[str, Any] = {"pid": 1, "ts": (event.start - begin) / 1e3}
            rows.append(row)
            if event.kind in MEMORY:
                change = event.data["bytes"] if event.kind == "alloc" else -event.data["bytes"]
                allocated[device] = allocated.get(device, 0) + change
                row.update(ph="C", name=f"memory of {device}", args={"bytes": allocated[device]})
                continue
            track = " ".join(filter(None, [device or "opweave", str(event.data.get("queue", ""))]))
            if event.kind in ("step", "kernel"):
                track += " steps"  # not nested in their splits, since their clock may be another one
            tid = tracks.setdefault(track, len(tracks) + 1)
            data = {k: v for k, v in event.data.items() if k != "queue"}
            took = (event.end - event.start) / 1e3
            row.update(ph="X", tid=tid, dur=took, name=event.name or event.kind, cat=event.kind, args=data)
        names = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for track, tid in tracks.items()
        ]
        names.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"opweave ({os.getpid()})"}})
        return {"traceEvents": names + rows, "displayTimeUnit": "ms"}


@contextmanager
def trace(path: str | os.PathLike[str] | None = None, *, steps: bool = False) -> Iterator[Timeline]:
    """A ``with`` block that records what happens in this process, and writes it to a file at its end.

    Args:
        path: a ``.json`` file to open in Perfetto or ``chrome://tracing``; ``None``: none is written.
        steps: record every step of devices that work in this process, which costs about a microsecond each. (Devices
            that time their kernels themselves, such as ``opencl`` with ``profiling=True``, report them in any case.)

    Returns:
        The timeline, which grows while the block runs. Work of asynchronous streams is recorded if it is done by the
        end of the block.

    Raises:
        PathError: the file cannot be written; raised before the block runs.
    """
    if path is not None:
        check_writable(path)
    timeline = Timeline()
    before = TRACE.detailed
    TRACE.detailed = before or steps
    try:
        with TRACE.listen(timeline.events.append):
            yield timeline
    finally:
        TRACE.detailed = before
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(timeline.to_json(), file)
