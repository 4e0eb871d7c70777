"""The levels, each a list of checks: hygiene, memory, operations, asynchrony, beside a second device, faults,
gradients."""

from __future__ import annotations

from typing import Final

from opweave_conformance.checklist import Check
from opweave_conformance.levels import (
    beside,
    collectives,
    compilers,
    events,
    failures,
    faults,
    gradients,
    hygiene,
    imports,
    indices,
    kinds,
    limits,
    memory,
    operations,
    order,
    streams,
    transfers,
)

__all__ = ["CHECKS", "LEVELS"]

LEVELS: Final = {
    0: "hygiene",
    1: "memory",
    2: "operations",
    3: "asynchrony",
    4: "beside a second device",
    5: "faults",
    6: "gradients",
}
"""Names of the levels."""

CHECKS: Final[tuple[Check, ...]] = (
    *imports.CHECKS, *hygiene.CHECKS, *memory.CHECKS, *kinds.MEMORY, *transfers.CHECKS, *limits.CHECKS,
    *kinds.PRODUCTS, *operations.CHECKS,
    *order.CHECKS, *events.CHECKS, *streams.CHECKS,
    *beside.CHECKS, *collectives.CHECKS, *compilers.CHECKS,
    *faults.CHECKS, *failures.CHECKS, *indices.CHECKS,
    *gradients.CHECKS,
)  # fmt: skip
"""Every check in the order in which they are asked."""
