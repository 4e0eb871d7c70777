"""The OpenCL backend of opweave: every OpenCL device of the machine as ``opencl:0``, ``opencl:1``, ...

Importing this package loads no driver; `OpenCLBackend.devices` does, and a context is made when a device is first used.
"""

from opweave_opencl.backend import OpenCLBackend
from opweave_opencl.device import OpenCLDevice
from opweave_opencl.errors import KernelBuildError
from opweave_opencl.stream import OpenCLStream

__all__ = ["KernelBuildError", "OpenCLBackend", "OpenCLDevice", "OpenCLStream"]
