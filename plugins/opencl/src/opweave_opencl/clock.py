"""`DeviceClock`: times of a device's clock as those of ``time.perf_counter_ns``."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["DeviceClock", "Scale"]

_TRIES: Final = 3
_SLACK: Final = 1_000_000  # ns by which a device's timer may differ from the times of its own events


class Scale(NamedTuple):
    """How times of one clock become those of another: a reading of both, and how fast the other one runs."""

    device: int
    host: int
    rate: float

    def __call__(self, time: int) -> int:
        return self.host + round((time - self.device) * self.rate)


class DeviceClock:
    """The clock of a device's profiling times. It has an origin and a rate of its own.

    Both clocks are read when this is made and again by `scale`: times between the two readings are converted as exactly
    as the clocks were read, whatever the rate.

    Args:
        context, device: pyopencl's.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        import pyopencl as cl

        self._device: Final = device
        # A queue of its own, so that a reading does not wait for the work of others.
        self._queue: Final = cl.CommandQueue(context, device, cl.command_queue_properties.PROFILING_ENABLE)
        self._has_timer = False
        first = self._read()
        self._has_timer = self._timer_agrees()
        self._first: Final = self._read() if self._has_timer else first

    def scale(self) -> Scale:
        """From the device's times to the host's, for work that ran since this was made."""
        (began, host_began), (now, host_now) = self._first, self._read()
        return Scale(now, host_now, (host_now - host_began) / (now - began) if now > began else 1.0)

    def _read(self) -> tuple[int, int]:
        """One moment in nanoseconds of both clocks: the quickest of several readings, which is the most exact."""
        readings = [self._read_timer() if self._has_timer else self._read_marker() for _ in range(_TRIES)]
        _, device, host = min(readings)
        return device, host

    def _read_timer(self) -> tuple[int, int, int]:
        before = perf_counter_ns()
        device, _ = self._device.device_and_host_timer()
        after = perf_counter_ns()
        return after - before, int(device), (before + after) // 2

    def _read_marker(self) -> tuple[int, int, int]:
        import pyopencl as cl

        before = perf_counter_ns()
        marker = cl.enqueue_marker(self._queue)
        marker.wait()
        after = perf_counter_ns()
        # Not when it was queued: drivers leave that out for markers.
        profile: Any = marker.profile
        return after - before, int(profile.end), (before + after) // 2

    def _timer_agrees(self) -> bool:
        """Whether the device has a timer to be read, OpenCL 2.1 or newer, and it is that of its events."""
        import pyopencl as cl

        try:
            _, early, _ = self._read_timer()
            _, marked, _ = self._read_marker()
            _, late, _ = self._read_timer()
        except (cl.Error, AttributeError):
            return False
        return early - _SLACK <= marked <= late + _SLACK
