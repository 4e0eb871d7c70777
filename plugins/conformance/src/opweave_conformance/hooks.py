"""What the entry point ``conformance`` names: the commands ``opweave conformance`` and ``opweave fuzz``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.registry import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_conformance.command import conformance
    from opweave_conformance.fuzz.command import fuzz

    app.command("conformance")(conformance)
    app.command("fuzz")(fuzz)
