"""`OpenCLBackend`: what the entry point ``opencl`` names."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.contract import Backend, Device
from opweave_opencl.device import OpenCLDevice
from opweave_opencl.discovery import find_devices, select

__all__ = ["OpenCLBackend"]


class OpenCLBackend(Backend):
    """Every OpenCL device of every platform, named ``opencl:0``, ``opencl:1``, ... in the drivers' order.

    ``OPWEAVE_OPENCL_DEVICES`` selects some: numbers, or globs over ``name (platform)``, separated by commas.
    """

    def devices(self) -> Sequence[Device]:
        """The selected devices; their contexts are made when they are first used.

        Raises:
            Unavailable: no pyopencl, no platform, no device, or a selection that matches none.
        """
        return [OpenCLDevice(number, device) for number, device in select(find_devices())]
