"""Opening connections within a time: whoever is at the other end, and however it spreads its bytes."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final

from opweave.concurrency import Latch, start_thread
from opweave_remote.tls import TlsSocket
from opweave_remote.wires import HEARTBEAT, Address, tuned

__all__ = ["Dial", "end", "in_time", "look_up", "reach", "tcp_dial"]

Dial = Callable[[bytes], "socket.socket | TlsSocket"]
"""Opens a connection to the server, given its first bytes; raises ``OSError``."""

Found = tuple[int, Any]
"""The family of an address, and the address as `socket.socket.connect` takes it."""

_LEAST: Final = 0.01


def tcp_dial(address: Address, context: ssl.SSLContext | None, server_name: str | None, timeout: float) -> Dial:
    """Connections over TCP, with TLS if there is a context; each within ``timeout`` seconds. A name may stand for
    several servers, as where load is balanced: all connections go to the one that the first of them has reached, which
    alone knows the client."""
    reached: list[Found] = []

    def dial(preamble: bytes) -> socket.socket | TlsSocket:
        until = monotonic() + timeout
        sock = reach(reached or look_up(address), timeout)
        try:
            if not reached:
                reached.append((sock.family, sock.getpeername()))
            tuned(sock).sendall(preamble)
            if context is None or preamble == HEARTBEAT:
                return sock
            with in_time(sock, until - monotonic()):
                return TlsSocket(sock, context, server_name or address.host)
        except BaseException:
            sock.close()
            raise

    return dial


def look_up(address: Address) -> list[Found]:
    """What a name stands for; raises ``OSError`` where that is not known."""
    return [(family, where) for family, _, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]


def reach(found: Sequence[Found], seconds: float) -> socket.socket:
    """A connection to one of some addresses: they are tried in their order, and one that does not answer leaves an
    equal share of the time to each of those behind it.

    Args:
        found: at least one.
        seconds: in which one has to answer.

    Raises:
        OSError: none does; the one of the last address.
    """
    until = monotonic() + seconds
    left = len(found)
    while True:
        family, where = found[-left]
        try:
            return _connected(family, where, max((until - monotonic()) / left, _LEAST), seconds)
        except OSError:
            left -= 1
            if not left:
                raise


def _connected(family: int, where: Any, within: float, timeout: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)  # refused where the system has no IPv6
    try:
        sock.settimeout(within)
        sock.connect(where)
        sock.settimeout(timeout)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def in_time(sock: socket.socket | TlsSocket, seconds: float) -> Iterator[None]:
    """End a connection if the ``with`` block takes longer. The timeout of a socket alone is that of one call: who sends
    byte after byte would keep it for ever.

    Raises:
        TimeoutError: the block took longer; in place of what it raised.
    """
    done, late = Latch(), Latch()

    def watch() -> None:
        if not done.wait(max(seconds, 0.0)):
            late.set()
            end(sock)

    start_thread(watch, name="opweave deadline")
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError(f"it took longer than {seconds:.3g} s") from error
        raise
    finally:
        done.set()
    if late.is_set():
        raise TimeoutError(f"it took longer than {seconds:.3g} s")


def end(sock: socket.socket | TlsSocket) -> None:
    """End a connection, from any thread; whoever sends or receives there is woken."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
