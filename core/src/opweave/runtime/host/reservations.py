"""`Reservations`: how much host memory is allocated for buffers, and how much can still be allocated."""

from __future__ import annotations

import os
from typing import Final

from opweave.concurrency import Lock
from opweave.runtime.host.cgroups import memory_bounds

__all__ = ["RESERVATIONS", "Reservations", "meminfo", "resident_bytes"]


class Reservations:
    """Bytes of host memory that are allocated for buffers of all devices. Thread-safe.

    Operating systems overcommit: an allocation counts as available memory until it is written to, and if there is not
    enough memory then, the process is killed. So allocations are counted here. What of them was already written to is
    estimated by the growth of the process's resident memory.

    Attributes:
        reserved: bytes that are allocated now.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._base = 0  # resident bytes of the process without reserved memory
        # Reentrant: a garbage collection while it is held may free buffers, which calls `release`.
        self._lock: Final = Lock()

    def available(self, *, swap: bool = False) -> int | None:
        """Bytes that can still be reserved, ``None`` if the system does not tell.

        Args:
            swap: include swap space.
        """
        known, resident = meminfo(), resident_bytes()
        if "MemAvailable" not in known or resident is None:
            return None
        with self._lock:
            # If the process has shrunk, memory that was not reserved here was freed.
            self._base = min(self._base, resident) if self.reserved else resident
            unused = max(self.reserved - (resident - self._base), 0)
        available, bounds = known["MemAvailable"], memory_bounds()
        if bounds is not None:
            available = min(available, bounds[0])
        return max(available + (known.get("SwapFree", 0) if swap else 0) - unused, 0)

    def reserve(self, size: int) -> None:
        """Count ``size`` bytes as allocated; called before the allocation.

        Raises:
            MemoryError: less than ``size`` bytes are available, swap space included.
        """
        with self._lock:
            available = self.available(swap=True)
            if available is not None and size > available:
                raise MemoryError(f"more than the machine has left ({self.reserved:,} bytes are reserved for buffers)")
            self.reserved += size

    def release(self, size: int) -> None:
        """Count ``size`` bytes as freed."""
        with self._lock:
            self.reserved -= size


RESERVATIONS: Final = Reservations()
"""The reservations of this process, for all devices that allocate host memory."""


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes, ``None`` if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError, IndexError):
        return None


def meminfo() -> dict[str, int]:
    """The values of Linux's ``/proc/meminfo`` in bytes; empty on other systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    except OSError:
        return {}
