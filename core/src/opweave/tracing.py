"""Trace events: `TRACE` passes what happens (a step ran, a copy was made, memory was allocated) to listeners.

Tracing costs nothing while there is no listener: code that emits events tests the attribute ``listening`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from opweave.concurrency import Lock

__all__ = ["TRACE", "Sink", "TraceEvent"]


class TraceEvent(NamedTuple):
    """Something that happened, with its duration.

    Attributes:
        kind: ``"alloc"``, ``"free"``, ``"build"`` (a program), and of a run ``"plan"`` (steps of a split), ``"step"``
            (one group, if `Sink.detailed`), ``"copy"``, ``"sync"`` (waiting for a stream), ``"observe"`` (passing a
            value to an observer); from devices that time their kernels ``"kernel"``.
        name: name of the buffer type, program, step or transfer concerned.
        start, end: ``time.perf_counter_ns()`` in nanoseconds; equal for events without duration. For an asynchronous
            stream without a thread, ``"plan"`` and ``"copy"`` last from submitting to the return of that call.
        data: further values, e.g. ``{"bytes": 4096, "device": "cpu"}``.
    """

    kind: str
    name: str
    start: int
    end: int
    data: dict[str, Any]


class Sink:
    """Passes every `TraceEvent` to every listener, in the thread where it happened and after it has happened.

    An exception of a listener propagates to the code that emitted the event, so a listener can end a run.

    Attributes:
        listening: whether there is a listener.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: tuple[Callable[[TraceEvent], None], ...] = ()
        self.listening = False
        self.detailed = False
        """Whether to emit an event for every step, which costs a microsecond each; set by listeners."""

    def emit(self, kind: str, name: str, start: int, end: int, **data: Any) -> None:
        """Pass a `TraceEvent` of these values to all listeners."""
        event = TraceEvent(kind, name, start, end, data)
        for listener in self._listeners:
            listener(event)

    @contextmanager
    def listen(self, listener: Callable[[TraceEvent], None]) -> Iterator[None]:
        """Call ``listener`` with every event of the process within the ``with`` block."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
            self.listening = True
        try:
            yield
        finally:
            with self._lock:
                left = list(self._listeners)
                left.remove(listener)
                self._listeners = tuple(left)
                self.listening = bool(left)


TRACE = Sink()
"""The events of this process."""
