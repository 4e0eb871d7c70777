"""The second device that level 4 of the suite splits graphs with."""

from __future__ import annotations

from opweave.contract import Kind, MemorySpace
from opweave.runtime.host.device import ReferenceKernels

__all__ = ["SeparateMemory"]


class SeparateMemory(ReferenceKernels):
    """Runs the reference implementations in memory that neither the host nor another device can address, so that every
    operand and result is transferred."""

    kind = Kind.ACCEL
    description = "references in memory of their own"

    def __init__(self) -> None:
        self.name = "separate"
        self.space = MemorySpace("separate")
