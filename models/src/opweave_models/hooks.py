"""What the entry point ``models`` names: ``chat``, ``generate``, ``embed``, ``models ...`` and ``serve-model``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.registry import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_models import commands

    commands.add(app)
