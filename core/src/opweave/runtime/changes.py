"""Changes that make built programs outdated: where leaves lie, and what their memory is used for."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor

__all__ = ["CHANGES", "Placements"]


class Changes:
    """A counter of changes that make built programs outdated: the memory of a leaf, the usage of a buffer.

    Attributes:
        latest: a new object after each change. A program keeps the object that was there when it was built.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Record a change."""
        self.latest = object()


CHANGES: Final = Changes()
"""The changes of this process."""


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

    def _look(self) -> list[object]:
        found: list[object] = []
        for leaf in self._leaves:
            placement = leaf.placement
            found += (placement, None if placement is None else placement.buffer.usage)
        return found
