"""What a device and its streams can do, by the methods that their classes override."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from opweave.contract.device import Caps
from opweave.runtime.stream import Stream

if TYPE_CHECKING:
    from opweave.runtime.device import Device

__all__ = ["StreamCaps", "caps_of", "stream_caps"]


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
