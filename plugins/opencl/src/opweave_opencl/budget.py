"""`MemoryBudget`: how much of a device's memory this process has allocated."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Final

from opweave.contract import Kind
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_opencl.properties import kind_of

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["MemoryBudget"]


class MemoryBudget:
    """Bytes allocated on one hardware device, which its sub-devices share. Thread-safe.

    OpenCL has no query for free memory, and drivers accept allocations larger than the memory.

    Args:
        total: bytes of the hardware.
        host: whether it is memory of this process, which other devices allocate too. (Drivers of graphics processors
            that share the machine's memory take theirs when they allocate.)

    Attributes:
        total: as given.
        used: bytes that this process has allocated.
    """

    def __init__(self, total: int, *, host: bool = False) -> None:
        self.total: Final = total
        self._host: Final = host
        self.used = 0
        self._lock: Final = RLock()  # reentrant: garbage collection while it is held may free buffers

    @classmethod
    def of(cls, device: cl.Device) -> MemoryBudget:
        """The budget of a whole device: all of its global memory."""
        return cls(int(device.global_mem_size), host=kind_of(device) is Kind.CPU)

    @property
    def free(self) -> int:
        return max(self.total - self.used, 0)

    def reserve(self, size: int, free: int) -> None:
        """Count ``size`` of ``free`` bytes as used.

        Raises:
            MemoryError: fewer are free.
        """
        with self._lock:
            if size > min(free, self.free):
                raise MemoryError(f"{self.used:,} of {self.total:,} bytes are allocated")
            if self._host:
                RESERVATIONS.reserve(size)
            self.used += size

    def release(self, size: int) -> None:
        """Count ``size`` bytes as free again."""
        with self._lock:
            self.used -= size
            if self._host:
                RESERVATIONS.release(size)
