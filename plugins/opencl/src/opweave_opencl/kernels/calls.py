"""Several calls as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave.contract import Call

__all__ = ["in_order"]


def in_order(calls: Sequence[Call]) -> Call:
    """One call that makes the given ones in their order, and returns what the last one does."""
    if len(calls) == 1:
        return calls[0]
    ordered = tuple(calls)

    def call() -> Any:
        for each in ordered:
            result = each()
        return result

    return call
