"""Packing: where blocks of memory that live at different times lie, in as few bytes as possible.

The first plan is a best-fit that walks through time; where it wastes memory, another is tried, which places the largest
blocks first: a network that finds text in images then takes 49 MB, and not 75. Offsets lie in chunks, because
a device's buffers have a largest size and because memory that a program uses is never moved: when a later program needs
more, chunks are appended.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from opweave.graph.layout import round_up

__all__ = ["Block", "ChunkPlan", "plan_chunks"]

MEETINGS_LIMIT: Final = 16
"""The largest blocks are placed first where blocks meet on average at most this many others, as its time grows with
that."""

FILLED_LIMIT: Final = 1.5
"""Existing chunks are filled up as long as all of them together are at most so many times what a program needs."""

_CHUNK: Final = 1 << 48  # chunks lie this far apart in the planner's own addresses


class Block(NamedTuple):
    """Bytes, at least one, that are wanted from moment ``birth`` to moment ``death``, both included."""

    size: int
    birth: int
    death: int


class ChunkPlan(NamedTuple):
    """Where blocks lie: chunk and offset of each, and the size that each chunk must have."""

    chunks: list[int]
    offsets: list[int]
    sizes: list[int]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def plan_chunks(
    blocks: Sequence[Block],
    alignment: int,
    capacities: Sequence[int] = (),
    max_size: int | None = None,
    *,
    tight: bool = False,
) -> ChunkPlan:
    """Place ``blocks`` so that no two that live at one moment overlap.

    Args:
        alignment: bytes; every offset is a multiple of it.
        capacities: sizes of the chunks that exist already. They are used where the blocks fit, and filled up where all
            chunks are then at most `FILLED_LIMIT` times what the blocks need; else the blocks get chunks of their own.
        max_size: the largest chunk possible, ``None``: no limit. (A larger block gets a chunk of its own, and
            allocating that raises the error.)
        tight: fill up what exists in any case.
    """
    best, bound, meetings = _best_fit(blocks, alignment, (), max_size)
    if best.nbytes > bound * 1.01 and len(best.sizes) == 1 and meetings <= MEETINGS_LIMIT * len(blocks):
        best = min(best, _largest_first(blocks, alignment), key=lambda plan: plan.nbytes)
    if not capacities:
        return best
    # What is planned as if nothing existed fits wherever it fitted before: building again takes no further memory.
    fitting = _into(best, capacities)
    if fitting is not None:
        return fitting
    filled = _best_fit(blocks, alignment, capacities, max_size)[0]
    if tight or filled.nbytes <= max(sum(capacities), FILLED_LIMIT * best.nbytes):
        return filled
    # A chunk for what does not fit would be of use to this program alone, and the next one would bring another.
    n = len(capacities)
    return ChunkPlan([n + chunk for chunk in best.chunks], best.offsets, [*capacities, *best.sizes])


def _into(plan: ChunkPlan, capacities: Sequence[int]) -> ChunkPlan | None:
    """The plan in chunks that exist already, ``None`` where they are too small."""
    free = sorted(range(len(capacities)), key=capacities.__getitem__)
    chosen = {}
    for chunk in sorted(range(len(plan.sizes)), key=plan.sizes.__getitem__):
        while free and capacities[free[0]] < plan.sizes[chunk]:
            del free[0]
        if not free:
            return None
        chosen[chunk] = free.pop(0)
    return ChunkPlan([chosen[c] for c in plan.chunks], plan.offsets, list(capacities))


def _best_fit(
    blocks: Sequence[Block], alignment: int, capacities: Sequence[int], max_size: int | None
) -> tuple[ChunkPlan, int, int]:
    """Walk through time; give each block the smallest free piece that holds it, else grow the last chunk.

    Returns:
        The plan; the largest sum of live bytes at any moment: no plan needs less; how many pairs of blocks meet.
    """
    n = len(blocks)
    births, deaths = [b[1] for b in blocks], [b[2] for b in blocks]
    rounded = [-(-b[0] // alignment) * alignment for b in blocks]
    going = sorted(range(n), key=deaths.__getitem__)
    gone = live = most = meetings = 0
    address = [0] * n
    sizes = list(capacities)
    by_size = sorted([(size, chunk * _CHUNK) for chunk, size in enumerate(sizes) if size])  # free pieces, (size, start)
    size_at = {start: size for size, start in by_size}  # start of a free piece -> size
    start_of = {start + size: start for size, start in by_size}  # end of a free piece -> start
    top = -1  # end of the growing chunk in planner addresses, -1: none yet
    for begun, i in enumerate(sorted(range(n), key=births.__getitem__)):
        birth, need = births[i], rounded[i]
        while deaths[going[gone]] < birth:
            start, size = address[going[gone]], rounded[going[gone]]
            gone += 1
            live -= size
            # Merge with free neighbours.
            end = start + size
            after = size_at.pop(end, 0)
            if after:
                del by_size[bisect_left(by_size, (after, end))]
                del start_of[end + after]
                size += after
            before = start_of.pop(start, -1)
            if before >= 0:
                length = size_at.pop(before)
                del by_size[bisect_left(by_size, (length, before))]
                start, size = before, size + length
            size_at[start] = size
            start_of[start + size] = start
            insort(by_size, (size, start))
        meetings += begun - gone
        live += need
        if live > most:
            most = live
        at = bisect_left(by_size, (need, -1))
        if at < len(by_size):
            size, start = by_size.pop(at)
            del size_at[start]
            if size > need:
                size_at[start + need] = size - need
                start_of[start + size] = start + need
                insort(by_size, (size - need, start + need))
            else:
                del start_of[start + size]
        else:
            base = (len(sizes) - 1) * _CHUNK
            # A free piece at the end of the growing chunk is used up first.
            start = start_of.get(top, top) if top >= 0 else -1
            if top < 0 or (max_size is not None and start - base + need > max_size):
                sizes.append(0)
                base = (len(sizes) - 1) * _CHUNK
                start = top = base
            if start != top:
                del start_of[top]
                length = size_at.pop(start)
                del by_size[bisect_left(by_size, (length, start))]
            top = start + need
            sizes[-1] = top - base
        address[i] = start
    if len(sizes) < 2:  # mostly
        return ChunkPlan([0] * n, address, sizes), most, meetings
    return ChunkPlan([a // _CHUNK for a in address], [a % _CHUNK for a in address], sizes), most, meetings


def _largest_first(blocks: Sequence[Block], alignment: int) -> ChunkPlan:
    """Place one block after the other, each in the smallest gap between the placed ones that live at the same time."""
    n = len(blocks)
    order = sorted(range(n), key=[(-b.size, b.birth) for b in blocks].__getitem__)
    rounded = [round_up(b.size, alignment) for b in blocks]
    rank = [0] * n
    for k, i in enumerate(order):
        rank[i] = k
    before: list[list[int]] = [[] for _ in blocks]  # the blocks that each one meets and that are placed before it
    live: list[int] = []
    for i in sorted(range(n), key=lambda i: blocks[i].birth):
        live = [j for j in live if blocks[j].death >= blocks[i].birth]
        for j in live:
            if rank[j] < rank[i]:
                before[i].append(j)
            else:
                before[j].append(i)
        live.append(i)
    offsets = [0] * n
    total = 0
    for i in order:
        need = rounded[i]
        best = -1
        gap = cursor = 0
        for offset, end in sorted([(offsets[j], offsets[j] + rounded[j]) for j in before[i]]):
            if offset - cursor >= need and (best < 0 or offset - cursor < gap):
                best, gap = cursor, offset - cursor
            cursor = max(cursor, end)
        offsets[i] = cursor if best < 0 else best
        total = max(total, offsets[i] + need)
    return ChunkPlan([0] * n, offsets, [total])
