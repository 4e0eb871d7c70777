"""The ``opweave`` command. The only place that imports typer and rich."""

from opweave.cli.app import build_app, main

__all__ = ["build_app", "main"]
