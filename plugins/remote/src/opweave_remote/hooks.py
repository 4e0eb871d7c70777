"""What the entry point ``remote`` names: the backend, the command ``serve-devices``, checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from opweave.contract import Backend
from opweave.registry import Diagnosis, hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    from opweave_remote.backend import RemoteBackend

    return [RemoteBackend()]


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_remote.command import serve_devices

    app.command("serve-devices")(serve_devices)


@hookimpl
def opweave_doctor() -> Iterable[Diagnosis]:
    from opweave_remote.doctor import diagnose

    return diagnose()
