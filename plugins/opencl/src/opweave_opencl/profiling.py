"""`Profiler`: trace events that say when each kernel of a stream began and ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from opweave.tracing import TRACE
from opweave_opencl.clock import DeviceClock
from opweave_opencl.events import complete

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["Profiler"]


class Profiler:
    """The kernels of one stream that ran while tracing was on.

    Each becomes an event of kind ``"kernel"``, named after the operations it computes, with ``device`` and the
    ``kernel``'s own name; times are converted from the device's clock to that of ``time.perf_counter_ns``. Events are
    emitted when somebody waits for the work.

    Args:
        device: its name.
        clock: the device's.
    """

    def __init__(self, device: str, clock: DeviceClock) -> None:
        self._device: Final = device
        self._clock: Final = clock
        self._ran: Final[deque[tuple[str, str, cl.Event]]] = deque()
        self._lock: Final = Lock()

    def timed(self, launch: Callable[[], cl.Event], name: str, kernel: str) -> Callable[[], cl.Event]:
        """``launch``, whose OpenCL event is kept while tracing is on."""
        return partial(self._launch, launch, name, kernel)

    def _launch(self, launch: Callable[[], cl.Event], name: str, kernel: str) -> cl.Event:
        event = launch()
        if TRACE.listening:
            self._ran.append((name, kernel, event))
        return event

    def emit(self) -> None:
        """Emit trace events for kernels that are complete, from any thread; without tracing they are forgotten."""
        done: list[tuple[str, str, cl.Event]] = []
        with self._lock:
            while self._ran:
                first = self._ran[0]
                if not complete(first[2]):
                    break
                done.append(self._ran.popleft())
        if done and TRACE.listening:
            scale = self._clock.scale()
            for name, kernel, event in done:
                profile: Any = event.profile
                TRACE.emit("kernel", name, scale(profile.start), scale(profile.end), device=self._device, kernel=kernel)
