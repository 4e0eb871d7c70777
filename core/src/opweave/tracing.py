"""The sink for what happens: a step ran, a copy was made, memory was taken. Tracing and progress listen here.

Nothing is paid while nobody listens: emitters ask `listening` (a plain attribute) first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from opweave.concurrency import Lock

__all__ = ["TRACE", "Sink", "TraceEvent"]


class TraceEvent(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: ``"alloc"``, ``"free"``, ``"build"`` (a program), and of a run ``"plan"`` (steps of a split), ``"step"``
            (one group of them, if `Sink.detailed`), ``"copy"``, ``"sync"`` (waiting for a stream), ``"observe"``; from
            devices that time their kernels ``"kernel"``.
        name: what it happened to.
        start, end: ``time.perf_counter_ns()`` readings; equal for things without duration. Of an asynchronous device
            without a thread of its own, ``"plan"`` and ``"copy"`` are the times of submitting them.
        data: figures, e.g. ``{"bytes": 4096, "device": "cpu"}``.
    """

    kind: str
    name: str
    start: int
    end: int
    data: dict[str, Any]


class Sink:
    """Hands every `TraceEvent` to every listener, in the thread where it happens and after it has happened.

    What a listener raises comes out of what emitted: a listener can end a run.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: tuple[Callable[[TraceEvent], None], ...] = ()
        self.listening = False
        self.detailed = False
        """Whether somebody wants to hear of every step, which costs a microsecond each."""

    def emit(self, kind: str, name: str, start: int, end: int, **data: Any) -> None:
        event = TraceEvent(kind, name, start, end, data)
        for listener in self._listeners:
            listener(event)

    @contextmanager
    def listen(self, listener: Callable[[TraceEvent], None]) -> Iterator[None]:
        """Within the ``with`` block ``listener`` is called with every event of the process."""
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
