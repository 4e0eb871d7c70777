"""The hooks of the plugin, which the entry point ``onnx`` names: they add the command ``opweave onnx``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave.contract import Backend
from opweave.registry import hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    return []


@hookimpl
def opweave_cli(app: Any) -> None:
    from opweave_onnx.cli import add_commands

    add_commands(app)
