"""What a server says of itself and its devices (`ServerInfo`, `DeviceInfo`), as values of a message and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opweave.contract import Device, Kind
from opweave.errors import FormatError
from opweave_remote.wire import fields

__all__ = ["DeviceInfo", "ServerInfo"]

_MOST_DEVICES = 1024


class DeviceInfo(NamedTuple):
    """A device of a server.

    Attributes:
        name: on the server.
        kind, description, hardware_id, alignment, max_buffer_size, raises_index_errors: as of `Device`.
        space, shared_spaces: numbers of memory spaces; devices of one server may share some.
        features: what its driver reports.
    """

    name: str
    kind: Kind
    description: str
    hardware_id: str | None
    alignment: int
    max_buffer_size: int | None
    raises_index_errors: bool
    space: int
    shared_spaces: tuple[int, ...]
    features: Mapping[str, Any]

    def encode(self) -> list[Any]:
        return [*self._replace(kind=self.kind.name, shared_spaces=list(self.shared_spaces))]  # type: ignore[arg-type]

    @classmethod
    def decode(cls, value: Any) -> DeviceInfo:
        found = fields(value, "sss*u*?uU*", "the description of a device")
        name, kind, description, hardware, alignment, largest, raises, space, shared, features = found
        sound = (
            name.isprintable()
            and not any(c in " ?,;" for c in name)
            and kind in Kind.__members__
            and kind != "HOST"
            and (hardware is None or type(hardware) is str)
            and alignment > 0
            and alignment & (alignment - 1) == 0
            and (largest is None or (type(largest) is int and 0 < largest < 1 << 63))
            and type(features) is dict
        )
        if not sound:
            raise FormatError(f"the description of a device is {value!r:.200}")
        return cls(name, Kind[kind], " ".join(description.split())[:200], hardware, alignment, largest, raises, space,
                   tuple(shared), {str(k): v for k, v in features.items()})  # fmt: skip


class ServerInfo(NamedTuple):
    """A server.

    Attributes:
        version: of opweave there.
        machine: identifies its machine until that is started again.
        heartbeat: whether it answers heartbeats.
        cache: whether it keeps weights.
        peers: whether it copies from other servers by TLS; from those on its machine without TLS it always does.
        max_data: the most bytes of data of a message, as sent and after decompression.
        codecs: names of the codecs that it can decompress (`opweave_remote.codecs`).
        devices: those it shows.
    """

    version: str
    machine: str
    heartbeat: bool
    cache: bool
    peers: bool
    max_data: int
    codecs: tuple[str, ...]
    devices: tuple[DeviceInfo, ...]

    def encode(self) -> list[Any]:
        plain = self._replace(codecs=list(self.codecs), devices=[d.encode() for d in self.devices])  # type: ignore[arg-type]
        return [*plain]

    @classmethod
    def decode(cls, value: Any) -> ServerInfo:
        version, machine, heartbeat, cache, peers, max_data, codecs, devices = fields(
            value, "ss???ull", "the description of a server"
        )
        if not max_data or len(devices) > _MOST_DEVICES or any(type(name) is not str for name in codecs):
            raise FormatError(f"the description of a server is {value!r:.200}")
        return cls(version, machine, heartbeat, cache, peers, max_data, tuple(codecs),
                   tuple([DeviceInfo.decode(d) for d in devices]))  # fmt: skip


def plain_features(device: Device) -> dict[str, Any]:
    """The features of a device, as texts except for numbers, bools and ``None``; ``{}`` where they fail."""
    try:
        found = dict(device.features())
    except Exception:
        return {}
    plain = (bool, int, float, str, type(None))
    return {str(k): v if type(v) in plain and not (type(v) is int and abs(v) >> 63) else str(v)[:1000]
            for k, v in found.items()}  # fmt: skip
