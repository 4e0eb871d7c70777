"""`check_writable`, `check_folder`: whether files can be written, asked before long work whose result they hold."""

from __future__ import annotations

import os
from pathlib import Path

from opweave.errors import PathError

__all__ = ["check_folder", "check_writable"]


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises `PathError` if there cannot be a file of this name. Makes none."""
    try:
        file = Path(os.fsdecode(path))
    except TypeError as error:
        raise PathError(f"the path of a file, not {path!r:.80}: {error}") from None
    if not os.path.isdir(file.parent):
        raise PathError(f"{file} cannot be written: there is no folder {file.parent}; make it first")
    if os.path.isdir(file):
        raise PathError(f"{file} cannot be written: it is a folder")
    if not (os.access(file, os.W_OK) if os.path.exists(file) else os.access(file.parent, os.W_OK | os.X_OK)):
        raise PathError(f"{file} cannot be written: permission denied")


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises `PathError` if files cannot be written into this folder, or it cannot be made. Makes none."""
    folder = Path(path)
    there = next(found for found in (folder, *folder.parents) if os.path.exists(found))
    if not os.path.isdir(there):
        raise PathError(f"nothing can be written to {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PathError(f"nothing can be written to {folder}: permission denied by {there}")
