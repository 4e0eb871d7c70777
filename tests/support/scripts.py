"""`load_script`: a script of the repository as a module, without running it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["load_script"]

ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    """The module of a script. ``path``: from the root of the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
