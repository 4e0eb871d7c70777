"""What the entry point ``torch`` names: the backend, and checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave.contract import Backend, Device
from opweave.registry import Diagnosis, hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_torch.backend import TorchBackend

    return [TorchBackend()]


@hookimpl
def opweave_doctor(devices: Sequence[Device]) -> Iterable[Diagnosis]:
    if not devices:
        return []
    from opweave_torch.doctor import diagnose

    return diagnose()
