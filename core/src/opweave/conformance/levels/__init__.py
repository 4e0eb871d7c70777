"""The levels, each a list of checks: 0 hygiene, 1 memory, 2 operations."""

from __future__ import annotations

from typing import Final

from opweave.conformance.checklist import Check
from opweave.conformance.levels import hygiene, imports, limits, memory, operations, transfers

__all__ = ["CHECKS", "LEVELS"]

LEVELS: Final = {0: "hygiene", 1: "memory", 2: "operations"}
"""Names of the levels."""

CHECKS: Final[tuple[Check, ...]] = (
    *imports.CHECKS, *hygiene.CHECKS, *memory.CHECKS, *transfers.CHECKS, *limits.CHECKS,
    *operations.CHECKS,
)  # fmt: skip
"""Every check in the order in which they are asked."""
