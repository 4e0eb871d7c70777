"""`Promises`: how much of the host's memory this process has been promised and does not use yet."""

from __future__ import annotations

import os
from typing import Final

from opweave.concurrency import Lock
from opweave.host.cgroups import memory_bounds

__all__ = ["PROMISES", "Promises", "meminfo", "resident_bytes"]


class Promises:
    """Bytes of the host's memory that buffers of all devices hold. Thread-safe.

    Systems promise more than there is, and end the process that uses it: what was allocated counts as available until
    it is written to. How much of it was written shows in what the process has grown by since.

    Attributes:
        taken: bytes promised.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._base = 0  # resident bytes of the process without what was promised
        self._lock: Final = Lock()  # reentrant: a collection while it is held may free buffers, which gives bytes back

    def left(self, *, swap: bool = False) -> int | None:
        """Bytes that can still be promised, with ``swap`` those that would go to disk too; ``None`` where the system
        does not tell."""
        known, resident = meminfo(), resident_bytes()
        if "MemAvailable" not in known or resident is None:
            return None
        with self._lock:
            # Less than before: other arrays of the process are gone.
            self._base = min(self._base, resident) if self.taken else resident
            unused = max(self.taken - (resident - self._base), 0)
        available, bounds = known["MemAvailable"], memory_bounds()
        if bounds is not None:
            available = min(available, bounds[0])
        return max(available + (known.get("SwapFree", 0) if swap else 0) - unused, 0)

    def take(self, size: int) -> None:
        """Promise ``size`` bytes.

        Raises:
            MemoryError: there are not so many left.
        """
        with self._lock:
            left = self.left(swap=True)
            if left is not None and size > left:
                raise MemoryError(f"more than the machine has left ({self.taken:,} bytes are promised to buffers)")
            self.taken += size

    def give(self, size: int) -> None:
        """Take back a promise of ``size`` bytes."""
        with self._lock:
            self.taken -= size


PROMISES: Final = Promises()
"""Those of this process, for all devices that allocate in the host's memory."""


def resident_bytes() -> int | None:
    """Bytes of memory that this process uses, ``None`` where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError, IndexError):
        return None


def meminfo() -> dict[str, int]:
    """Linux's own account of the machine's memory in bytes; empty elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    except OSError:
        return {}
