"""`ObjectStore`: large transfers by Ray's object store, where a measurement shows that it is faster than the sockets.

On the node of the client the object store is shared memory; between nodes Ray copies by its own connections. The
server's actor takes the bytes from there, or puts them there, and passes them to and from the process that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import numpy as np

from opweave.concurrency import Lock
from opweave.contract import Usage
from opweave_remote import Connection, RemoteDevice
from opweave_remote.memory import RemoteMemory

__all__ = ["ObjectStore"]

_PART: Final = 64 << 20
_PARTS: Final = 2
"""Parts of a transfer that are in the object store at a time."""
_SHORT: Final = 1 << 21
_FAST: Final = 3e8
_ROUNDS: Final = 3
_TIMEOUT: Final = 10.0
_PAUSE: Final = 0.2
"""Seconds within which a loss that the heartbeat finds is noticed."""


class ObjectStore:
    """A `Carrier` of a connection. The first large transfer measures it beside the sockets, each direction by itself.

    Args:
        ray: the module.
        actor: the node's `NodeServer`.

    Attributes:
        rates: ``"up"``, ``"down"`` -> bytes per second by the object store and by the sockets; at first empty.
        used: those of these for which it is used; none from the first failure on.
    """

    least = 16 << 20

    def __init__(self, ray: Any, actor: Any, connection: Connection) -> None:
        self.rates: dict[str, tuple[float, float]] = {}
        self.used: frozenset[str] = frozenset()
        self._ray: Final = ray
        self._actor: Final = actor
        self._secrets: Final = connection.secrets
        self._fate: Final = connection.fate
        self._lock: Final = Lock()
        self._measured = False

    def upload(self, device: RemoteDevice, mem: RemoteMemory, offset: int, data: memoryview) -> bool:
        """Write bytes to a buffer; ``False``: the sockets are faster, or Ray fails."""
        return self._carry("up", device, self._write, mem, offset, data)

    def download(self, device: RemoteDevice, mem: RemoteMemory, offset: int, out: memoryview) -> bool:
        """Read bytes of a buffer; ``False``: the sockets are faster, or Ray fails."""
        return self._carry("down", device, self._read, mem, offset, out)

    def _carry(
        self,
        way: str,
        device: RemoteDevice,
        work: Callable[..., None],
        mem: RemoteMemory,
        offset: int,
        data: memoryview,
    ) -> bool:
        try:
            if not self._measured:
                with self._lock:
                    if not self._measured:
                        self._measured = True  # a failure is not repeated; others use the sockets meanwhile
                        self._measure(device)
            if way not in self.used:
                return False
            work(mem, offset, data)
        except Exception:  # of Ray, which has many classes; the sockets raise what is lost
            self.used = frozenset()
            return False
        return True

    def _measure(self, device: RemoteDevice) -> None:
        """Compare both on memory of the device, with bytes that nobody can compress."""
        size = self.least if device.connection.packing.rate() > _FAST else _SHORT
        data = np.random.default_rng().integers(0, 256, size, np.uint8).data
        ways = {"up": (self._write, device.send), "down": (self._read, device.receive)}
        with device.alloc(size, Usage.ANY) as buffer:
            mem = buffer.handle
            for way, rivals in ways.items():
                took = [float("inf"), float("inf")]
                for _ in range(_ROUNDS):
                    for i, work in enumerate(rivals):
                        start = perf_counter()
                        work(mem, 0, data)
                        took[i] = min(took[i], perf_counter() - start)
                self.rates[way] = size / took[0], size / took[1]
        self.used = frozenset([way for way, (store, sockets) in self.rates.items() if store > sockets])

    def _write(self, mem: RemoteMemory, offset: int, data: memoryview) -> None:
        under_way: list[Any] = []
        try:
            for at in range(0, len(data), _PART):
                if len(under_way) == _PARTS:
                    self._result(under_way.pop(0))
                part = self._ray.put(np.frombuffer(data[at : at + _PART], np.uint8))
                under_way.append(self._actor.write.remote(*self._secrets, mem.number, offset + at, part))
            while under_way:
                self._result(under_way.pop(0))
        finally:
            if under_way:  # an interrupted write must not land after a later one
                self._ray.wait(under_way, num_returns=len(under_way), timeout=_TIMEOUT)

    def _read(self, mem: RemoteMemory, offset: int, out: memoryview) -> None:
        under_way: list[tuple[int, Any]] = []
        for at in range(0, len(out), _PART):
            if len(under_way) == _PARTS:
                self._take(out, *under_way.pop(0))
            size = min(_PART, len(out) - at)
            under_way.append((at, self._actor.read.remote(*self._secrets, mem.number, offset + at, size)))
        for at, ref in under_way:
            self._take(out, at, ref)

    def _take(self, out: memoryview, at: int, ref: Any) -> None:
        part = self._result(ref)
        np.frombuffer(out, np.uint8)[at : at + part.size] = part

    def _result(self, ref: Any) -> Any:
        """What Ray answers; raises `DeviceLostError` as soon as the server is lost."""
        while not self._ray.wait([ref], timeout=_PAUSE)[0]:
            self._fate.check()
        return self._ray.get(ref)
