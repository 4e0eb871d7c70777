"""What the entry point ``models`` names: ``chat``, ``generate``, ``embed``, ``models ...`` and ``serve-model``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opweave.registry import FileFormat, hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def opweave_formats() -> Sequence[FileFormat]:
    from opweave.formats.hooks import opweave_formats as of_the_core

    (gguf,) = [known for known in of_the_core() if known.magic == b"GGUF"]
    return [gguf._replace(plan=_planned), FileFormat("Hugging Face folder", ("config.json",), plan=_planned)]


def _planned(path: Path, devices: Sequence[Any], length: int) -> AbstractContextManager[Any]:
    from opweave_models.model import planned

    return planned(path, devices, length)


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_models import commands

    commands.add(app)
