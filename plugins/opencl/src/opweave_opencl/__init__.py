"""The OpenCL backend of opweave: every OpenCL device of the machine as ``opencl:0``, ``opencl:1``, ...

Importing this package loads no driver, and no kernels before one of its names is used. `OpenCLBackend.devices` loads
the drivers; a context is made when a device is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opweave_opencl.backend import OpenCLBackend
    from opweave_opencl.device import OpenCLDevice
    from opweave_opencl.errors import KernelBuildError
    from opweave_opencl.stream import OpenCLStream

__all__ = ["KernelBuildError", "OpenCLBackend", "OpenCLDevice", "OpenCLStream"]

_FROM = {"KernelBuildError": "errors", "OpenCLBackend": "backend", "OpenCLDevice": "device", "OpenCLStream": "stream"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
