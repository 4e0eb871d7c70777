"""The ``opweave`` command. The only place that imports typer."""

from opweave.cli.app import build_app, main

__all__ = ["build_app", "main"]
