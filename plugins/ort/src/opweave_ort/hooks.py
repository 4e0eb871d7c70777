"""What the entry point ``ort`` names: the backend, and checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave.contract import Backend, Device
from opweave.registry import Diagnosis, hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_ort.backend import OrtBackend

    return [OrtBackend()]


@hookimpl
def opweave_doctor(devices: Sequence[Device]) -> Iterable[Diagnosis]:
    if not devices:
        return []
    from opweave_ort.doctor import diagnose

    return diagnose()
