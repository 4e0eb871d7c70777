"""`Connection`: a server as its client sees it: its devices, the links to it, and whether it is alive."""

from __future__ import annotations

import socket
import ssl
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from opweave.concurrency import Lock
from opweave.contract import MemorySpace, Plan
from opweave.errors import FormatError, LifetimeError, OpweaveError, Unavailable
from opweave.lifecycle import close_at_exit, notify_after_fork
from opweave_remote.description import ServerInfo
from opweave_remote.dialing import Dial, end, in_time
from opweave_remote.failures import decode_error
from opweave_remote.heartbeat import keep_asking
from opweave_remote.link import Fate, Link
from opweave_remote.packing import Packing
from opweave_remote.security import is_proof, new_nonce, proof
from opweave_remote.tls import TlsSocket
from opweave_remote.wire import MAX_BEFORE_PROOF, MAX_VERSION, MIN_VERSION, Kind, encode
from opweave_remote.wires import HEARTBEAT, SESSION, STREAM, Address, Wire

if TYPE_CHECKING:
    from opweave_remote.device import RemoteDevice
    from opweave_remote.memory import RemoteMemory

__all__ = ["BULK_LINKS", "Carrier", "Connection"]

BULK_LINKS: Final = 2
"""Connections that carry large transfers beside the one for control messages."""

_MAX_ANSWER: Final = 1 << 26
_MOST_PATIENT: Final = 1e6
_ANOTHER: Final = "does the server use TLS, or another program that port?"
_PAUSE: Final = 0.05
"""Seconds between two attempts to connect."""


class Carrier(Protocol):
    """A further way for large transfers to and from the devices of a connection.

    Attributes:
        least: bytes of a transfer from which on it is asked.
    """

    least: int

    def upload(self, device: RemoteDevice, mem: RemoteMemory, offset: int, data: memoryview) -> bool:
        """Write bytes to a buffer and wait for that; ``False``: the sockets are to do it, all of it."""

    def download(self, device: RemoteDevice, mem: RemoteMemory, offset: int, out: memoryview) -> bool:
        """Read bytes of a buffer; ``False``: the sockets are to do it, all of it."""


