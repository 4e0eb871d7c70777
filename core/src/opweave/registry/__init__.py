"""Finding, loading, naming and unloading backends.

The functions here are the methods of the process's `Registry`, ``REGISTRY``. Words are explained in
``docs/glossary.md``, plugins in ``docs/writing-a-backend.md``.
"""

from typing import Any, Final

from opweave.registry.hooks import hookimpl
from opweave.registry.records import Diagnosis, FileFormat, PluginRecord, State, UnusableDevice
from opweave.registry.registry import Registry

__all__ = [
    "REGISTRY",
    "Diagnosis",
    "FileFormat",
    "PluginRecord",
    "Registry",
    "State",
    "UnusableDevice",
    "backend",
    "backends",
    "best_device",
    "default_devices",
    "device",
    "devices",
    "file_format",
    "formats",
    "hookimpl",
    "load",
    "load_all",
    "load_all_from_path",
    "open_device",
    "plugins",
    "program_built",
    "register",
    "register_device",
    "unload",
]

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
unload = REGISTRY.unload


def program_built(program: Any) -> None:
    """Call the hook ``opweave_program_built`` of all loaded plugins; a failure becomes a `RuntimeWarning`."""
    REGISTRY.hooks.notify("opweave_program_built", program=program)
