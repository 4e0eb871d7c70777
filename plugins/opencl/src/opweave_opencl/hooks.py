"""What the entry point ``opencl`` names: the backend, and checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave.contract import Backend, Device
from opweave.registry import Diagnosis, hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_opencl.backend import OpenCLBackend

    return [OpenCLBackend()]


@hookimpl
def opweave_doctor(devices: Sequence[Device]) -> Iterable[Diagnosis]:
    from opweave_opencl.doctor import diagnose

    return diagnose(devices)
