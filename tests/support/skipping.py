"""Modules of tests that are skipped without being imported, because something that they import is not there."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest

__all__ = ["missing", "skipped_module"]


class SkippedModule(pytest.Module):
    """A module that is skipped with a reason."""

    reason: str

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(self.reason, allow_module_level=True)


def skipped_module(path: Path, parent: pytest.Collector, reason: str) -> pytest.Module:
    """The module at ``path``, skipped; for the hook ``pytest_pycollect_makemodule``."""
    module: SkippedModule = SkippedModule.from_parent(parent, path=path)
    module.reason = reason
    return module


def missing(*modules: str) -> str:
    """Why one of the modules cannot be imported; empty where all can."""
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        return f"{' or '.join(modules)} is not installed: {error}"
    return ""
