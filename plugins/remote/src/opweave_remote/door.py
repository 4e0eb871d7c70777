"""`Door`: how a process passes connections to one that it has started, and both exchange messages. POSIX."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgpack

from opweave.errors import FormatError, Unavailable
from opweave_remote.heartbeat import Life, receive_exactly

__all__ = ["Door", "how_it_ended", "life_of", "start_worker"]

_MOST: Final = 1 << 26


class Door:
    """One end of a pair of sockets between two processes that trust each other.

    Any thread may send; one receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock: Final = sock
        self._lock: Final = Lock()

    def send(self, what: str, value: Any = None, sock: socket.socket | None = None) -> None:
        """Say something, and pass a connection along; raises ``OSError`` where nobody is there any more."""
        packed: bytes = msgpack.packb([what, value])
        with self._lock:
            handles = [] if sock is None else [sock.fileno()]
            head = len(packed).to_bytes(4, "little")
            # The handle travels with the first bytes.
            socket.send_fds(self._sock, [head], handles)
            self._sock.sendall(packed)

    def receive(self) -> tuple[str, Any, socket.socket | None]:
        """What was said next, and the connection that came along.

        Raises:
            EOFError, OSError: the other process has ended.
            FormatError: the message is longer than 64 MiB.
        """
        head, handles, _, _ = socket.recv_fds(self._sock, 4, 1)
        passed = socket.socket(fileno=handles[0]) if handles else None
        try:
            if not head:
                raise EOFError("the other process has ended")
            head += receive_exactly(self._sock, 4 - len(head))
            size = int.from_bytes(head, "little")
            if size > _MOST:
                raise FormatError(f"a message of {size:,} bytes")
            what, value = msgpack.unpackb(receive_exactly(self._sock, size), strict_map_key=False)
        except BaseException:
            if passed is not None:
                passed.close()
            raise
        return what, value, passed

    def leave(self) -> None:
        """Close it in a forked process only: the parent goes on using it."""
        self._sock.close()

    def close(self) -> None:
        """End it; whoever receives at the other end sees that."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def start_worker(settings: dict[str, Any]) -> tuple[subprocess.Popen[bytes], Door]:
    """Start a process that has devices, and give it its settings (`opweave_remote.server.worker`).

    Raises:
        Unavailable: this system passes no connections between processes.
    """
    if not hasattr(socket, "send_fds"):
        raise Unavailable("this system passes no connections from process to process", remedy="use Linux or macOS")
    ours, theirs = socket.socketpair()
    with theirs:
        # Without the current folder (`-P`): a file `numpy.py` of the user's there would be imported in place of NumPy.
        command = [sys.executable, "-P", "-m", "opweave_remote.server.worker", str(theirs.fileno())]
        # What drivers print goes to standard error; a process with a session of its own gets no Ctrl-C.
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2,
                                   start_new_session=True)  # fmt: skip
    door = Door(ours)
    door.send("settings", settings)
    return process, door


def life_of(process: subprocess.Popen[bytes]) -> Life:
    """Whether a process that this one has started runs, is stopped (seen on Linux only), or has ended."""
    if process.poll() is not None:
        return Life.GONE
    try:
        state = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return Life.RUNNING
    return Life.STOPPED if state in (b"T", b"t") else Life.RUNNING


def how_it_ended(process: subprocess.Popen[bytes], seconds: float = 1.0) -> str:
    """How a process ended, in words; ``""`` if it runs on."""
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(seconds)
        if code < 0:
            name = signal.Signals(-code).name if -code in {int(s) for s in signal.Signals} else str(-code)
            return f"its process {process.pid} was ended by {name}"
        return f"its process {process.pid} ended with status {code}"
    return ""
