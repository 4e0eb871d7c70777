"""What a device is and can do: `Kind`, `Caps`, `DeviceProps`. Overridden methods define the capabilities."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from opweave.contract.stream import Stream
from opweave.errors import UnknownNameError

if TYPE_CHECKING:
    from opweave.contract.device import Device

__all__ = ["Caps", "DeviceProps", "Kind", "StreamCaps", "caps_of", "stream_caps"]


class Kind(enum.Enum):
    """The sort of hardware of a device, in the order in which devices are preferred."""

    GPU = "GPU"
    """A graphics processor with its own memory."""
    IGPU = "IGPU"
    """An integrated graphics processor that shares the host's memory."""
    ACCEL = "ACCEL"
    """An accelerator beside the CPU that works in host memory."""
    CPU = "CPU"
    """The processors that the host runs on."""
    HOST = "HOST"
    """The device built into the core, which runs the references."""

    @property
    def rank(self) -> int:
        """Position in the order of preference, 0 first."""
        return list(Kind).index(self)

    @classmethod
    def named(cls, name: Kind | str) -> Kind:
        """The kind called ``name``, without regard to case; raises `UnknownNameError` if there is none."""
        if isinstance(name, Kind):
            return name
        try:
            return cls[str(name).upper()]
        except KeyError:
            raise UnknownNameError("kind of device", str(name), [kind.name for kind in cls]) from None


class Caps(NamedTuple):
    """What a device can do beyond the minimum, derived from the methods that its class overrides.

    Attributes:
        fill: sets bytes without an upload (``_fill``).
        copy: copies within its memory without the host (``_copy``).
        import_host: uses host memory in place (``_import_host``).
        map: shows its memory as host bytes (``_map``).
        asynchronous: its streams return before the work is complete (``Stream._synchronize``).
        events: its streams wait for each other without the host (``Stream._record``).
        fuse: its streams compute several steps as one (``Stream._fuse``).
        offload: chooses steps for which weights are copied to it for each run (``_offload``).
        pinned: offers host memory for fast transfers (``host_buffer_type``).
        functional: its streams compute by functions of immutable arrays (``Stream._compile_functional``).
        typed: whole arrays are transferred (``_put``, ``_get``).
    """

    fill: bool
    copy: bool
    import_host: bool
    map: bool
    asynchronous: bool
    events: bool
    fuse: bool
    offload: bool
    pinned: bool
    functional: bool
    typed: bool


class DeviceProps(NamedTuple):
    """A summary of a device. Made by `Device.props`.

    Attributes:
        name, description, kind, hardware_id: as the attributes of `Device`.
        memory_free, memory_total: bytes; 0 where the device does not know.
        caps: its capabilities.
    """

    name: str
    description: str
    kind: Kind
    hardware_id: str | None
    memory_free: int
    memory_total: int
    caps: Caps


class StreamCaps(NamedTuple):
    """Which hooks the streams of a class override; see `Caps`."""

    asynchronous: bool
    events: bool
    fuse: bool
    functional: bool


_CAPS: Final[WeakKeyDictionary[type[Device], Caps]] = WeakKeyDictionary()


def caps_of(cls: type[Device], base: type[Device]) -> Caps:
    """The capabilities of a class of devices: what it overrides of ``base``, which is `Device`."""
    caps = _CAPS.get(cls)
    if caps is None:

        def has(name: str) -> bool:
            return getattr(cls, name) is not getattr(base, name)

        streams = stream_caps(cls.stream_class)
        caps = _CAPS[cls] = Caps(
            fill=has("_fill"),
            copy=has("_copy"),
            import_host=has("_import_host"),
            map=has("_map"),
            asynchronous=streams.asynchronous,
            events=streams.events,
            fuse=streams.fuse,
            offload=has("_offload"),
            pinned=has("host_buffer_type"),
            functional=streams.functional,
            typed=has("_put") and has("_get"),
        )
    return caps


def stream_caps(cls: type[Stream]) -> StreamCaps:
    """The capabilities of a class of streams."""
    functional = cls._compile_functional is not Stream._compile_functional
    return StreamCaps(
        asynchronous=cls._synchronize is not Stream._synchronize,
        events=cls._record is not Stream._record,
        fuse=functional or cls._fuse is not Stream._fuse,
        functional=functional,
    )
