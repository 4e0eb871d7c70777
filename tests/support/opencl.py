"""The OpenCL devices that the tests run on: the first of each driver that works here, and why others do not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from opweave.errors import Unavailable

if TYPE_CHECKING:
    from opweave_opencl import OpenCLDevice
    from opweave_opencl.tuning import Tuning

__all__ = ["DEVICES", "SKIPPED", "anew", "as_gpu"]

# PoCL would compile each kernel once more, from the same code, for the sizes that it is launched with, which takes as
# long as the first time. With 1 in the environment it does.
os.environ.setdefault("POCL_WORK_GROUP_SPECIALIZATION", "0")

DEVICES: Final[list[OpenCLDevice]] = []
SKIPPED: Final[dict[str, str]] = {}
"""Name of a driver, or of what replaces it -> why the tests do not run on it."""


def _find() -> None:
    try:
        from opweave_opencl import OpenCLBackend, OpenCLDevice

        found = OpenCLBackend().devices()
    except ImportError as error:
        SKIPPED["opweave-opencl"] = f"it is not installed: {error}"
        return
    except Unavailable as error:
        SKIPPED["OpenCL"] = str(error)
        return
    drivers: set[str] = set()
    for device in found:
        driver = device.cl_device.platform.name.strip() if isinstance(device, OpenCLDevice) else str(device.id)
        if driver in drivers:
            continue
        try:
            device.probe()
        except Unavailable as error:
            SKIPPED[driver] = error.message
        else:
            assert isinstance(device, OpenCLDevice)
            DEVICES.append(device)
            drivers.add(driver)


_find()


def anew(device: OpenCLDevice) -> OpenCLDevice:
    """The same device as another object, with a context of its own."""
    from opweave_opencl import OpenCLBackend, OpenCLDevice

    found = next(other for other in OpenCLBackend().devices() if other.id == device.id)
    assert isinstance(found, OpenCLDevice)
    return found


def as_gpu(device: OpenCLDevice, tuning: Tuning) -> OpenCLDevice:
    """The same device as another object, whose kernels are built and launched in a form for GPUs.

    Between any two barriers PoCL makes a loop over the work-items, and its optimizer takes seconds for such kernels, so
    it does not optimize them here; Intel's driver does.
    """
    from opweave_opencl.program import Programs
    from opweave_opencl.properties import is_pocl

    found = anew(device)
    found.tuning = tuning
    options = "-cl-opt-disable" if is_pocl(found.cl_device) else ""
    found.programs = Programs(found.name, found.context, found.cl_device, options=options)
    return found
