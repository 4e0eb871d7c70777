"""`Limits`: what one client may take of a server. `Metrics`: what a server has done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

from opweave.errors import AllocationError

__all__ = ["Limits", "Metrics", "Quota"]


class Limits(NamedTuple):
    """What one client may take.

    Attributes:
        clients: how many may be there at a time.
        connections: of one client: one for control messages, one for each stream, two for large transfers.
        memory: bytes of buffers of one client, on all devices together; ``None``: as much as there is.
        plans: that one stream keeps; as many launches.
        message: bytes of the arguments of a message, of what one message reads, and of what a launch writes.
        data: bytes of the data of a message, as sent and after decompression.
        staging: bytes of a stream's transfers that are under way.
        handshake: seconds within which a new connection has to prove whose it is, all in all.
        lease: seconds without a heartbeat after which a client is taken for dead, and its memory freed.
    """

    clients: int = 64
    connections: int = 64
    memory: int | None = None
    plans: int = 65536
    message: int = 64 << 20
    data: int = 16 << 20
    staging: int = 256 << 20
    handshake: float = 30.0
    lease: float = 60.0


class Quota:
    """Bytes that a client has taken, of those that it may take."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.taken = 0
        self._lock = Lock()

    def take(self, size: int, device: str) -> None:
        """Count ``size`` bytes; raises `AllocationError` where they are too many."""
        with self._lock:
            if self.limit is not None and self.taken + size > self.limit:
                why = f"a client may have {self.limit:,} bytes"
                raise AllocationError(device, size, self.limit - self.taken, why)
            self.taken += size

    def give(self, size: int) -> None:
        """Count ``size`` bytes less."""
        with self._lock:
            self.taken -= size

    def seen(self, free: int, total: int) -> tuple[int, int]:
        """Free and total bytes of a device, as far as the client may take them."""
        if self.limit is None:
            return free, total
        total = min(total, self.limit)
        return min(free, total, max(self.limit - self.taken, 0)), total


class Metrics:
    """Counters of a server, in the names that Prometheus reads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, float] = dict.fromkeys(
            ("clients", "clients_total", "refused_total", "connections", "buffers", "buffer_bytes", "plans_total",
             "runs_total", "run_seconds_total", "received_bytes_total", "sent_bytes_total", "failures_total",
             "expired_total", "cache_hits_total", "cache_misses_total", "packed_bytes_total",
             "unpacked_bytes_total"), 0)  # fmt: skip

    def add(self, name: str, value: float = 1) -> None:
        """Add to a counter; from any thread."""
        with self._lock:
            self._values[name] += value

    def ran(self, seconds: float) -> None:
        """Count a run."""
        with self._lock:
            self._values["runs_total"] += 1
            self._values["run_seconds_total"] += seconds

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count one more within a ``with`` block."""
        self.add(name)
        try:
            yield
        finally:
            self.add(name, -1)

    def read(self) -> dict[str, float]:
        """Name -> value."""
        with self._lock:
            return dict(self._values)

    def text(self) -> str:
        """In the text format of Prometheus."""
        lines = []
        for name, value in self.read().items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE opweave_remote_{name} {kind}", f"opweave_remote_{name} {value:.17g}"]
        return "\n".join(lines) + "\n"
