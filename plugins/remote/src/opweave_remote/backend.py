"""`RemoteBackend`: the devices of all servers that this process uses; `connect`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import opweave
from opweave.concurrency import Lock
from opweave.contract import Backend, Device
from opweave.errors import OpweaveError, PluginError, Unavailable
from opweave_remote.connection import Connection
from opweave_remote.dialing import tcp_dial
from opweave_remote.security import check_token, read_token, tls_client
from opweave_remote.wires import Address

__all__ = ["RemoteBackend", "connect", "servers"]

DEADLINE: Final = 10.0


class Settings:
    """How to reach one server, so that it can be reached again."""

    def __init__(
        self,
        address: Address,
        token: bytes | None,
        tls: bool,
        ca: str | None,
        cert: str | None,
        key: str | None,
        server_name: str | None,
        deadline: float,
    ) -> None:
        self.address: Final = address
        self._token: Final = token
        self._context: Final = tls_client(ca, cert, key) if tls else None
        self._server_name: Final = server_name
        self._deadline: Final = deadline

    def connect(self) -> Connection:
        """A new connection; raises as `connect`."""
        dial = tcp_dial(self.address, self._context, self._server_name, self._deadline)
        made = Connection(str(self.address), dial, self._token, self._deadline)
        made.address, made.plain = self.address, self._context is None
        return made


_LOCK: Final = Lock()
_SERVERS: Final[dict[str, tuple[Settings, Connection | None]]] = {}
"""The servers that this process has asked for, by address."""


def connect(
    address: str,
    *,
    token: str | bytes | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: bool | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    server_name: str | None = None,
    deadline: float = DEADLINE,
) -> Connection:
    """Use the devices of a server. They are in `opweave.devices` from then on, as ``remote:<address>/<name there>``.

    When the connection is lost, its devices are lost too and leave `opweave.devices`. `opweave.rescan` connects again.

    Args:
        address: ``host:port`` or ``[IPv6]:port``.
        token: what the server's token file contains.
        token_file: that file, in place of ``token``; only its owner may read it.
        tls: whether to use TLS 1.3. Default: yes, except for loopback addresses if no ``ca`` is given.
        ca: PEM file of the certificate authority that is trusted. Default: those the system trusts.
        cert, key: PEM files of this client's certificate, for servers that ask for one.
        server_name: the name in the server's certificate, if it is not the host of the address.
        deadline: seconds after which a server that gives no sign of life is lost. Connecting takes at most twice as
            long, apart from the look-up of the name.

    Raises:
        FormatError: ``address`` is not of these forms.
        Unavailable: the server cannot be reached or does not know the token, certificates do not fit, the versions of
            the protocol do not; others may read the token file; a deadline that is not above 0; without TLS to another
            machine; both ``token`` and ``token_file``.
    """
    where = Address.parse(address)
    if token is not None and token_file is not None:
        raise Unavailable("a token and a token file were given", remedy="give one of them")
    secret = check_token(token) if token is not None else read_token(token_file) if token_file is not None else None
    wanted = (not where.is_loopback or ca is not None) if tls is None else tls
    if not wanted and not where.is_loopback:
        raise Unavailable(f"{where} is another machine, which is reached by TLS only", remedy="leave tls=False out")
    settings = Settings(where, secret, wanted, ca, cert, key, server_name, deadline)
    with _LOCK:
        known = _SERVERS.get(str(where))
        if known is not None and known[1] is not None and known[1].alive:
            known[1].close()
        made = settings.connect()
        _SERVERS[str(where)] = settings, made
    _register(made)
    return made


def servers() -> list[Connection]:
    """The connections of this process that are alive."""
    with _LOCK:
        return [made for _, made in _SERVERS.values() if made is not None and made.alive]


def _register(connection: Connection) -> None:
    """Make the devices of a new connection known to the registry."""
    with suppress(PluginError):  # the plugin is disabled: its devices are still in `Connection.devices`
        opweave.load("remote")
        opweave.rescan()


class RemoteBackend(Backend):
    """The devices of the servers that ``OPWEAVE_REMOTE`` lists, and of those that `connect` was called for.

    Environment: ``OPWEAVE_REMOTE=host:port,...``, and for all of these ``OPWEAVE_REMOTE_TOKEN_FILE``,
    ``OPWEAVE_REMOTE_CA``, ``OPWEAVE_REMOTE_CERT``, ``OPWEAVE_REMOTE_KEY``, ``OPWEAVE_REMOTE_DEADLINE`` (seconds).
    """

    priority = -10
    dynamic = True

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}

    def devices(self) -> Sequence[Device]:
        """The devices of all servers that can be reached; none where no server is listed. Connects again to servers
        that are lost or could not be reached before.

        Raises:
            Unavailable: no server can be reached; says why for each.
        """
        found: list[Device] = []
        problems: dict[str, str] = {}
        with _LOCK:
            for name in filter(None, os.environ.get("OPWEAVE_REMOTE", "").replace(" ", "").split(",")):
                try:
                    settings = _from_environment(name)
                    _SERVERS.setdefault(str(settings.address), (settings, None))
                except OpweaveError as error:
                    problems[name] = _said(error)
            for name, (settings, connection) in list(_SERVERS.items()):
                if connection is None or not connection.alive:
                    try:
                        connection = settings.connect()
                    except OpweaveError as error:
                        problems[name] = _said(error)
                        continue
                    _SERVERS[name] = settings, connection
                found += connection.devices
        self._problems = problems
        if problems and not found:
            raise Unavailable("\n".join(problems.values()), remedy="a server is started by `opweave serve-devices`")
        return found

    def features(self) -> Mapping[str, Any]:
        """Address -> why a server that is listed has no devices here."""
        return dict(self._problems)


def _said(error: OpweaveError) -> str:
    return str(getattr(error, "message", "") or error)


def _from_environment(name: str) -> Settings:
    given = os.environ.get
    address = Address.parse(name)
    file, ca = given("OPWEAVE_REMOTE_TOKEN_FILE"), given("OPWEAVE_REMOTE_CA")
    token = read_token(file) if file else None
    tls = not address.is_loopback or bool(ca)
    try:
        deadline = float(given("OPWEAVE_REMOTE_DEADLINE") or DEADLINE)
    except ValueError:
        raise Unavailable(
            f"OPWEAVE_REMOTE_DEADLINE is {given('OPWEAVE_REMOTE_DEADLINE')!r}", remedy="give seconds"
        ) from None
    return Settings(
        address, token, tls, ca or None, given("OPWEAVE_REMOTE_CERT"), given("OPWEAVE_REMOTE_KEY"), None, deadline
    )
