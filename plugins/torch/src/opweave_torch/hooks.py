"""What the entry point ``torch`` names: the backend, and checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opweave.contract import Backend, Device
from opweave.registry import Diagnosis, FileFormat, hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_torch.backend import TorchBackend

    return [TorchBackend()]


@hookimpl
def opweave_formats() -> Sequence[FileFormat]:
    return [FileFormat("torch exported program", (".pt2",), plan=_planned)]


@contextmanager
def _planned(path: Path, devices: Sequence[Any], length: int) -> Iterator[Any]:
    import torch

    from opweave_torch.frontend import import_program

    with import_program(torch.export.load(path), devices) as model:
        yield model.plan()  # in the shapes of the export


@hookimpl
def opweave_doctor(devices: Sequence[Device]) -> Iterable[Diagnosis]:
    if not devices:
        return []
    from opweave_torch.doctor import diagnose

    return diagnose()
