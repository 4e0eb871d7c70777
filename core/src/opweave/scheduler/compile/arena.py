"""`Arena`: a target's memory for temporaries, shared by the programs of a scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract.memory import Usage
from opweave.runtime.buffer import Buffer

if TYPE_CHECKING:
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.chunks import ChunkPlan

__all__ = ["Arena", "Lease"]

SPARE: Final = 4
"""A chunk that is added to others is larger than it must be by one part in this many, so that programs that each need
a little more than the one before them fill few chunks, and not one each."""


class Arena:
    """Chunks of a target's memory. Programs share them: a chunk is used by every program whose temporaries fit into it.
    It never moves or shrinks as long as one of them is left, and is given back with the last one. Streams never share
    an arena, so none of them reuses bytes that another may still be reading.

    Attributes:
        target: whose memory it is.
        allocated: bytes taken so far, those given back included.
        users: chunk -> how many leases it is in.
        dropped: the chunks of leases that have ended.
    """

    __slots__ = ("allocated", "dropped", "target", "users")

    def __init__(self, target: Target) -> None:
        self.target: Final = target
        self.allocated = 0
        self.users: Final[dict[Buffer, int]] = {}
        self.dropped: Final[deque[tuple[Buffer, ...]]] = deque()

    @property
    def nbytes(self) -> int:
        return sum([chunk.size for chunk in list(self.users)])

    def capacities(self) -> list[int]:
        """The sizes of the chunks, for a plan that is taken right afterwards."""
        self.reclaim()
        return [chunk.size for chunk in self.users]

    def take(self, plan: ChunkPlan, *, tight: bool = False) -> Lease:
        """The chunks that a plan for the present `capacities` uses; those that are missing are allocated.

        Args:
            tight: no chunk larger than the plan asks for.

        Raises:
            AllocationError: the device has no room; what was there stays.
        """
        held = list(self.users)
        added = self._alloc(plan.sizes[len(held) :], spare=bool(held) and not tight)
        self.users.update(dict.fromkeys(added, 0))
        chunks = held + added
        return Lease(self, {index: chunks[index] for index in set(plan.chunks)})

    def reserve(self, size: int) -> Lease:
        """What is missing to ``size`` bytes, in as few chunks as the device allows; raises `AllocationError`."""
        missing = max(0, size - sum(self.capacities()))
        largest = self.target.buffer_type.max_size or missing
        sizes = [min(largest, missing - begin) for begin in range(0, missing, max(1, largest))]
        added = self._alloc(sizes, spare=False)
        self.users.update(dict.fromkeys(added, 0))
        return Lease(self, dict(enumerate(added)))

    def _alloc(self, sizes: Sequence[int], *, spare: bool) -> list[Buffer]:
        kind = self.target.buffer_type
        added: list[Buffer] = []
        try:
            for size in sizes:
                more = size + size // SPARE if spare else size
                if kind.max_size is not None:
                    more = max(size, min(more, kind.max_size))
                added.append(kind.alloc(more, Usage.COMPUTE))
        except BaseException:
            for buffer in added:
                buffer.free()
            raise
        self.allocated += sum(buffer.size for buffer in added)
        return added

    def reclaim(self) -> None:
        """Give back the chunks that no lease holds any more. Called with the executor's lock held."""
        while self.dropped:
            for chunk in self.dropped.popleft():
                left = self.users.get(chunk, 0) - 1
                if left > 0:
                    self.users[chunk] = left
                elif self.users.pop(chunk, None) is not None:
                    chunk.free(wait=False)

    def free(self) -> None:
        """Give back all chunks, also those that programs still use."""
        self.dropped.clear()
        while self.users:
            self.users.popitem()[0].free()


class Lease:
    """The chunks of an arena that one program uses. Ends with `release`, or when the program is collected.

    Attributes:
        chunks: by their number in the plan that they were taken for.
    """

    __slots__ = ("_arena", "chunks")

    def __init__(self, arena: Arena, chunks: dict[int, Buffer]) -> None:
        self._arena: Final = arena
        self.chunks: dict[int, Buffer] = {}
        # An interrupt arrives between two chunks and not between these two lines, which call nothing: what `__del__`
        # gives back is what was counted.
        for index, chunk in chunks.items():
            arena.users[chunk] += 1
            self.chunks[index] = chunk

    def again(self) -> Lease:
        """A further lease of the same chunks."""
        return Lease(self._arena, self.chunks)

    def release(self) -> None:
        """End the lease. No run of the program is in flight any more. Ending it twice does nothing."""
        self.__del__()
        self._arena.reclaim()

    def __del__(self) -> None:
        # Any thread may collect a program, so the chunks are only queued here; `Arena.reclaim` frees them.
        chunks = getattr(self, "chunks", None)  # an interrupt may end `__init__` before it is set
        if chunks:
            self.chunks = {}
            self._arena.dropped.append(tuple(chunks.values()))
