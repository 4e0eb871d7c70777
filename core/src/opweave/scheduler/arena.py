"""`Arena`: a target's memory for temporaries, shared by all programs of a scheduler. Grows by chunks, never moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract.buffer import Buffer
from opweave.contract.space import Usage

if TYPE_CHECKING:
    from opweave.scheduler.target import Target

__all__ = ["Arena"]


class Arena:
    """Chunks of a target's memory.

    Streams never share an arena, so none of them reuses bytes that another may still be reading.
    """

    __slots__ = ("allocated", "chunks", "target")

    def __init__(self, target: Target) -> None:
        self.target: Final = target
        self.chunks: list[Buffer] = []
        self.allocated = 0  # bytes taken so far, those given back included

    @property
    def capacities(self) -> list[int]:
        return [chunk.size for chunk in self.chunks]

    @property
    def nbytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    def grow(self, sizes: Sequence[int]) -> None:
        """Have at least the chunks that a plan made for the present capacities asks for.

        Raises:
            AllocationError: the device has no room; what was there stays.
        """
        added: list[Buffer] = []
        try:
            for size in sizes[len(self.chunks) :]:
                added.append(self.target.buffer_type.alloc(size, Usage.COMPUTE))  # noqa: PERF401 - freed on failure
        except BaseException:
            for buffer in added:
                buffer.free()
            raise
        self.chunks += added
        self.allocated += sum(buffer.size for buffer in added)

    def free(self) -> None:
        for chunk in self.chunks:
            chunk.free()
        self.chunks.clear()
