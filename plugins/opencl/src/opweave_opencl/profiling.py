"""`Profiler`: when each kernel began and ended, told to whoever listens to opweave's events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from opweave.tracing import TRACE
from opweave_opencl.queues import complete

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["Profiler"]


class Profiler:
    """The kernels of one stream that ran while somebody listened.

    Each becomes an event of kind ``"kernel"``, named after the operations it computes, with ``device`` and the
    ``kernel``'s own name; times are moved from the device's clock to that of ``time.perf_counter_ns``. It is told when
    somebody waits for it.

    Args:
        device: its name.
        queue: with profiling.
    """

    def __init__(self, device: str, queue: cl.CommandQueue) -> None:
        self._device: Final = device
        self._queue: Final = queue
        self._ran: Final[deque[tuple[str, str, cl.Event]]] = deque()
        self._lock: Final = RLock()  # reentrant: a collection while it is held may free buffers, which waits and tells

    def timed(self, launch: Callable[[], cl.Event], name: str, kernel: str) -> Callable[[], cl.Event]:
        """``launch`` with its event kept while somebody listens."""
        return partial(self._launch, launch, name, kernel)

    def _launch(self, launch: Callable[[], cl.Event], name: str, kernel: str) -> cl.Event:
        event = launch()
        if TRACE.listening:
            self._ran.append((name, kernel, event))
        return event

    def tell(self) -> None:
        """Tell of the kernels that are complete, from any thread; what nobody listens to is forgotten."""
        done: list[tuple[str, str, cl.Event]] = []
        with self._lock:
            while self._ran:
                first = self._ran[0]
                if not complete(first[2]):
                    break
                if self._ran and self._ran[0] is first:
                    done.append(self._ran.popleft())
        if done and TRACE.listening:
            ahead = self._ahead()
            for name, kernel, event in done:
                profile: Any = event.profile
                start, end = profile.start + ahead, profile.end + ahead
                TRACE.emit("kernel", name, start, end, device=self._device, kernel=kernel)

    def _ahead(self) -> int:
        """Nanoseconds by which the host's clock is ahead of the device's, known as well as submitting is fast."""
        import pyopencl as cl

        best: tuple[int, int] | None = None
        for _ in range(3):
            before = perf_counter_ns()
            mark = cl.enqueue_marker(self._queue)
            after = perf_counter_ns()
            mark.wait()
            profile: Any = mark.profile
            found = (after - before, (before + after) // 2 - profile.queued)
            best = found if best is None else min(best, found)
        assert best is not None
        return best[1]
