"""`Wire`: frames over a connected socket, plain or TLS; addresses; and the first bytes of a connection."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, NamedTuple

from opweave.errors import FormatError
from opweave_remote.tls import TlsSocket
from opweave_remote.wire import Frame, FrameReader, Kind, encode

__all__ = ["HEARTBEAT", "SESSION", "STREAM", "Address", "Wire", "same_machine", "tuned"]

_PREAMBLE: Final = b"opw1"
SESSION: Final = _PREAMBLE + b"S"
STREAM: Final = _PREAMBLE + b"C"
HEARTBEAT: Final = _PREAMBLE + b"H"
"""The first bytes of a connection, before TLS: they only say what it is for."""

_IN_NO_NAME: Final = re.compile(r"[\x00-\x20\x7f\[\]@/]")
_JOINED: Final = 1 << 14
_WAIT_ALL: Final = getattr(socket, "MSG_WAITALL", 0)
_MOST_PARTS: Final = 64


class Address(NamedTuple):
    """Where a server listens. ``host`` is without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``host:port`` or ``[IPv6]:port``; raises `FormatError` for anything else."""
        host, colon, port = text.strip().rpartition(":")
        inner = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
        if not inner and ":" in host:
            raise FormatError(f"{text!r}: an IPv6 address stands in brackets, as [::1]:7000")
        try:
            sound = bool(IPv6Address(inner)) if inner else bool(host.encode("idna")) and not _IN_NO_NAME.search(host)
        except ValueError:  # which connecting would raise otherwise
            sound = False
        if not colon or not sound or not port.isascii() or not port.isdigit() or not int(port) < 1 << 16:
            raise FormatError(f"{text!r} is no address; those are host:port, as 10.0.0.5:7000 or [::1]:7000")
        return cls(inner or host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; ``False`` for host names other than ``localhost``."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:  # a name, which may be anybody's however it begins
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _push(send: Callable[[memoryview], int], data: memoryview, sent: list[int]) -> None:
    sent.extend(map(send, (data,)))


def _receive(sock: socket.socket, target: memoryview, got: list[int]) -> None:
    got.extend(map(sock.recv_into, (target,)))  # one call into C, see `FrameReader`


def _receive_all(sock: socket.socket, target: memoryview, got: list[int]) -> None:
    # One call for all of it: between calls the thread has to wait for Python's GIL, while the sender waits for it.
    got.extend(map(sock.recv_into, (target,), (0,), (_WAIT_ALL,)))


def tuned(sock: socket.socket) -> socket.socket:
    """The socket; with TCP it now sends small messages at once, others have buffers of 1 MiB."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    elif hasattr(socket, "SO_SNDBUF"):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    return sock


class Wire:
    """Frames over a connected socket. One thread at a time sends, one receives.

    Args:
        sock: connected and blocking.
        max_args, max_data: see `FrameReader`.

    Attributes:
        reader: takes what arrives.
        sent: bytes so far.
    """

    def __init__(self, sock: socket.socket | TlsSocket, max_args: int, max_data: int) -> None:
        self.sock: Final = sock
        receive = sock.receive if isinstance(sock, TlsSocket) else partial(_receive, sock)
        whole = receive if isinstance(sock, TlsSocket) else partial(_receive_all, sock)
        self.reader: Final = FrameReader(receive, max_args, max_data, whole)
        self.sent = 0
        self.push: Final = sock.push if isinstance(sock, TlsSocket) else partial(_push, sock.send)
        """Sends at least one byte of a memory view and appends their number to a list, in one call into C: an interrupt
        leaves no doubt about what was sent. Raises ``OSError``."""
        self._gathers: Final = hasattr(sock, "sendmsg")

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send encoded frames and their data; raises ``OSError``."""
        size = sum(map(len, parts))
        self.sent += size
        if len(parts) == 1:
            self.sock.sendall(parts[0])
        elif size <= _JOINED:
            self.sock.sendall(b"".join(parts))
        elif self._gathers:
            self._gather(parts)
        else:
            small: list[bytes | memoryview] = []
            for part in parts:  # TLS takes one buffer at a time
                if len(part) <= _JOINED:
                    small.append(part)
                    continue
                self.sock.sendall(b"".join(small))
                small.clear()
                self.sock.sendall(part)
            if small:
                self.sock.sendall(b"".join(small))

    def _gather(self, parts: Sequence[bytes | memoryview]) -> None:
        for at in range(0, len(parts), _MOST_PARTS):
            rest = [memoryview(part) for part in parts[at : at + _MOST_PARTS] if len(part)]
            while rest:
                done = self.sock.sendmsg(rest)  # type: ignore[union-attr]
                while rest and done >= len(rest[0]):
                    done -= len(rest.pop(0))
                if done:
                    rest[0] = rest[0][done:]

    def say(self, kind: Kind, *args: Any) -> None:
        """Send one message without data."""
        self.send([encode(kind, *args)])

    def expect(self, *kinds: Kind) -> Frame:
        """The next message, which has to be one of these; raises `FormatError` for others, and as `FrameReader`."""
        frame = self.reader.frame()
        if frame.kind not in kinds:
            raise FormatError(f"a message {frame.kind.name} came where {kinds[0].name} belongs")
        return frame

    def end(self) -> None:
        """Wake whoever sends or receives here: the connection is over. May be called from any thread."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Called when nobody uses it any more."""
        self.end()
        with suppress(OSError):
            self.sock.close()


def same_machine() -> str:
    """An identifier of this machine, on Linux a new one at each start of the system."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}/{os.name}"
