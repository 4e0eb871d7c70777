"""`Monitor`: answers heartbeats, and finds clients that have stopped asking. In the server's process or beside it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic, sleep
from typing import Final

from opweave_remote.heartbeat import QUESTION, Life, answer, receive_exactly
from opweave_remote.security import is_proof
from opweave_remote.server.newcomers import Newcomers

__all__ = ["Monitor"]


_MOST_ASKING: Final = 4
"""Connections over which one client may ask at a time; it needs one."""


class _Watched:
    __slots__ = ("asking", "heard", "key", "lease")

    def __init__(self, key: bytes, lease: float) -> None:
        self.key: Final = key
        self.lease: Final = lease
        self.heard = monotonic()
        self.asking = 0


class Monitor:
    """Knows the sessions of a server, and when each of their clients was last heard of.

    Args:
        life: returns whether the computing process runs, is stopped or gone.

    Attributes:
        on_expired: called with the name of a session whose client is silent for longer than its lease.
    """

    def __init__(self, life: Callable[[], Life] = lambda: Life.RUNNING) -> None:
        self.on_expired: Callable[[bytes], None] = lambda session: None
        self._life: Final = life
        self._watched: Final[dict[bytes, _Watched]] = {}
        self._changed: Final = Condition()
        self._looking = False

    def watch(self, session: bytes, key: bytes, lease: float) -> None:
        """Know a session, and expect a question of its client every ``lease`` seconds."""
        with self._changed:
            self._watched[session] = _Watched(key, lease)
            self._changed.notify_all()
            if not self._looking:
                self._looking = True
                Thread(target=self._look, name="opweave leases", daemon=True).start()

    def forget(self, session: bytes) -> None:
        """A session is over."""
        with self._changed:
            self._watched.pop(session, None)

    def answer(self, sock: socket.socket, newcomers: Newcomers) -> None:
        """Answer the questions of one client until it ends the connection. Forged ones end it.

        Args:
            newcomers: has this connection until its first question has proved whose it is.
        """
        asked = receive_exactly(sock, QUESTION.size)
        watched = self._expected(asked, sock, newcomers)
        if watched is None:
            return
        try:
            while True:
                session, number, shown = QUESTION.unpack(asked)
                known = self._watched.get(session) is watched
                if not known or not is_proof(shown, watched.key, b"question", number.to_bytes(8, "little")):
                    return
                watched.heard = monotonic()
                sock.settimeout(watched.lease)
                sock.sendall(answer(watched.key, number, self._life()))
                asked = receive_exactly(sock, QUESTION.size)
        finally:
            with self._changed:
                watched.asking -= 1

    def _expected(self, asked: bytes, sock: socket.socket, newcomers: Newcomers) -> _Watched | None:
        """Whose first question this is; ``None``: of nobody who may ask. The computing process makes a session known by
        a message, which the question may have overtaken: it is waited for."""
        session, number, shown = QUESTION.unpack(asked)
        until = monotonic() + newcomers.seconds
        with self._changed:
            while (watched := self._watched.get(session)) is None:
                if not self._changed.wait(until - monotonic()):
                    return None
            proved = is_proof(shown, watched.key, b"question", number.to_bytes(8, "little"))
            if not proved or watched.asking >= _MOST_ASKING:
                return None
            watched.asking += 1
        newcomers.leave()
        return watched

    def _look(self) -> None:
        while True:
            now = monotonic()
            with self._changed:
                if not self._watched:
                    self._looking = False
                    return
                silent = [name for name, w in self._watched.items() if now - w.heard > w.lease]
                pause = min(1.0, *[w.lease / 4 for w in self._watched.values()])
            for name in silent:
                self.forget(name)
                self.on_expired(name)
            sleep(pause)
