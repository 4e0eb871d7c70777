"""`Server`: accepts connections, checks whose they are, and serves them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread, current_thread
from time import monotonic
from typing import Final

from opweave.contract import Device, MemorySpace
from opweave.errors import FormatError, LifetimeError, OpweaveError, Unavailable
from opweave.registry.discovery import core_version
from opweave_remote.codecs import CODECS
from opweave_remote.description import DeviceInfo, ServerInfo, plain_features
from opweave_remote.failures import encode_error
from opweave_remote.heartbeat import receive_exactly
from opweave_remote.security import is_proof, new_nonce, proof
from opweave_remote.server.cache import WeightCache
from opweave_remote.server.channels import DeviceChannel
from opweave_remote.server.limits import Limits, Metrics
from opweave_remote.server.monitor import Monitor
from opweave_remote.server.newcomers import Newcomers
from opweave_remote.server.pulling import NAMED, Puller
from opweave_remote.server.session import Session
from opweave_remote.server.streams import StreamChannel
from opweave_remote.server.transfers import data_of
from opweave_remote.tls import TlsSocket
from opweave_remote.wire import MAX_BEFORE_PROOF, MAX_VERSION, MIN_VERSION, Kind
from opweave_remote.wires import SESSION, STREAM, Wire, same_machine, tuned

__all__ = ["Server"]


class Server:
    """Shows devices to clients.

    Args:
        devices: to show.
        token: what clients have to know; ``None``: TLS or a pipe tells who they are.
        tls: for TLS 1.3; ``None``: without, for loopback and pipes.
        limits: what one client may take.
        cache: of weights.
        monitor: answers heartbeats of sessions and tells which have expired; ``None``: no heartbeats.
        puller: fetches from other servers.

    Attributes:
        metrics: what it has done.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        token: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        cache: WeightCache | None = None,
        monitor: Monitor | None = None,
        puller: Puller | None = None,
    ) -> None:
        self.devices: Final = {device.name: device for device in devices}
        self.limits: Final = limits or Limits()
        self.metrics: Final = Metrics()
        self._token: Final = token
        self._tls: Final = tls
        self._cache: Final = cache
        self._monitor: Final = monitor
        self._puller: Final = puller or Puller(None)
        self._sessions: Final[dict[bytes, Session]] = {}
        self._lock: Final = Lock()
        self._threads: Final[set[Thread]] = set()
        self._newcomers: Final = Newcomers(self.limits.handshake)
        self._stopping = False  # no further clients
        self._ended = False  # no further connections of those that are here either
        self._info: Final = self._describe().encode()
        if monitor is not None:
            monitor.on_expired = self.expire

    def _describe(self) -> ServerInfo:
        spaces: dict[int, int] = {}

        def number(space: MemorySpace) -> int:
            return spaces.setdefault(id(space), len(spaces))

        described = [
            DeviceInfo(
                d.name, d.kind, d.description, d.hardware_id, d.alignment, d.max_buffer_size, d.raises_index_errors,
                number(d.space), tuple(map(number, d.shared_spaces)), plain_features(d),
            )
            for d in self.devices.values()
        ]  # fmt: skip
        heartbeat, cache = self._monitor is not None, self._cache is not None
        peers = self._puller.uses_tls
        return ServerInfo(
            core_version() or "",
            same_machine(),
            heartbeat,
            cache,
            peers,
            self.limits.data,
            tuple(CODECS),
            tuple(described),
        )

    # --- connections --------------------------------------------------------------------------------------------------

    def admit(self, sock: socket.socket, *, inside: bool = False) -> None:
        """Serve a connection that was just accepted, on a thread of its own.

        Args:
            inside: it comes from the process that has started this one, and is without TLS.
        """
        with self._lock:
            crowd = self.limits.clients * (self.limits.connections + 2)
            if self._ended or len(self._threads) >= crowd:
                sock.close()
                return
            thread = Thread(target=self._serve, args=(sock, inside), name="opweave client", daemon=True)
            self._threads.add(thread)
            thread.start()  # within the lock: `stop` joins the threads of the set, which must have started

    def _serve(self, sock: socket.socket, inside: bool) -> None:
        self._newcomers.enter(sock)
        try:
            with self.metrics.during("connections"), sock:
                self._greet(sock, inside)
        except (OSError, EOFError):
            pass  # also of TLS: the other side has ended, or its certificate is not trusted
        finally:
            self._newcomers.leave()
            with self._lock:
                self._threads.discard(current_thread())

    def _greet(self, sock: socket.socket, inside: bool) -> None:
        preamble = receive_exactly(sock, len(SESSION))
        if preamble not in (SESSION, STREAM):
            return
        over: socket.socket | TlsSocket = tuned(sock)
        if self._tls is not None and not inside:
            over = TlsSocket(sock, self._tls)
        wire = Wire(over, MAX_BEFORE_PROOF, 0)
        try:
            self._check(wire, preamble)
        except OpweaveError as error:
            self.metrics.add("refused_total")
            with suppress(OSError):
                wire.say(Kind.REFUSED, encode_error(error))
        finally:
            self.metrics.add("received_bytes_total", wire.reader.received)
            self.metrics.add("sent_bytes_total", wire.sent)

    def _check(self, wire: Wire, preamble: bytes) -> None:
        """Have the other side prove who it is, and serve it."""
        nonce = new_nonce()
        wants = preamble == STREAM or self._token is not None
        wire.say(Kind.CHALLENGE, MIN_VERSION, MAX_VERSION, nonce, int(wants))
        version, role, name, own, shown = wire.expect(Kind.HELLO).args
        if not MIN_VERSION <= version <= MAX_VERSION:
            raise Unavailable(f"this server speaks versions {MIN_VERSION} to {MAX_VERSION} of the protocol",
                              remedy="install versions of opweave-remote that go together")  # fmt: skip
        if (role == "session") != (preamble == SESSION):
            raise FormatError(f"a connection of the role {role!r:.20}")
        session = grant = None
        key = self._token or b""
        if role != "session":
            session = self._sessions.get(name[:16])
            key = b"" if session is None else session.key
            if session is not None and role == "pull":
                grant = session.redeem(name[16:NAMED])
                key = grant.secret
        # Also for a session that does not exist: an empty key proves nothing.
        if wants and not (is_proof(shown, key, b"client", nonce, own, role.encode(), name) and key):
            if role != "session":  # also where a client comes back whose server was started again meanwhile
                raise LifetimeError("there is no such session")
            raise Unavailable("the token is wrong", remedy="use the server's token file")
        mine = proof(key, b"server", own, nonce)
        if role == "session":
            self._serve_session(wire, mine)
        elif session is not None and grant is not None:
            wire.say(Kind.WELCOME, mine, b"", b"", None)
            buffer = session.buffer(grant.buffer)
            buffer.check(grant.offset, grant.size)
            self._release(wire)
            wire.send(data_of(0, buffer, grant.offset, grant.size))
        elif session is not None and role in ("stream", "bulk"):
            self._serve_link(session, wire, role, mine)
        else:
            raise FormatError(f"a connection of the role {role!r:.20}")

    def _release(self, wire: Wire) -> None:
        """Replace the limits for connections that have proved nothing yet by those of clients."""
        self._newcomers.leave()
        wire.reader.max_args, wire.reader.max_data = self.limits.message, self.limits.data

    def _serve_session(self, wire: Wire, mine: bytes) -> None:
        session = Session(self.devices, self.limits, self.metrics, self._cache, self._puller)
        with self._lock:
            if self._stopping:
                raise Unavailable("the server is being stopped")
            if len(self._sessions) >= self.limits.clients:
                raise Unavailable(f"the server has {self.limits.clients} clients already",
                                  remedy="try again later, or start it with --max-clients")  # fmt: skip
            self._sessions[session.id] = session
        self.metrics.add("clients_total")
        with self.metrics.during("clients"):
            try:
                session.join(wire)
                if self._monitor is not None:
                    self._monitor.watch(session.id, session.key, self.limits.lease)
                wire.say(Kind.WELCOME, mine, session.id, session.key, self._info)
                self._release(wire)
                DeviceChannel(session, wire).serve()
            finally:
                session.close(wire)
                if self._monitor is not None:
                    self._monitor.forget(session.id)
                with self._lock:
                    del self._sessions[session.id]

    def _serve_link(self, session: Session, wire: Wire, role: str, mine: bytes) -> None:
        session.join(wire)
        try:
            wire.say(Kind.WELCOME, mine, b"", b"", None)
            self._release(wire)
            if role == "bulk":
                DeviceChannel(session, wire).serve()
            else:
                channel = StreamChannel(session, wire)
                try:
                    channel.serve()
                finally:
                    channel.close()
        finally:
            session.leave(wire)

    # --- end ----------------------------------------------------------------------------------------------------------

    def expire(self, session: bytes) -> None:
        """End the session of a client that gives no sign of life."""
        with self._lock:
            found = self._sessions.get(session)
        if found is not None:
            self.metrics.add("expired_total")
            found.end()

    def stop(self, grace: float = 0.0) -> None:
        """Take no further clients, give those that are here ``grace`` seconds to leave, in which they may open further
        connections, then end their sessions and wait until all is freed."""
        until = monotonic() + grace
        while True:
            with self._lock:
                self._stopping = True
                sessions, threads = list(self._sessions.values()), list(self._threads)
                if not sessions or monotonic() >= until:
                    self._ended = True
                    break
            for thread in threads:
                thread.join(max(0.0, min(0.1, until - monotonic())))
        for session in sessions:
            session.end()
        for thread in threads:
            thread.join(10)
