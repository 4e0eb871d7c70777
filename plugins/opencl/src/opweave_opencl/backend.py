"""`OpenCLBackend`: what the entry point ``opencl`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from opweave.contract import Backend, Device
from opweave.contract.kernels import KernelTable
from opweave.errors import Unavailable
from opweave.packages import pip_install
from opweave_opencl.budget import MemoryBudget
from opweave_opencl.device import OpenCLDevice
from opweave_opencl.discovery import SELECTION, find_devices, partition, select
from opweave_opencl.drivers import not_loaded, packaged
from opweave_opencl.sharing import SharedContext
from opweave_opencl.unified import UnifiedDevice

__all__ = ["OpenCLBackend"]


class OpenCLBackend(Backend):
    """Every OpenCL device of every platform, named ``opencl:0``, ``opencl:1``, ... in the drivers' order.

    ``OPWEAVE_OPENCL_DEVICES`` selects some: numbers, kinds, or parts of ``name (platform)``, separated by commas.
    ``OPWEAVE_OPENCL_SUBDEVICES=2`` splits each into two sub-devices, named ``opencl:0.0`` and ``opencl:0.1``.
    """

    def devices(self) -> Sequence[Device]:
        """The selected devices; their contexts are made when they are first used.

        Raises:
            Unavailable: no pyopencl, no platform, no device, or a selection that matches none.
        """
        found = select(partition(find_devices()))
        platforms = {f.device.platform.int_ptr for f in found}
        shared = {p: SharedContext([f.device for f in found if f.device.platform.int_ptr == p]) for p in platforms}
        budgets = {f.whole.int_ptr: MemoryBudget.of(f.whole) for f in found}
        devices: list[Device] = []
        for f in found:
            make = UnifiedDevice if f.device.host_unified_memory else OpenCLDevice
            devices.append(make(f.id, f.device, shared[f.device.platform.int_ptr], budgets[f.whole.int_ptr]))
        if not os.environ.get(SELECTION):
            devices += [MissingDriver(library.name, why) for library, why in not_loaded(packaged()).items()]
        return devices


class MissingDriver(Device):
    """Listed in place of the devices of a driver that is installed but was not loaded; says why in `probe`."""

    kernels = KernelTable()

    def __init__(self, library: str, why: str) -> None:
        self.id, self.description, self._why = library, "an OpenCL driver", why

    def _probe(self) -> None:
        raise Unavailable(self._why, remedy=pip_install("opweave-opencl[intel]"))
