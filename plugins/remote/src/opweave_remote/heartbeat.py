"""Signs of life: a client asks, and a process beside the one that computes answers.

A kernel may keep the computing process busy for minutes and hold Python's GIL, so that it cannot answer. A server
therefore answers from another process, which also sees whether the computing one is stopped or gone. The client's
deadline is its own, by a monotonic clock. Questions and answers are authenticated by the session's key, and say nothing
secret; they are not encrypted.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from time import monotonic
from typing import Final

from opweave.concurrency import start_thread
from opweave_remote.link import Fate
from opweave_remote.security import is_proof, proof

__all__ = ["QUESTION", "Life", "answer", "keep_asking", "question", "receive_exactly"]

QUESTION: Final = Struct("<16sQ32s")
_ANSWER: Final = Struct("<QB32s")
_MOST_PAUSE: Final = 10.0
"""Seconds between two questions at most, however patient the client is: servers have leases (`Limits.lease`)."""


class Life(IntEnum):
    """What is known of the computing process."""

    RUNNING = 0
    STOPPED = 1
    """By a signal, or a debugger."""
    GONE = 2


def question(session: bytes, key: bytes, number: int) -> bytes:
    """A client's question."""
    return QUESTION.pack(session, number, proof(key, b"question", number.to_bytes(8, "little")))


def answer(key: bytes, number: int, life: Life) -> bytes:
    """The answer to a question."""
    return _ANSWER.pack(number, life, proof(key, b"answer", number.to_bytes(8, "little"), bytes((life,))))


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """``size`` bytes; raises ``EOFError`` where the connection ends before, ``TimeoutError`` at its timeout."""
    got = b""
    while len(got) < size:
        part = sock.recv(size - len(got))
        if not part:
            raise EOFError("the connection ended")
        got += part
    return got


def keep_asking(sock: socket.socket, fate: Fate, session: bytes, key: bytes, deadline: float) -> None:
    """Start a thread that asks for signs of life, and declares the server lost where none comes.

    Args:
        deadline: seconds after which a server that does not answer is lost.
    """
    start_thread(_ask, sock, fate, session, key, deadline, name=f"opweave heartbeat of {fate.name}")


def _ask(sock: socket.socket, fate: Fate, session: bytes, key: bytes, deadline: float) -> None:
    number, pause = 0, min(deadline / 4, _MOST_PAUSE)
    stopped_since: float | None = None
    try:
        # The first question comes at once: a server gives a new connection only seconds to prove who it is.
        while not fate.ended.wait(pause if number else 0.0):
            number += 1
            # A thread that was kept from running finds the answer when it runs again: only waiting counts.
            sock.settimeout(deadline - pause)
            sock.sendall(question(session, key, number))
            echoed, life, made = _ANSWER.unpack(receive_exactly(sock, _ANSWER.size))
            parts = echoed.to_bytes(8, "little"), bytes((life,))
            if echoed != number or not is_proof(made, key, b"answer", *parts):
                fate.lose("a sign of life was forged")
            elif life == Life.GONE:
                fate.lose("its computing process has ended")
            elif life == Life.STOPPED:
                stopped_since = stopped_since or monotonic()
                if monotonic() - stopped_since > deadline - 2 * pause:
                    fate.lose(f"its computing process has been stopped for {deadline:g} s")
            else:
                stopped_since = None
    except TimeoutError:
        fate.lose(f"it has given no sign of life for {deadline:g} s")
    except (EOFError, OSError):
        fate.lose("its heartbeat ended")
    finally:
        with suppress(OSError):
            sock.close()
