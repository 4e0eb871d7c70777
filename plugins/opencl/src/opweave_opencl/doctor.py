"""Checks for ``opweave doctor``: the cache of built programs, variables that choose drivers, and sub-groups.

Whether devices work is tried when they are found, and reported by the core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from opweave.contract import Device
from opweave.registry import Diagnosis
from opweave.tools.doctor import cache_diagnosis
from opweave_opencl.caching import FOLDER, BinaryCache
from opweave_opencl.device import OpenCLDevice
from opweave_opencl.drivers import VENDORS
from opweave_opencl.program import KEPT
from opweave_opencl.properties import remedy_for

__all__ = ["diagnose"]


def diagnose(devices: Sequence[Device]) -> Iterator[Diagnosis]:
    """What there is to say about OpenCL beside its devices."""
    yield cache_diagnosis("cache of programs", BinaryCache(), FOLDER, "kernels are built anew in each process")
    chosen = os.environ.get(VENDORS)
    if chosen:
        message = f"{VENDORS}={chosen} is in force: drivers are looked for only there"
        yield Diagnosis("variable", "ok" if devices else "slow", message, "" if devices else f"unset {VENDORS}")
    opened = [device for device in devices if isinstance(device, OpenCLDevice)]
    if opened:
        count = sum(len(device.programs) for device in opened)
        message = f"{count} in memory; beside those of open programs a device keeps the latest {KEPT}"
        yield Diagnosis("built programs", "ok", message)
    for device in opened:
        if device.tuning.row_group > 1:
            why, failing = device.subgroups.why_not(), device.subgroups.why_failing()
            message = f"not used: {why}" if why else f"used ({device.subgroups.listed})"
            remedy = remedy_for(device.cl_device) if failing else ""
            yield Diagnosis(f"sub-groups of {device.name}", "slow" if failing else "ok", message, remedy)
