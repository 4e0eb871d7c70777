"""What tests tell about where they ran, for the end of pytest's report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest

__all__ = ["note", "notes"]

_NOTES: Final = pytest.StashKey[list[str]]()


def note(config: pytest.Config, lines: Iterable[str]) -> None:
    """Add lines to the report, once each; from processes that run tests they come by ``tests/conftest.py``."""
    known = config.stash.setdefault(_NOTES, [])
    known += [line for line in lines if line not in known]


def notes(config: pytest.Config) -> list[str]:
    """The lines so far."""
    return config.stash.get(_NOTES, [])
