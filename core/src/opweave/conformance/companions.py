"""Second devices that the suite brings along."""

from __future__ import annotations

from opweave.contract.capabilities import Kind
from opweave.contract.space import MemorySpace
from opweave.host.device import ReferenceKernels

__all__ = ["SeparateMemory"]


class SeparateMemory(ReferenceKernels):
    """The references in memory that no other device reaches, and into which the process cannot see either."""

    kind = Kind.ACCEL
    description = "references in memory of their own"

    def __init__(self) -> None:
        self._name = "separate"
        self.space = MemorySpace("separate")
