"""Servers for tests: in this process over pairs of sockets, and in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from opweave.contract import Device
from opweave_remote.connection import Connection
from opweave_remote.security import make_token
from opweave_remote.server.serving import Server

__all__ = ["TOKEN", "ServerProcess", "beside", "own_token", "pair_dial", "serve_process", "stop_process"]

TOKEN = b"a token for the tests"


def pair_dial(server: Server) -> Any:
    """Connections to a server of this process, by pairs of sockets."""

    def dial(preamble: bytes) -> socket.socket:
        ours, theirs = socket.socketpair()
        server.admit(theirs)
        ours.sendall(preamble)
        return ours

    return dial


@contextmanager
def beside(devices: Sequence[Device], **options: Any) -> Iterator[tuple[Server, Connection]]:
    """A server in this process, and a connection to it."""
    options.setdefault("token", TOKEN)
    server = Server(devices, **options)
    connection = Connection("pair", pair_dial(server), options["token"], 10.0)
    try:
        yield server, connection
    finally:
        connection.close()
        server.stop()


def own_token(folder: Path) -> Path:
    """A token file."""
    path = folder / "token"
    if not path.exists():
        make_token(path)
    return path


def stop_process(*processes: int) -> None:
    """Stop processes by SIGSTOP, and wait until all their threads stand still."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    while any(_runs(task) for process in processes for task in Path(f"/proc/{process}/task").glob("*/stat")):
        time.sleep(0.001)


def _runs(stat: Path) -> bool:
    """Whether a thread exists and is not stopped."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0] not in "TZX"
    return False


class ServerProcess:
    """``opweave serve-devices`` in a process of its own.

    Attributes:
        address: where it listens.
        metrics: address of its metrics, if it shows any.
    """

    def __init__(self, *options: str, devices: str = "cpu", port: int = 0, host: str = "127.0.0.1") -> None:
        shown = f"[{host}]" if ":" in host else host
        own = ["--listen", f"{shown}:{port}", "--devices", devices, "--grace", "0"]
        command = [sys.executable, "-m", "opweave", "serve-devices", *own, *options]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("OPWEAVE_")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        self.address = self.metrics = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("metrics"):
                self.metrics = line.split()[-1]
            if line.startswith("listening on "):
                self.address = line.split()[2].rstrip(":")
                return
        _, why = self.process.communicate()
        raise AssertionError(f"the server ended: {why}")

    @property
    def worker(self) -> int:
        """The process that computes."""
        children = ""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                children += (task / "children").read_text()
        return int(children.split()[0])

    def signal(self, number: int) -> None:
        """Send a signal to both processes."""
        with suppress(ProcessLookupError):
            os.kill(self.worker, number)
            os.kill(self.process.pid, number)

    def stop(self) -> int:
        """End it in order; returns the exit status."""
        with suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.worker, signal.SIGCONT)
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status


@contextmanager
def serve_process(*options: str, **where: Any) -> Iterator[ServerProcess]:
    """A server process within a ``with`` block."""
    server = ServerProcess(*options, **where)
    try:
        yield server
    finally:
        server.stop()
