"""What the entry point ``cpu`` names: the backend, and checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave.contract import Backend
from opweave.registry import Diagnosis, hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_cpu.backend import CpuBackend

    return [CpuBackend()]


@hookimpl
def opweave_doctor() -> Iterable[Diagnosis]:
    from opweave_cpu.doctor import diagnose

    return diagnose()
