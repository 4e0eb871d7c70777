"""`check_writable`: whether a file can be written, asked before long work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from opweave.errors import PathError

__all__ = ["check_writable"]


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises `PathError` if there cannot be a file of this name. Makes none."""
    try:
        file = Path(os.fsdecode(path))
    except TypeError as error:
        raise PathError(f"the path of a file, not {path!r:.80}: {error}") from None
    if not file.parent.is_dir():
        raise PathError(f"{file} cannot be written: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise PathError(f"{file} cannot be written: it is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PathError(f"{file} cannot be written: permission denied")
