"""`Front`: what clients reach. It listens, answers heartbeats, and passes connections to the process that computes.

It computes nothing, so that it always answers in time, and says of the other process whether it runs. If that ends, its
clients have lost their devices, and a new one is started for those that come.
"""

from __future__ import annotations

import errno
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, Final

from opweave.errors import OpweaveError, Unavailable
from opweave_remote.door import Door, how_it_ended, life_of, start_worker
from opweave_remote.failures import decode_error
from opweave_remote.heartbeat import receive_exactly
from opweave_remote.server.limits import Limits
from opweave_remote.server.monitor import Monitor
from opweave_remote.server.newcomers import Newcomers
from opweave_remote.wires import HEARTBEAT, SESSION, STREAM, Address, tuned

__all__ = ["Front", "listen"]

_STARTING: Final = 60.0
"""Seconds for which a connection waits while a process with the devices is being started."""
_ASKING: Final = 10.0
"""Seconds that a request for metrics may take."""
_RESTARTS: Final = 5
_WITHIN: Final = 60.0


def listen(address: Address) -> socket.socket:
    """A listening socket; for ``::``, all addresses of this machine, those of IPv4 too.

    Raises:
        Unavailable: the address is in use, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        both = address.host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(tuple(address), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        # What Python adds to the system's text repeats the address.
        why = str(error).partition(" (while")[0]
        taken = error.errno == errno.EADDRINUSE
        remedy = "is it running there already? If not, choose another port" if taken else "choose another address"
        raise Unavailable(f"cannot listen on {address}: {why}", remedy=remedy) from error


class Front:
    """Listens for a process that computes, which it starts.

    Args:
        listener: where clients come.
        settings: of the process (`opweave_remote.server.worker.make_server`).
        log: called with a line of text for each thing that happens.

    Attributes:
        devices: names of the devices that are shown.
        address: where it listens.

    Raises:
        OpweaveError: the process cannot serve with these settings, and says why.
    """

    def __init__(
        self, listener: socket.socket, settings: dict[str, Any], log: Callable[[str], object] = lambda line: None
    ) -> None:
        self.devices: list[str] = []
        self.address: Final = Address(*listener.getsockname()[:2])
        self.ended: Final = Event()
        self._listener: Final = listener
        self._settings: Final = {**settings, "heartbeat": True}
        self._log: Final = log
        self._newcomers: Final = Newcomers(Limits(**settings.get("limits", {})).handshake)
        self._metrics: Final[Queue[str]] = Queue()
        self._asking: Final = Lock()
        self._stopping = False
        self._pages: ThreadingHTTPServer | None = None
        self._ready: Final = Event()
        self._process, self._door, self._monitor = self._start()
        self._ready.set()
        Thread(target=self._watch, name="opweave front", daemon=True).start()
        Thread(target=self._accept, name="opweave listener", daemon=True).start()

    def _start(self) -> tuple[subprocess.Popen[bytes], Door, Monitor]:
        process, door = start_worker(self._settings)
        self._process = process
        if self._stopping:  # `stop` has looked for it before it was there
            process.kill()
        try:
            what, value, _ = door.receive()
        except (EOFError, OSError) as error:
            raise Unavailable(
                f"the process with the devices ended before it was ready: {how_it_ended(process)}"
            ) from error
        if what != "ready":
            process.wait()
            raise decode_error(value).error
        self.devices = value
        monitor = Monitor(lambda: life_of(process))
        monitor.on_expired = lambda session: door.send("expire", session)
        return process, door, monitor

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopping or self._listener.fileno() < 0:
                    return
                continue
            Thread(target=self._route, args=(sock,), name="opweave caller", daemon=True).start()

    def _route(self, sock: socket.socket) -> None:
        """Answer heartbeats here, pass everything else on."""
        self._newcomers.enter(sock)
        try:
            with sock:
                said = sock.recv(len(SESSION), socket.MSG_PEEK | socket.MSG_WAITALL)
                if said == HEARTBEAT:
                    receive_exactly(sock, len(HEARTBEAT))
                    self._monitor.answer(sock, self._newcomers)
                elif len(said) == len(SESSION):
                    self._newcomers.leave()  # the other process gives it as much time again
                    self._pass_on(sock)
        except (EOFError, OSError):
            pass
        finally:
            self._newcomers.leave()

    def _pass_on(self, sock: socket.socket) -> None:
        """Pass a connection to the process that computes; while a new one is being started, wait for that."""
        while self._ready.wait(_STARTING):
            try:
                self._door.send("connect", None, sock)
            except OSError:
                if self._stopping:
                    return
                self.ended.wait(0.05)  # who receives there notices too, and starts a new one
            else:
                return

    def enter(self) -> socket.socket:
        """A connection to the process that computes, for this process: without TLS, its first bytes sent.

        Raises:
            OSError: there is no such process at the moment.
        """
        ours, theirs = map(tuned, socket.socketpair())
        with theirs:
            try:
                self._door.send("enter", None, theirs)
                ours.sendall(STREAM)
            except BaseException:
                ours.close()
                raise
        return ours

    # --- the process that computes ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Take what the process says, and start a new one when it ends."""
        ends: list[float] = []
        while True:
            try:
                while True:
                    what, value, _ = self._door.receive()
                    if what == "watch":
                        self._monitor.watch(value[0], value[1], value[2])
                    elif what == "forget":
                        self._monitor.forget(value)
                    elif what == "metrics":
                        self._metrics.put(value)
            except (EOFError, OSError):
                pass
            if self._stopping:
                break
            self._ready.clear()
            self._log(
                f"{how_it_ended(self._process, 10) or 'the process with the devices is gone'}; starting a new one"
            )
            self._door.close()
            self._process.kill()
            ends = [*(at for at in ends if monotonic() - at < _WITHIN), monotonic()]
            try:
                if len(ends) > _RESTARTS:
                    raise Unavailable(f"the process with the devices ended {len(ends)} times in {_WITHIN:g} s")
                self._process, self._door, self._monitor = self._start()
                self._ready.set()
            except OpweaveError as error:
                if not self._stopping:
                    self._log(f"error: {error}")
                break
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._listener.close()
        self.ended.set()

    # --- metrics ------------------------------------------------------------------------------------------------------

    def metrics(self) -> str:
        """What the server has done, as text for Prometheus; ``""`` while its process is being started."""
        with self._asking, suppress(OSError, Empty):
            while not self._metrics.empty():
                self._metrics.get()  # came too late for the call that asked
            self._door.send("metrics")
            return self._metrics.get(timeout=5)
        return ""

    def show_metrics(self, address: Address) -> Address:
        """Answer ``GET /metrics`` on an address; returns it with the port that it got. Raises as `listen`."""
        front, askers = self, Newcomers(_ASKING)

        class Page(BaseHTTPRequestHandler):
            def handle(self) -> None:
                askers.enter(self.connection)
                try:
                    super().handle()
                except OSError:  # the connection has ended, or took too long
                    pass
                finally:
                    askers.leave()

            def do_GET(self) -> None:
                text = front.metrics().encode() if self.path == "/metrics" else b""
                self.send_response(200 if text else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                pass

        listener = listen(address)
        # Its own socket would be one for IPv4 only.
        self._pages = ThreadingHTTPServer(address, Page, bind_and_activate=False)
        self._pages.socket.close()
        self._pages.socket = listener
        Thread(target=self._pages.serve_forever, name="opweave metrics", daemon=True).start()
        return Address(*listener.getsockname()[:2])

    # --- end ----------------------------------------------------------------------------------------------------------

    def end_now(self) -> None:
        """End at once, also where `stop` gives clients time to leave; from any thread, and from handlers of signals."""
        self._stopping = True
        self._process.kill()

    def stop(self, grace: float = 0.0) -> None:
        """Refuse further clients, give those that are here ``grace`` seconds to leave, then end. Waits for that."""
        self._stopping = True
        if self._pages is not None:
            self._pages.shutdown()
            self._pages.server_close()
        with suppress(OSError):
            self._door.send("stop", grace)
        if not self._ready.is_set():  # the process is being started, and has no clients
            self._process.kill()
        try:
            self._process.wait(grace + 20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        self.ended.wait(5)
        self._door.close()
