"""Functions and methods whose results are noted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

__all__ = ["noted_results"]


def noted_results(monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, *names: str) -> list[Any]:
    """What some functions of a module, or methods of a class, return from now on, in order."""
    found: list[Any] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            found.append(function(*args))
            return found[-1]

        return noted

    for name in names:
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    return found
