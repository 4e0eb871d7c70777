"""The hooks of the plugin, which the entry point ``onnx`` names: they add the command ``opweave onnx``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opweave.contract import Backend
from opweave.registry import FileFormat, hookimpl


@hookimpl
def opweave_backends() -> Sequence[Backend]:
    return []


@hookimpl
def opweave_formats() -> Sequence[FileFormat]:
    return [FileFormat("ONNX", (".onnx",), plan=_planned)]


@contextmanager
def _planned(path: Path, devices: Sequence[Any], length: int) -> Iterator[Any]:
    from opweave_onnx.model import load

    with load(path, devices) as model:
        axes = {axis: length for value in model.inputs for axis in value.shape or () if isinstance(axis, str)}
        yield model.plan(model.examples(**axes))


@hookimpl
def opweave_cli(app: Any) -> None:
    from opweave_onnx.cli import add_commands

    add_commands(app)
