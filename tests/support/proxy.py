"""`Proxy`: a way to a server that delays, cuts, halves and loses, as networks do."""

from __future__ import annotations

import math
import random
import socket
import struct
import time
from contextlib import suppress
from threading import Event, Lock, Thread

__all__ = ["Proxy"]

_RESET = struct.pack("ii", 1, 0)  # closing then ends the connection by a reset


class Proxy:
    """Passes connections on to an address, each way by a thread.

    Args:
        target: ``host:port``.
        latency: seconds by which each piece is delayed, from 0 to so many. Each connection and way draws its own, so
            that pieces of different connections overtake each other.
        piece: most bytes of a piece; each is of a random size up to that.
        rate: bytes per second that pass from clients, over all connections together.
        seed: of what is drawn.

    Attributes:
        address: where clients connect.
    """

    def __init__(
        self, target: str, *, latency: float = 0.0, piece: int = 1 << 16, rate: float = math.inf, seed: int = 0
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._latency, self._piece, self._rate = latency, piece, rate
        self._free_at = 0.0  # when the latest piece of a client has passed
        self._rng = random.Random(seed)
        self._lock = Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._open = Event()  # not set: nothing passes
        self._open.set()
        self._ended = False
        self._threads: list[Thread] = []
        self._acceptor = Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = True
        self._open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, server))
                seeds = self._rng.random(), self._rng.random()
            thread = Thread(target=self._pass_both, args=(client, server, seeds), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass_both(self, client: socket.socket, server: socket.socket, seeds: tuple[float, float]) -> None:
        other = Thread(target=self._pass, args=(server, client, seeds[1], math.inf), daemon=True)
        with client, server:
            other.start()
            self._pass(client, server, seeds[0], self._rate)
            other.join()

    def _pass(self, source: socket.socket, sink: socket.socket, seed: float, rate: float) -> None:
        rng = random.Random(seed)
        with suppress(OSError):
            while piece := source.recv(rng.randint(1, self._piece)):
                if self._latency:
                    time.sleep(rng.uniform(0, self._latency))
                self._limit(len(piece) / rate)
                self._open.wait()
                sink.sendall(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _limit(self, seconds: float) -> None:
        if seconds:
            with self._lock:
                until = self._free_at = max(self._free_at, time.monotonic()) + seconds
            time.sleep(max(0.0, until - time.monotonic()))

    def _drawn(self, count: int | None) -> list[tuple[socket.socket, socket.socket]]:
        with self._lock:
            return self._pairs[:] if count is None else self._rng.sample(self._pairs, min(count, len(self._pairs)))

    def cut(self, count: int | None = None) -> None:
        """End connections by a reset in the middle of what they carry; ``None``: all."""
        for pair in self._drawn(count):
            for sock in pair:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    sock.shutdown(socket.SHUT_RDWR)

    def halve(self, count: int | None = None) -> None:
        """End one way of connections; the other one stays open."""
        for client, server in self._drawn(count):
            with suppress(OSError):
                self._rng.choice((client, server)).shutdown(socket.SHUT_WR)

    def part(self) -> None:
        """Let nothing pass any more: nobody is told."""
        self._open.clear()

    def join(self) -> None:
        """Let pass what `part` has held."""
        self._open.set()