class Connection:
    """A server whose devices this process uses. Made by `opweave_remote.connect` and `opweave_remote.isolated`.

    Args:
        name: the part of the devices' names before the slash.
        dial: opens connections.
        token: proves both sides to each other; ``None`` where TLS or a pipe does that.
        deadline: seconds without a sign of life after which the server is lost; also those that reaching it may take,
            and proving to each other who both are.

    Attributes:
        name: as given.
        address: where other servers reach it; ``None``: nowhere.
        plain: whether that is without TLS.
        info: what the server says of itself.
        packing: whether large uploads are compressed.
        carrier: a further way for large transfers, which a cluster may offer; ``None``: there is none.
        devices: its devices, in its order.

    Raises:
        Unavailable: nobody listens there, the two sides do not know each other, or they speak other versions; a
            deadline that is not above 0, or above 1e6 s.
    """

    def __init__(self, name: str, dial: Dial, token: bytes | None, deadline: float) -> None:
        if not 0 < deadline <= _MOST_PATIENT:
            raise Unavailable(f"a deadline of {deadline:g} s", remedy="give seconds, more than 0")
        self.name: Final = name
        self.fate: Final = Fate(f"the server {name}")
        self.deadline: Final = deadline
        self.address: Address | None = None
        self.plain = True
        self._dial: Final = dial
        self._key = b""
        self._session = b""
        self._lock: Final = Lock()
        self._bulk: list[Link] = []
        self._numbers: Final = count(1)
        self.plans: Final[weakref.WeakValueDictionary[int, Plan]] = weakref.WeakValueDictionary()
        self.dropped: Final[deque[int]] = deque()  # numbers of buffers that were freed
        wire, described = self._open(SESSION, "session", token, deadline)
        self.info: Final = ServerInfo.decode(described)
        self.control: Final = Link(self.fate, wire, watches=True)
        self.packing = Packing(self.bulk, self.info.codecs)
        self.carrier: Carrier | None = None
        self._spaces: Final[dict[int, MemorySpace]] = {}
        from opweave_remote.device import RemoteDevice

        self.devices: Final[tuple[RemoteDevice, ...]] = tuple([RemoteDevice(self, d) for d in self.info.devices])
        self._end: Final = weakref.finalize(self, self.fate.lose, "nobody uses it any more", wanted=True)
        self._end.atexit = False
        close_at_exit(self)
        notify_after_fork(self)
        if self.info.heartbeat:
            self._start_heartbeat()

    def __repr__(self) -> str:
        state = "" if self.alive else ", lost"
        return f"<Connection to {self.name}: {', '.join(d.name for d in self.devices)}{state}>"

    @property
    def alive(self) -> bool:
        """Whether the server is neither lost nor closed, as far as is known."""
        return self.fate.error is None

    # --- links --------------------------------------------------------------------------------------------------------

    def _open(self, preamble: bytes, role: str, key: bytes | None, timeout: float) -> tuple[Wire, Any]:
        """A wire on which both sides have proved who they are, and what the server says of itself."""
        try:
            sock = self._dial(preamble)
        except (ssl.SSLError, EOFError) as error:
            remedy = (
                "does a server with TLS listen there? Check certificates, their dates, the clocks, and the authorities "
                "that each side trusts"
            )
            raise Unavailable(f"no TLS with {self.name}: {error}", remedy=remedy) from error
        except OSError as error:
            remedy = "is `opweave serve-devices` running there, and the port open?"
            raise Unavailable(f"{self.name} cannot be reached: {error}", remedy=remedy) from error
        wire = Wire(sock, MAX_BEFORE_PROOF, 0)
        try:
            sock.settimeout(timeout)
            with in_time(sock, timeout):
                described = self._greet(wire, role, key, not isinstance(sock, TlsSocket) and preamble == SESSION)
            sock.settimeout(None)
        except (EOFError, OSError, FormatError) as error:
            wire.close()
            if isinstance(error, TimeoutError):
                what, remedy = f"did not answer within {timeout:g} s", "is it stopped or busy? " + _ANOTHER
            elif isinstance(error, FormatError):
                what, remedy = f"does not speak as opweave-remote does: {error}", _ANOTHER
            else:
                what, remedy = f"ended the connection before it was open: {error}", _ANOTHER
            raise Unavailable(f"{self.name} {what}", remedy=remedy) from error
        except BaseException:
            wire.close()
            raise
        wire.reader.max_args = wire.reader.max_data = _MAX_ANSWER
        return wire, described

    def _greet(self, wire: Wire, role: str, key: bytes | None, open_line: bool) -> Any:
        least, most, nonce, wants = wire.expect(Kind.CHALLENGE).args
        version = min(most, MAX_VERSION)
        if version < max(least, MIN_VERSION):
            raise Unavailable(
                f"{self.name} speaks versions {least} to {most} of the protocol, and this opweave-remote {MIN_VERSION} "
                f"to {MAX_VERSION}",
                remedy="install versions of opweave-remote that go together",
            )
        if wants and key is None:
            raise Unavailable(f"{self.name} asks for a token",
                              remedy="pass token_file= to connect; OPWEAVE_REMOTE_TOKEN_FILE is for the servers that "
                              "OPWEAVE_REMOTE lists")  # fmt: skip
        if open_line and key is not None and not wants:
            raise Unavailable(f"{self.name} does not ask for the token that proves it to be the right server",
                              remedy="start it with --token-file")  # fmt: skip
        own = new_nonce()
        shown = proof(key, b"client", nonce, own, role.encode(), self._session) if wants and key else b""
        wire.say(Kind.HELLO, version, role, self._session, own, shown)
        wire.reader.max_args = _MAX_ANSWER  # descriptions of devices
        frame = wire.expect(Kind.WELCOME, Kind.REFUSED)
        if frame.kind is Kind.REFUSED:
            raise decode_error(frame.args[0]).error
        shown, session, session_key, described = frame.args
        if wants and key is not None and not is_proof(shown, key, b"server", own, nonce):
            raise Unavailable(f"{self.name} does not know the token", remedy="is this the right server?")
        if role == "session":
            self._session, self._key = session, session_key
        return described

    def open_link(self, role: str, device: str = "") -> Link:
        """A further connection: ``"stream"``, or ``"bulk"`` for large transfers.

        A failed attempt does not mean that the server is lost: the heartbeat and the first connection show that. After
        a timeout, where the server may just be busy, it is tried again without limit; where connections are refused
        or broken off, until the deadline has passed.

        Raises:
            DeviceLostError: the server is lost.
            Unavailable: it refuses, because this client has as many connections as it may; its certificate has expired.
        """
        until = monotonic() + self.deadline
        while True:
            self.fate.check()
            try:
                wire, _ = self._open(STREAM, role, self._key, self.deadline)
                return Link(self.fate, wire, device)
            except Unavailable as error:
                cause = error.__cause__
                if not isinstance(cause, (OSError, EOFError)) or isinstance(cause, ssl.SSLCertVerificationError):
                    raise
                if monotonic() > until and not isinstance(cause, TimeoutError):
                    self.fate.lose(error.message)
            except LifetimeError:
                self.fate.lose("it was started again and does not know this client")
            self.fate.ended.wait(_PAUSE)

    @property
    def secrets(self) -> tuple[bytes, bytes]:
        """The session, and the key by which further connections of it are known. Nobody else may learn them."""
        return self._session, self._key

    def bulk(self) -> list[Link]:
        """The links for large transfers."""
        with self._lock:
            while len(self._bulk) < BULK_LINKS:
                self._bulk.append(self.open_link("bulk"))
            return self._bulk

    def _start_heartbeat(self) -> None:
        try:
            sock = self._dial(HEARTBEAT)
        except OSError as error:
            self.fate.lose(f"no heartbeat: {error}")
            return
        assert isinstance(sock, socket.socket)
        self.fate.at_end(partial(end, sock), sock.close)
        keep_asking(sock, self.fate, self._session, self._key, self.deadline)

    # --- what devices need --------------------------------------------------------------------------------------------

    def number(self) -> int:
        """A number for something new on the server."""
        return next(self._numbers)

    def space(self, number: int, name: str) -> MemorySpace:
        """The memory space that the server calls by this number."""
        return self._spaces.setdefault(number, MemorySpace(name))

    def copies_from(self, other: Connection) -> bool:
        """Whether this server fetches bytes from another one itself."""
        if other.address is None:
            return False
        if other.plain:
            return other.address.is_loopback and self.info.machine == other.info.machine
        return self.info.peers

    def send_dropped(self) -> None:
        """Tell the server which buffers were freed. Finalisers, which may run within any call, only note them."""
        numbers = []
        while self.dropped:
            numbers.append(self.dropped.popleft())
        if numbers and self.alive:
            self.control.post(encode(Kind.FREE, numbers))

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection: the server frees all that belongs to it, devices are lost. May be called again."""
        with suppress(OpweaveError):
            self.send_dropped()
            self.control.flush()
        self._end.detach()
        self.fate.lose("the connection was closed", wanted=True)

    def after_fork(self) -> None:
        self._end.detach()
        self.fate.leave_to_parent()

    def describe_pending(self) -> str:
        return ""
