"""Opening connections within a time: whoever is at the other end, and however it spreads its bytes."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from opweave.concurrency import Latch, start_thread
from opweave_remote.tls import TlsSocket
from opweave_remote.wires import HEARTBEAT, Address, tuned

__all__ = ["Dial", "end", "in_time", "reach", "tcp_dial"]

Dial = Callable[[bytes], "socket.socket | TlsSocket"]
"""Opens a connection to the server, given its first bytes; raises ``OSError``."""


def tcp_dial(address: Address, context: ssl.SSLContext | None, server_name: str | None, timeout: float) -> Dial:
    """Connections over TCP, with TLS if there is a context; each within ``timeout`` seconds."""

    def dial(preamble: bytes) -> socket.socket | TlsSocket:
        until = monotonic() + timeout
        sock = reach(address, timeout)
        try:
            tuned(sock).sendall(preamble)
            if context is None or preamble == HEARTBEAT:
                return sock
            with in_time(sock, until - monotonic()):
                return TlsSocket(sock, context, server_name or address.host)
        except BaseException:
            sock.close()
            raise

    return dial


def reach(address: Address, seconds: float) -> socket.socket:
    """A connected socket. A name may stand for several addresses: they are tried in their order, and one that does not
    answer leaves an equal share of the time to each of those behind it.

    Raises:
        OSError: none answers within ``seconds``; the one of the last address.
    """
    until = monotonic() + seconds
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for left in range(len(found), 0, -1):
        family, kind, protocol, _, where = found[-left]
        try:
            sock = socket.socket(family, kind, protocol)  # refused where the system has no IPv6
        except OSError:
            if left == 1:
                raise
            continue
        try:
            sock.settimeout(max((until - monotonic()) / left, 0.01))
            sock.connect(where)
            sock.settimeout(seconds)
        except BaseException as error:
            sock.close()
            if left == 1 or not isinstance(error, OSError):
                raise
        else:
            return sock
    raise OSError(f"{address} is no address")  # `getaddrinfo` found nothing and raised nothing


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
