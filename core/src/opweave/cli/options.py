"""Options that commands share, those of plugins too."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from opweave.errors import PathError
from opweave.tools.writable import check_folder, check_writable

__all__ = ["Html", "Json", "writable_file", "writable_folder"]


def _checked(path: Path | None, check: Callable[[Path], None]) -> Path | None:
    try:
        if path is not None:
            check(path)
    except PathError as error:
        raise typer.BadParameter(str(error)) from None
    return path


def writable_file(path: Path | None) -> Path | None:
    """The callback of options and arguments that name a file, which the command writes when its work is done: a call
    with one that cannot be written is wrong, and the command does not start."""
    return _checked(path, check_writable)


def writable_folder(path: Path | None) -> Path | None:
    """As `writable_file`, of those that name a folder, which is made if there is none."""
    return _checked(path, check_folder)


Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page, one HTML file.", readable=False, callback=writable_file),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
