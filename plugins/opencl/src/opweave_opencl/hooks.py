"""What the entry point ``opencl`` names: the backend, checks for ``opweave doctor``, and commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from opweave.contract import Backend, Device
from opweave.registry import Diagnosis, hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_opencl.backend import OpenCLBackend

    return [OpenCLBackend()]


@hookimpl
def opweave_doctor(devices: Sequence[Device]) -> Iterable[Diagnosis]:
    from opweave_opencl.doctor import diagnose

    return diagnose(devices)


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_opencl.cli import commands

    app.add_typer(commands, name="opencl")
