"""`TlsSocket`: TLS over a socket that one thread sends to while another one receives, which `ssl.SSLSocket` forbids."""

from __future__ import annotations

import socket
import ssl
from threading import Lock
from typing import Final

__all__ = ["TlsSocket"]

_PIECE: Final = 1 << 18


class TlsSocket:
    """A connected socket with TLS on it. The handshake is made at once, within the socket's timeout.

    Args:
        sock: the socket; it belongs to this object from now on.
        context: of the client or of the server.
        server_name: whom the client wants to reach; ``None``: this is the server.

    Raises:
        ssl.SSLError: the two sides do not agree, or one does not believe the other's certificate.
        OSError, EOFError: the connection ended.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._sock: Final = sock
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        self._tls: Final = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock: Final = Lock()  # of the state of TLS; never held while the socket is waited for
        self._raw: Final = memoryview(bytearray(_PIECE))
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._take():
                    raise EOFError("the other side has ended the connection within the handshake of TLS") from None
            except ssl.SSLError:
                self._flush()  # the alert that tells the other side why
                raise
            else:
                self._flush()
                return

    def _flush(self) -> None:
        made = self._outgoing.read()
        if made:
            self._sock.sendall(made)

    def _take(self) -> int:
        got = self._sock.recv_into(self._raw)
        with self._lock:
            if got:
                self._incoming.write(self._raw[:got])
            else:
                self._incoming.write_eof()
        return got

    def recv_into(self, target: memoryview) -> int:
        """Receive at least one byte; 0 at the end of the connection."""
        while True:
            try:
                with self._lock:
                    return int(self._tls.read(len(target), target))
            except ssl.SSLWantReadError:
                if not self._take():
                    return 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        view = memoryview(data)
        for at in range(0, len(view), _PIECE):
            with self._lock:
                self._tls.write(view[at : at + _PIECE])
                made = self._outgoing.read()
            self._sock.sendall(made)

    def shutdown(self, how: int) -> None:
        """End the connection below TLS."""
        self._sock.shutdown(how)

    def settimeout(self, seconds: float | None) -> None:
        """Of the socket."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Give the socket back."""
        self._sock.close()
