"""What backends show: asking them for devices, checking, naming and trying these, and whether they are in use."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

from opweave.contract.backend import Backend
from opweave.contract.device import Kind
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import MemorySpace
from opweave.errors import Broken, PluginError, Unavailable
from opweave.registry.compatibility import check_hooks
from opweave.registry.isolation import TookTooLong, call
from opweave.registry.measured import load_tunables
from opweave.registry.naming import device_names
from opweave.registry.records import UnusableDevice
from opweave.runtime.device import Device
from opweave.runtime.stream import Stream

__all__ = [
    "adopt", "check_device", "described", "devices_of", "in_use", "listed", "none_usable", "probed",
]  # fmt: skip


def devices_of(backend: Backend) -> list[Device]:
    """The devices that ``backend`` finds.

    Raises:
        Unavailable: none, where the backend is not dynamic, or the backend says so.
        Broken: it returned something other than devices, or invalid ones.
        Incompatible: it, or one of them, overrides a hook that is no longer called.
    """
    check_hooks("Backend", type(backend))
    what = f"{type(backend).__name__}.devices()"
    devices: list[Device] = []
    for device in call(what, lambda: listed(backend.devices(), what)):
        if not isinstance(device, Device):
            raise Broken(f"{what} returned {described(device)} among its devices")
        check_device(device)
        if any(device is known for known in devices):
            raise Broken(f"{what} returned one device twice")
        devices.append(device)
    if not devices and not backend.dynamic:
        raise Unavailable("it found no device on this machine")
    return devices


def check_device(device: object) -> None:
    """Raises `Broken` if an attribute of a device is missing or invalid, and `Incompatible` if it overrides a hook that
    is no longer called."""
    cls = type(device).__name__
    if not isinstance(device, Device):
        raise Broken(f"{described(device)} is no opweave.Device")
    if not isinstance(device.kind, Kind):
        raise Broken(f"{cls}.kind is {device.kind!r}, not a member of opweave.Kind")
    if device.hardware_id is not None and not isinstance(device.hardware_id, str):
        raise Broken(f"{cls}.hardware_id is {device.hardware_id!r}, not a str")
    if not isinstance(device.kernels, KernelTable) or not (
        device.has_own_rules or hasattr(type(device), "kernels") or device.kernels.ops()
    ):
        why = f"{cls} has no KernelTable as its attribute `kernels`"
        raise Broken(f"{why}; of a device that only holds memory that is KernelTable()")
    if not isinstance(device.shared_spaces, (tuple, list)):
        raise Broken(f"{cls}.shared_spaces is {described(device.shared_spaces)}, not a tuple of memory spaces")
    for space in (device.space, *device.shared_spaces):
        if not isinstance(space, MemorySpace):
            raise Broken(f"{cls} is in {described(space)}, which is no MemorySpace")
    if not isinstance(device.stream_class, type) or not issubclass(device.stream_class, Stream):
        raise Broken(f"{cls}.stream_class is {described(device.stream_class)}, not a class of streams")
    check_hooks("Device", type(device))
    check_hooks("Stream", device.stream_class)
    check_hooks("BufferType", lambda: [type(kind) for kind in device.buffer_types])


def adopt(backend: Backend, devices: Sequence[Device], existing: Iterable[Device] = ()) -> None:
    """Set the backend and the names of ``devices``."""
    names = device_names(backend.name, [d.id for d in devices], [d.name for d in existing])
    for device, name in zip(devices, names, strict=True):
        device.name = name
        device.backend = backend


def probed(devices: Sequence[Device], version: str = "") -> tuple[list[Device], list[UnusableDevice]]:
    """Probe ``devices`` that were adopted: returns those that work, with what was measured of them, and those that do
    not, with the reason.

    Args:
        version: that of their plugin.
    """
    usable: list[Device] = []
    failed: list[tuple[Device, PluginError]] = []
    for device in devices:
        try:
            call(f"trying {device.name}", device.probe)
            load_tunables(device, version)
            usable.append(device)
        except (Unavailable, TookTooLong) as error:
            device.backend = None
            failed.append((device, error))
    return usable, [
        UnusableDevice(device.name, str(device.description), error.message, error.remedy,
                       next((other.name for other in usable if _same_hardware(device, other)), ""))
        for device, error in failed
    ]  # fmt: skip


def _same_hardware(one: Device, other: Device) -> bool:
    """Whether two devices of a backend are one piece of hardware, which several drivers show. The drivers of processors
    have no ids for it."""
    if one.hardware_id is None and other.hardware_id is None:
        return one.kind is other.kind is Kind.CPU
    return one.hardware_id == other.hardware_id


def in_use(devices: Iterable[Device]) -> list[str]:
    """Buffers and streams of the devices that are alive, as text: ``["2 buffers of acme", "1 stream of acme"]``."""

    def count() -> list[str]:
        found: list[str] = []
        for device in devices:
            buffers = sum(not buffer.freed for buffer in list(device.live_buffers))
            streams = sum(not stream.closed for stream in list(device.live_streams))
            for n, what in ((buffers, "buffer"), (streams, "stream")):
                if n:
                    found.append(f"{n} {what}{'s' * (n > 1)} of {device.name}")
        return found

    if count():
        gc.collect()  # unreachable reference cycles are not in use
    return count()


def none_usable(unusable: Sequence[UnusableDevice]) -> Unavailable:
    """The failure of a backend none of whose devices works."""
    reasons = [f"{d.name} ({d.description})" if d.description else d.name for d in unusable]
    reasons = [f"{label} does not work: {d.error}" for label, d in zip(reasons, unusable, strict=True)]
    remedies = dict.fromkeys(d.remedy for d in unusable if d.remedy)
    return Unavailable("\n".join(reasons), remedy="; ".join(remedies))


def listed(result: object, what: str) -> list[object]:
    """The items of what a plugin returned; raises `Broken` if that is no sequence."""
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise Broken(f"{what} returned {described(result)}, not a sequence")
    return list(result)


def described(value: object) -> str:
    """What kind of object a value is, for messages; its own ``repr`` may be long, or fail."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
