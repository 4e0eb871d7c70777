"""Several calls as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave.contract import Call

__all__ = ["in_turn"]


def in_turn(calls: Sequence[Call]) -> Call:
    """One call that makes others one after the other, and returns what the last one does."""
    if len(calls) == 1:
        return calls[0]
    turns = tuple(calls)

    def call() -> Any:
        for each in turns:
            result = each()
        return result

    return call
