"""Finding, loading, naming and unloading backends.

The functions here are the methods of the process's `Registry`, ``REGISTRY``. Words are explained in
``docs/glossary.md``, plugins in ``docs/backend/package.md``.
"""

from typing import Any, Final

from opweave.errors import SchedulerError
from opweave.registry.hooks import hookimpl
from opweave.registry.records import Diagnosis, FileFormat, PluginRecord, State, UnusableDevice
from opweave.registry.registry import Registry
from opweave.runtime.device import Device
from opweave.runtime.memory import BufferType

__all__ = [
    "REGISTRY", "Diagnosis", "FileFormat", "PluginRecord", "Registry", "State", "UnusableDevice", "backend",
    "backends", "best_device", "buffer_type", "default_devices", "device", "devices", "file_format", "formats",
    "hookimpl", "load", "load_all", "load_all_from_path", "open_device", "plugins", "program_built", "register",
    "register_device", "rescan", "unload",
]  # fmt: skip

Memory = str | BufferType | None
"""How callers name a kind of memory; ``None``: the ordinary one."""

REGISTRY: Final = Registry()
"""The registry of the process. It reads nothing before it is used."""

backend = REGISTRY.backend
backends = REGISTRY.backends
best_device = REGISTRY.best_device
default_devices = REGISTRY.default_devices
device = REGISTRY.device
devices = REGISTRY.devices
file_format = REGISTRY.file_format
formats = REGISTRY.formats
load = REGISTRY.load
load_all = REGISTRY.load_all
load_all_from_path = REGISTRY.load_all_from_path
open_device = REGISTRY.open_device
plugins = REGISTRY.plugins
register = REGISTRY.register
register_device = REGISTRY.register_device
rescan = REGISTRY.rescan
unload = REGISTRY.unload


def buffer_type(memory: Memory, device: Device | None = None) -> BufferType | None:
    """The kind of memory that a caller asks for, ``None`` for ordinary memory.

    Args:
        memory: a buffer type, or its name; where ``device`` is ``None`` its whole name, ``"cpu.decoded"``.

    Raises:
        UnknownNameError: there is no such memory, or no such device.
        SchedulerError: neither a name nor a buffer type; memory of another device; or a name that does not say whose.
    """
    if memory is None:
        return None
    if isinstance(memory, BufferType):
        kind = memory
    elif not isinstance(memory, str):
        raise SchedulerError(f"buffer_type= takes a BufferType of a device or its name, not {memory!r:.60}")
    elif device is not None:
        kind = device.buffer_type(memory)
    else:
        owner, _, name = memory.rpartition(".")
        if not owner:
            raise SchedulerError(
                f"buffer_type={memory!r} does not say whose memory; give device=, or the whole name, 'cpu.decoded'"
            )
        kind = REGISTRY.device(owner).buffer_type(name)
    if device is not None and kind.device is not device:
        raise SchedulerError(f"{kind!r} is memory of {kind.device.name}, not of {device.name}")
    return kind


def program_built(program: Any) -> None:
    """Call the hook ``opweave_program_built`` of all loaded plugins; a failure becomes a `RuntimeWarning`."""
    REGISTRY.hooks.notify("opweave_program_built", program=program)
