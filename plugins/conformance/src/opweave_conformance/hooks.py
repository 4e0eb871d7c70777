"""What the entry point ``conformance`` names: ``opweave conformance``, ``fuzz``, ``bench`` and ``new-backend``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.registry import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_conformance.bench_command import bench
    from opweave_conformance.command import conformance
    from opweave_conformance.fuzz.command import fuzz
    from opweave_conformance.scaffold.command import new_backend

    app.command("bench")(bench)
    app.command("conformance")(conformance)
    app.command("fuzz")(fuzz)
    app.command("new-backend")(new_backend)
