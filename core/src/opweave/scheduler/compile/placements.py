"""`Placements`: whether a program's leaves still lie where they lay when it was built."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import TYPE_CHECKING, Final

from opweave.runtime.space import CHANGES

if TYPE_CHECKING:
    from opweave.contract.memory import Usage
    from opweave.graph.leaf import Location
    from opweave.graph.tensor import Tensor

__all__ = ["Placements"]


class Placements:
    """The memory of leaves, and its usage, at the time when this object is made.

    Attributes:
        seen: the change after which this was last known to hold (`CHANGES`).
    """

    __slots__ = ("_known", "_leaves", "seen")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.seen = CHANGES.latest
        self._leaves: Final = [t.leaf for t in tensors if t.leaf is not None and t.leaf.kind != "input"]
        self._known: Final = self._look()

    def hold(self) -> bool:
        """Whether nothing has changed. Leaves are only checked after a change of the leaves of any program."""
        latest = CHANGES.latest
        if latest is not self.seen:
            if not all(map(is_, self._look(), self._known)):
                return False
            self.seen = latest
        return True

    def _look(self) -> list[Location | Usage | None]:
        found: list[Location | Usage | None] = []
        for leaf in self._leaves:
            placement = leaf.placement
            found += (placement, None if placement is None else placement.buffer.usage)
        return found
