"""`TlsSocket`: TLS over a socket that one thread sends to while another one receives, which `ssl.SSLSocket` forbids."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable
from operator import call
from threading import Lock
from typing import Final

__all__ = ["TlsSocket"]

_PIECE: Final = 1 << 18
_RECEIVED: Final = 1 << 16


class TlsSocket:
    """A connected socket with TLS on it. The handshake is made at once, within the socket's timeout.

    Args:
        sock: the socket; it belongs to this object from now on.
        context: of the client or of the server.
        server_name: whom the client wants to reach; ``None``: this is the server.

    Raises:
        ssl.SSLError: the two sides do not agree, or one does not trust the other's certificate.
        OSError, EOFError: the connection ended.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._sock: Final = sock
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        self._tls: Final = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._read: Final[Callable[[int, memoryview], int]] = self._tls.read  # type: ignore[assignment]  # into memory
        self._lock: Final = Lock()  # guards the state of TLS; never held while waiting for the socket
        self._written: Final[list[int]] = []  # bytes that TLS has taken, until they are sent
        self._cipher: Final[list[memoryview]] = []
        self._gone: Final[list[int]] = []  # bytes of `_cipher[0]` that are sent
        self._raw: Final[deque[bytes]] = deque()  # received, and not yet given to TLS
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

    def _take(self) -> bool:
        """Receive what TLS reads next; ``False`` at the end of the connection."""
        if not self._raw:
            self._raw.extend(map(self._sock.recv, (_RECEIVED,)))
        ended = not self._raw[0]
        with self._lock:
            if ended:
                self._incoming.write_eof()
            else:
                deque(map(self._incoming.write, map(call, (self._raw.popleft,))), 0)
        return not ended

    def receive(self, target: memoryview, got: list[int]) -> None:
        """Receive at least one byte, and append their number to ``got``; 0 at the end of the connection. An interrupt
        loses nothing: each step is one call into C."""
        while True:
            try:
                with self._lock:
                    got.extend(map(self._read, (len(target),), (target,)))
                return
            except ssl.SSLWantReadError:
                if self._take():
                    continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                pass
            got.append(0)
            return

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        view = memoryview(data)
        for at in range(0, len(view), _PIECE):
            self.push(view[at : at + _PIECE], [])

    def push(self, data: bytes | memoryview, sent: list[int]) -> None:
        """Send ``data`` and append its size to ``sent``. After an interrupt it is called again with the same data."""
        with self._lock:
            if not self._written:
                self._written.extend(map(self._tls.write, (data,)))
            self._cipher.extend(map(memoryview, map(self._outgoing.read, (-1,))))
        while self._cipher:
            if self._gone:
                self._cipher[0] = self._cipher[0][self._gone[0] :]
                del self._gone[0]
            if not self._cipher[0]:
                del self._cipher[0]
                continue
            self._gone.extend(map(self._sock.send, (self._cipher[0],)))
        sent += self._written
        del self._written[:]

    def shutdown(self, how: int) -> None:
        """End the connection below TLS."""
        self._sock.shutdown(how)

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of the socket in seconds; ``None``: none."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
