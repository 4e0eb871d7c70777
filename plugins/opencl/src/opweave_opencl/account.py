"""`Account`: how much of a device's memory this process has taken."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Final

from opweave.contract import Kind
from opweave.host.reservations import RESERVATIONS
from opweave_opencl.discovery import kind_of

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["Account"]


class Account:
    """Bytes taken of one piece of hardware, which the parts it is cut into share. Thread-safe.

    OpenCL has no call that tells the free memory, and drivers promise more than there is.

    Args:
        total: bytes of the hardware.
        host: whether it is memory of this process, of which others take too. (That of graphics processors that share
            the machine's is the driver's own, which takes it when it promises it.)

    Attributes:
        total: as given.
        taken: bytes that this process has allocated.
    """

    def __init__(self, total: int, *, host: bool = False) -> None:
        self.total: Final = total
        self._host: Final = host
        self.taken = 0
        self._lock: Final = RLock()  # reentrant: a collection while it is held may free buffers, which gives bytes back

    @classmethod
    def of(cls, device: cl.Device) -> Account:
        """That of a whole device."""
        return cls(int(device.global_mem_size), host=kind_of(device) is Kind.CPU)

    @property
    def free(self) -> int:
        return max(self.total - self.taken, 0)

    def take(self, size: int, free: int) -> None:
        """Take ``size`` of ``free`` bytes.

        Raises:
            MemoryError: that is more than there is.
        """
        with self._lock:
            if size > min(free, self.free):
                raise MemoryError(f"{self.taken:,} of {self.total:,} bytes are taken")
            if self._host:
                RESERVATIONS.reserve(size)
            self.taken += size

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""
        with self._lock:
            self.taken -= size
            if self._host:
                RESERVATIONS.release(size)
