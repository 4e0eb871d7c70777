"""`Session`: a client of the server: its buffers, streams and connections, which all go when it goes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from secrets import token_bytes
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.contract import Buffer, Device, Usage
from opweave.errors import FormatError, LifetimeError, Unavailable, UnknownNameError
from opweave_remote.server.limits import Limits, Metrics, Quota
from opweave_remote.server.pulling import Puller

if TYPE_CHECKING:
    from opweave_remote.server.cache import WeightCache
    from opweave_remote.server.streams import StreamChannel
    from opweave_remote.wires import Wire

__all__ = ["Grant", "Session", "numbers_of"]


_GRANTS_KEPT: Final = 4096
_LEAVING: Final = 1.0  # seconds
_FRESH: Final = 64 << 20
"""Host memory of so many bytes comes from the system as zeros; less may be what another client has freed."""


class Grant(NamedTuple):
    """What another server may read once, if it knows the secret."""

    secret: bytes
    buffer: int
    offset: int
    size: int


class Session:
    """A client.

    Args:
        devices: name -> device that it may use.
        limits: what it may take.
        metrics: where its work is counted.
        cache: of weights, or ``None``.
        puller: fetches from other servers.

    Attributes:
        id, key: name and secret by which its further connections are known.
        quota: memory that it has taken.
        streams: number -> its streams.
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        limits: Limits,
        metrics: Metrics,
        cache: WeightCache | None = None,
        puller: Puller | None = None,
    ) -> None:
        self.id: Final = token_bytes(16)
        self.key: Final = token_bytes(32)
        self.devices: Final = devices
        self.limits: Final = limits
        self.metrics: Final = metrics
        self.cache: Final = cache
        self.puller: Final = puller or Puller(None)
        self.quota: Final = Quota(limits.memory)
        self.streams: Final[dict[int, StreamChannel]] = {}
        self._buffers: Final[dict[int, Buffer]] = {}
        self._grants: Final[dict[bytes, Grant]] = {}
        self._wires: Final[set[Wire]] = set()
        self._lock: Final = Lock()
        self._empty: Final = Condition(self._lock)
        self._closed = False

    def device(self, name: str) -> Device:
        """A device; raises `UnknownNameError` where the server does not show one of that name."""
        found = self.devices.get(name)
        if found is None:
            raise UnknownNameError("device", name, self.devices)
        return found

    # --- connections --------------------------------------------------------------------------------------------------

    def join(self, wire: Wire) -> None:
        """One more connection; raises `Unavailable` where there are enough, or the session is over. One that its client
        has just closed may not have left yet, and is waited for."""
        with self._empty:
            self._empty.wait_for(lambda: self._closed or len(self._wires) < self.limits.connections, _LEAVING)
            if self._closed:
                raise Unavailable("the session is over")
            if len(self._wires) >= self.limits.connections:
                raise Unavailable(f"a client may have {self.limits.connections} connections",
                                  remedy="open fewer streams, or start the server with --max-connections")  # fmt: skip
            self._wires.add(wire)

    def leave(self, wire: Wire) -> None:
        """A connection is over."""
        with self._lock:
            self._wires.discard(wire)
            self._empty.notify_all()

    def end(self) -> None:
        """End all connections; whoever serves them then leaves. May be called from any thread."""
        with self._lock:
            self._closed = True
            wires = list(self._wires)
        for stream in list(self.streams.values()):
            stream.abort()
        for wire in wires:
            wire.end()

    def close(self, own: Wire) -> None:
        """End, wait until no connection but ``own``, the caller's, is left, and free all buffers."""
        self.end()
        with self._empty:
            while self._wires - {own}:
                self._empty.wait()
        for number in list(self._buffers):
            with suppress(Exception):  # a device that is lost may refuse
                self.free(number)
        self._grants.clear()

    # --- buffers ------------------------------------------------------------------------------------------------------

    def alloc(self, device: str, number: int, size: int, usage: str) -> None:
        """A buffer of ordinary memory, known by ``number`` from now on. It begins as zeros, not with what others left.

        Raises:
            AllocationError: more than there is, or than the client may take.
            FormatError: a number that is in use, or an unknown usage.
        """
        target = self.device(device)
        if number in self._buffers or usage not in {u.value for u in Usage}:
            raise FormatError(f"buffer {number} for {usage!r:.20}")
        self.quota.take(size, device)
        try:
            buffer = target.alloc(size, Usage(usage))
            if not (buffer.is_host and size >= _FRESH):
                buffer.clear()
        except BaseException:
            self.quota.give(size)
            raise
        self._buffers[number] = buffer
        self.metrics.add("buffers")
        self.metrics.add("buffer_bytes", size)

    def buffer(self, number: int) -> Buffer:
        """The client's buffer of that number; raises `LifetimeError` where it has none."""
        found = self._buffers.get(number)
        if found is None:
            raise LifetimeError(f"there is no buffer {number}")
        return found

    def free(self, number: int) -> None:
        """Free a buffer after the work that may use it; nothing if there is none."""
        buffer = self._buffers.pop(number, None)
        if buffer is None:
            return
        if self.cache is not None:
            self.cache.forget(buffer)
        try:
            buffer.free()
        finally:
            self.quota.give(buffer.size)
            self.metrics.add("buffers", -1)
            self.metrics.add("buffer_bytes", -buffer.size)

    # --- other servers ------------------------------------------------------------------------------------------------

    def grant(self, number: int, offset: int, size: int) -> bytes:
        """What lets another server read these bytes once: 16 bytes of the session's name, 16 of the grant's, and its
        secret."""
        self.buffer(number).check(offset, size)
        name, made = token_bytes(16), Grant(token_bytes(32), number, offset, size)
        with self._lock:
            if len(self._grants) >= _GRANTS_KEPT:
                self._grants.pop(next(iter(self._grants)))
            self._grants[name] = made
        return self.id + name + made.secret

    def redeem(self, name: bytes) -> Grant:
        """The grant of that name, once; raises `LifetimeError`."""
        with self._lock:
            found = self._grants.pop(name, None)
        if found is None:
            raise LifetimeError("there is no such grant, or it was used")
        return found


def numbers_of(value: Any) -> list[int]:
    """A list of numbers; raises `FormatError`."""
    if type(value) is not list or any(type(n) is not int for n in value):
        raise FormatError(f"a list of numbers is {value!r:.60}")
    return value
