"""Every check on what a plugin's code returned, before it becomes a backend with named devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from opweave.contract.device import Backend, Device, Kind
from opweave.contract.execution import Stream
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import check_sizes
from opweave.contract.space import MemorySpace
from opweave.errors import Broken, Unavailable
from opweave.graph.opdef import OpDef
from opweave.registry.naming import check_name, device_names, key
from opweave.registry.records import UnusableDevice

if TYPE_CHECKING:
    from opweave.registry.hooks import Hooks

__all__ = [
    "adopt",
    "backend_class",
    "backends_from_hooks",
    "check_device",
    "devices_of",
    "name_backends",
    "none_usable",
    "ops_from_hooks",
    "probed",
]


def backend_class(value: object, what: str) -> type[Backend]:
    """The backend class that an entry point or a file means.

    Raises:
        Broken: it is neither a class of backends nor a module that defines exactly one.
    """
    remedy = "an entry point names a subclass of opweave.Backend, or a module with @opweave.hookimpl functions"
    if isinstance(value, ModuleType):
        classes = [v for v in vars(value).values() if _is_backend_class(v) and v.__module__ == value.__name__]
        own = [cls for cls in classes if not cls.__name__.startswith("_")]
        if len(own) == 1:
            return own[0]
        names = f"several Backend classes ({', '.join(cls.__name__ for cls in own)})" if own else "no Backend class"
        raise Broken(f"{what} is a module with no hooks and with {names}", remedy=remedy)
    if _is_backend_class(value):
        return value
    raise Broken(f"{what} is {_a(value)}, not a Backend class", remedy=remedy)


def backends_from_hooks(hooks: Hooks, module: ModuleType) -> list[Backend]:
    """What the module's ``opweave_backends`` returns; raises `Broken` unless they are backends."""
    found: list[Backend] = []
    for result in hooks.call(module, "opweave_backends"):
        for backend in _items(result, "opweave_backends()"):
            if not isinstance(backend, Backend):
                raise Broken(f"opweave_backends() returned {_a(backend)} among its backends")
            found.append(backend)
    return found


def ops_from_hooks(hooks: Hooks, module: ModuleType) -> list[OpDef]:
    """What the module's ``opweave_ops`` returns; raises `Broken` unless they are definitions."""
    found: list[OpDef] = []
    for result in hooks.call(module, "opweave_ops"):
        for op in _items(result, "opweave_ops()"):
            if not isinstance(op, OpDef):
                raise Broken(f"opweave_ops() returned {_a(op)} among its definitions")
            found.append(op)
    return found


def name_backends(backends: Sequence[Backend], plugin: str, version: str) -> None:
    """Give the backends of a plugin their names: an only one that of the plugin, several their own."""
    for backend in backends:
        if len(backends) == 1:
            backend.name = plugin
        elif not isinstance(backend.name, str) or not backend.name:
            raise Broken(f"{type(backend).__name__} has no name; of several backends in a plugin each needs one")
        check_name(backend.name)
        backend.version = backend.version or version
    if len({key(backend.name) for backend in backends}) < len(backends):
        raise Broken(f"two of its backends have one name: {', '.join(b.name for b in backends)}")


def devices_of(backend: Backend) -> list[Device]:
    """The devices that ``backend`` finds.

    Raises:
        Unavailable: none, or the backend says so.
        Broken: what it returned are not devices, or such as nobody could use.
    """
    what = f"{type(backend).__name__}.devices()"
    devices: list[Device] = []
    for device in _items(backend.devices(), what):
        if not isinstance(device, Device):
            raise Broken(f"{what} returned {_a(device)} among its devices")
        check_device(device)
        if any(device is known for known in devices):
            raise Broken(f"{what} returned one device twice")
        devices.append(device)
    if not devices:
        raise Unavailable("it found no device here")
    return devices


def check_device(device: Device) -> None:
    """Raises `Broken` where a device lacks what every device has."""
    cls = type(device).__name__
    if not isinstance(device.kind, Kind):
        raise Broken(f"{cls}.kind is {device.kind!r}, not a member of opweave.Kind")
    if device.hardware_id is not None and not isinstance(device.hardware_id, str):
        raise Broken(f"{cls}.hardware_id is {device.hardware_id!r}, not a text")
    if not isinstance(device.kernels, KernelTable) or not (
        device.has_own_rules or hasattr(type(device), "kernels") or device.kernels.ops()
    ):
        raise Broken(f"{cls} has no KernelTable as its attribute `kernels`")
    check_sizes(cls, device.alignment, device.max_buffer_size)
    if not isinstance(device.description, str):
        raise Broken(f"{cls}.description is {_a(device.description)}, not a text")
    if not isinstance(device.shared_spaces, (tuple, list)):
        raise Broken(f"{cls}.shared_spaces is {_a(device.shared_spaces)}, not a tuple of memory spaces")
    for space in (device.space, *device.shared_spaces):
        if not isinstance(space, MemorySpace):
            raise Broken(f"{cls} is in {_a(space)}, which is no MemorySpace")
    if not isinstance(device.stream_class, type) or not issubclass(device.stream_class, Stream):
        raise Broken(f"{cls}.stream_class is {_a(device.stream_class)}, not a class of streams")


def adopt(backend: Backend, devices: Sequence[Device], existing: Iterable[Device] = ()) -> None:
    """Make ``devices`` those of ``backend``, with their names."""
    names = device_names(backend.name, [d.id for d in devices], [d.name for d in existing])
    for device, name in zip(devices, names, strict=True):
        device._name = name
        device.backend = backend


def probed(devices: Sequence[Device]) -> tuple[list[Device], list[UnusableDevice]]:
    """The adopted ``devices`` that work, and those that do not, each with the reason."""
    usable: list[Device] = []
    unusable: list[UnusableDevice] = []
    for device in devices:
        try:
            device.probe()
            usable.append(device)
        except Unavailable as error:
            device.backend = None
            unusable.append(UnusableDevice(device.name, str(device.description), error.message, error.remedy))
    return usable, unusable


def none_usable(unusable: Sequence[UnusableDevice]) -> Unavailable:
    """The failure of a backend none of whose devices works."""
    reasons = [f"{d.name} ({d.description})" if d.description else d.name for d in unusable]
    reasons = [f"{label} does not work: {d.error}" for label, d in zip(reasons, unusable, strict=True)]
    remedies = dict.fromkeys(d.remedy for d in unusable if d.remedy)
    return Unavailable("\n".join(reasons), remedy="; ".join(remedies))


def _is_backend_class(value: object) -> TypeGuard[type[Backend]]:
    return isinstance(value, type) and issubclass(value, Backend) and value is not Backend


def _items(result: object, what: str) -> list[object]:
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise Broken(f"{what} returned {_a(result)}, not a sequence")
    return list(result)


def _a(value: object) -> str:
    """What a value is, in words: its own ``repr`` may be long, or fail."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
