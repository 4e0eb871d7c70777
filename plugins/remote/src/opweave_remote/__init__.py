"""Devices of other machines and processes for opweave.

`connect` uses the devices of a server, `isolated` a device in a process of its own. ``opweave serve-devices`` is the
server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opweave_remote.backend import RemoteBackend, connect
    from opweave_remote.connection import Connection
    from opweave_remote.device import RemoteDevice
    from opweave_remote.isolation import isolated

__all__ = ["Connection", "RemoteBackend", "RemoteDevice", "connect", "isolated"]

_FROM = {
    "Connection": "connection", "RemoteBackend": "backend", "RemoteDevice": "device", "connect": "backend",
    "isolated": "isolation",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
