"""`Newcomers`: connections that have not proved yet whose they are, and for how long they may take."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Lock, Thread, get_ident
from time import monotonic, sleep
from typing import Final

__all__ = ["Newcomers"]

_MOST: Final = 256


class Newcomers:
    """Ends connections that take too long to prove whose they are, however they spread their bytes over that time; and
    the oldest one where there are too many. A client proves itself within milliseconds, so a flood of connections that
    say nothing ends its own ones.

    Each connection is served by a thread of its own, which calls `enter` and `leave`.

    Args:
        seconds: from `enter` to `leave`.
        most: connections between `enter` and `leave`.

    Attributes:
        seconds: as given.
    """

    def __init__(self, seconds: float, most: int = _MOST) -> None:
        self.seconds: Final = seconds
        self._most: Final = most
        self._lock: Final = Lock()
        self._since: Final[dict[int, tuple[float, socket.socket]]] = {}  # by thread, the oldest first
        self._looking = False

    def enter(self, sock: socket.socket) -> None:
        """A connection has come, which the calling thread serves."""
        with self._lock:
            if len(self._since) >= self._most:
                self._end_oldest()
            self._since[get_ident()] = monotonic(), sock
            if not self._looking:
                self._looking = True
                Thread(target=self._look, name="opweave newcomers", daemon=True).start()

    def leave(self) -> None:
        """The connection of the calling thread has proved whose it is, or has ended."""
        with self._lock:
            self._since.pop(get_ident(), None)

    def _end_oldest(self) -> None:
        _, sock = self._since.pop(next(iter(self._since)))
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that serves it

    def _look(self) -> None:
        while True:
            with self._lock:
                left = 0.0
                while self._since and left <= 0:
                    oldest, _ = next(iter(self._since.values()))
                    left = oldest + self.seconds - monotonic()
                    if left <= 0:
                        self._end_oldest()
                if not self._since:
                    self._looking = False
                    return
            sleep(left)
