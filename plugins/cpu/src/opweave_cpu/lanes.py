"""Lanes: independent jobs of a kernel spread over threads, each with scratch arrays and a BLAS thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave_cpu.threads import THREADS
from opweave_cpu.tiles import Array, bound, lanes, padded, scratch_array, shares, tile_cuts

__all__ = [
    "Cut", "Room", "Rooms", "at", "bind_lanes", "cuts_of", "full_cuts", "is_blas_matrix",
    "lane_count", "overlap",
]  # fmt: skip

Job = TypeVar("Job")
Room = tuple[int, DType]
"""Elements and type of a scratch array."""
Cut = tuple[slice, ...]

SPREAD_WORK: Final = 1 << 21
"""Elementary operations from which on a second thread is worth waking."""


class Rooms:
    """The scratch arrays of a kernel: some shared by all lanes, the others once for each lane."""

    def __init__(self, lanes: int, own: Sequence[Room], shared: Sequence[Room] = ()) -> None:
        self.lanes, self._own, self._shared = lanes, own, shared

    @property
    def nbytes(self) -> int:
        """What `workspace=` of the kernel has to say."""
        return _nbytes(self._shared) + self.lanes * _nbytes(self._own)

    def shared(self, workspace: Arg | None) -> list[Array]:
        """The arrays for all lanes, flat."""
        return _take(workspace, self._shared, 0)

    def own(self, workspace: Arg | None, lane: int) -> list[Array]:
        """The arrays of one lane, flat."""
        return _take(workspace, self._own, _nbytes(self._shared) + lane * _nbytes(self._own))


def _nbytes(rooms: Sequence[Room]) -> int:
    return sum([padded(elements * dtype.itemsize) for elements, dtype in rooms])


def _take(workspace: Arg | None, rooms: Sequence[Room], at: int) -> list[Array]:
    arrays = []
    for elements, dtype in rooms:
        arrays.append(scratch_array(workspace, elements, dtype, at))
        at += padded(elements * dtype.itemsize)
    return arrays


def lane_count(jobs: int, work: int) -> int:
    """Lanes for that many jobs of together ``work`` elementary operations."""
    return min(THREADS.most, jobs) if work >= SPREAD_WORK else 1


def bind_lanes(
    stream: Stream,
    jobs: Sequence[Job],
    rooms: Rooms,
    workspace: Arg | None,
    calls: Callable[[Job, list[Array]], Iterable[Call]],
) -> Call:
    """The call that does all jobs. ``calls(job, the arrays of the lane)`` are what a job consists of."""
    count = min(lanes(stream), rooms.lanes, len(jobs))
    parts = []
    for i, mine in enumerate(shares(len(jobs), count)):
        parts.append(bound(partial(_calls_of, calls, jobs[mine], rooms.own(workspace, i))))
    return parts[0] if count == 1 else partial(THREADS.spread_products, parts)


def _calls_of(
    calls: Callable[[Job, list[Array]], Iterable[Call]], jobs: Sequence[Job], rooms: list[Array]
) -> Iterator[Call]:
    for job in jobs:
        yield from calls(job, rooms)


# --- pieces of arrays -----------------------------------------------------------------------------------------------


def at(*parts: Any) -> Any:
    """``x[at(i, some, *cut)]``: an index put together of parts, for NumPy's types to let it pass."""
    return parts


def full_cuts(shape: Sequence[int], elements: int) -> list[Cut]:
    """Windows of at most ``elements`` elements (at least one) that cover ``shape``, a slice for each axis; each is one
    stretch of the elements in their order."""
    whole = [slice(0, n) for n in shape]
    cuts = []
    for cut in tile_cuts(shape, max(1, elements), keep_last=False):
        some = [] if cut == (...,) else [slice(c.start, min(c.stop, n)) for c, n in zip(cut, shape, strict=False)]
        cuts.append((*some, *whole[len(some) :]))
    return cuts


def cuts_of(count: int, shape: Sequence[int], elements: int) -> list[tuple[int, Cut]]:
    """`full_cuts` of ``shape`` for each of ``count`` numbers."""
    return list(product(range(count), full_cuts(shape, elements)))


def overlap(count: int, length: int, stride: int, shift: int) -> tuple[slice, slice]:
    """The i of 0 .. count - 1 for which i · stride + shift is inside of an axis, and where these are."""
    first = max(0, -(shift // stride))
    last = min(count, (length - 1 - shift) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + shift
    return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)


def is_blas_matrix(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Whether the last two axes lie as BLAS reads a matrix or a transposed one."""
    (m, n), (down, across) = shape[-2:], strides[-2:]
    rows = (across == item or n == 1) and down % item == 0 and (down >= n * item or m == 1)
    columns = (down == item or m == 1) and across % item == 0 and (across >= m * item or n == 1)
    return rows or columns
