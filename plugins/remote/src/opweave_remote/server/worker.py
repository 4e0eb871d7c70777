"""The process that computes: ``python -m opweave_remote.server.worker FD``, the file descriptor of its end of a `Door`.

Started by `opweave serve-devices`, and for `opweave_remote.isolated`. Connections come through the door; when the door
is closed, the process ends.
"""

from __future__ import annotations

import socket
import sys
from threading import Thread
from typing import Any, Final

import opweave
from opweave.contract import Device, Kind
from opweave.errors import OpweaveError, Unavailable
from opweave.packages import pip_install
from opweave_remote.door import Door
from opweave_remote.failures import encode_error
from opweave_remote.security import read_token, tls_client, tls_server
from opweave_remote.server.cache import WeightCache
from opweave_remote.server.limits import Limits
from opweave_remote.server.monitor import Monitor
from opweave_remote.server.pulling import Puller
from opweave_remote.server.serving import Server

__all__ = ["main", "make_server", "shown_devices"]


_SWITCH: Final = 2e-4
"""Seconds for which a thread that computes keeps Python's GIL while another one has a message to answer."""


class FarMonitor(Monitor):
    """Heartbeats are answered at the other end of the door."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door: Final = door

    def watch(self, session: bytes, key: bytes, lease: float) -> None:
        self._door.send("watch", [session, key, lease])

    def forget(self, session: bytes) -> None:
        self._door.send("forget", session)


def shown_devices(names: list[str]) -> list[Device]:
    """The devices of these names; for none, all of this machine but ``host`` and those of other servers.

    Raises:
        Unavailable: ``host`` or a simulated device is named, or there is no device at all.
        UnknownNameError, PluginError: as `opweave.device`.
    """
    found = [opweave.device(name) for name in names] or [
        d for d in opweave.devices() if d.kind is not Kind.HOST and not d.name.startswith("remote:")
    ]
    found = list(dict.fromkeys(found))
    for device in found:
        if device.kind is Kind.HOST or device.simulated:
            raise Unavailable(f"{device.name} is no device for others", remedy="every machine has its own")
    if not found:
        remedy = f"{pip_install('opweave-cpu')}, or another backend"
        raise Unavailable("this machine has no devices to show", remedy=remedy)
    return found


def make_server(settings: dict[str, Any], monitor: Monitor | None) -> Server:
    """The server that settings describe: ``devices``, ``token_file``, ``tls`` (certificate, key, authority of clients),
    ``limits``, ``cache`` (folder, bytes, files), ``peer_ca``."""
    token = None if settings.get("token_file") is None else read_token(settings["token_file"])
    tls = None if settings.get("tls") is None else tls_server(*settings["tls"])
    cache = None
    if settings.get("cache") is not None:
        folder, limit, files = settings["cache"]
        cache = WeightCache(folder, token or b"", limit, files)
    peers = settings.get("peer_ca")
    return Server(
        shown_devices(settings.get("devices", [])),
        token=token,
        tls=tls,
        limits=Limits(**settings.get("limits", {})),
        cache=cache,
        monitor=monitor,
        puller=Puller(None if peers is None else tls_client(peers)),
    )


def main(door: Door) -> None:
    """Serve what comes through the door until it is closed."""
    sys.setswitchinterval(_SWITCH)
    what, settings, _ = door.receive()
    monitor = FarMonitor(door) if settings.get("heartbeat") else None
    try:
        server = make_server(settings, monitor)
    except OpweaveError as error:
        door.send("failed", encode_error(error))
        return
    door.send("ready", list(server.devices))
    try:
        while True:
            what, value, sock = door.receive()
            if what == "connect" and sock is not None:
                server.admit(sock)
            elif what == "enter" and sock is not None:
                server.admit(sock, inside=True)
            elif what == "expire":
                server.expire(value)
            elif what == "metrics":
                door.send("metrics", server.metrics.text())
            elif what == "stop":
                # On a thread: clients that are still here may open further connections, which come by this one.
                Thread(target=_stop, args=(server, door, value), name="opweave stop", daemon=True).start()
    except (EOFError, OSError):
        pass
    server.stop()


def _stop(server: Server, door: Door, grace: float) -> None:
    server.stop(grace)
    door.close()


if __name__ == "__main__":
    main(Door(socket.socket(fileno=int(sys.argv[1]))))
