"""Independent jobs of a kernel spread over workers: threads, each with scratch arrays of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

from opweave.contract import Call, Stream
from opweave_cpu.threads import MOST
from opweave_cpu.tiles import at_once, bound, shares, tile_cuts, workers_of
from opweave_cpu.tunables import SPREAD_WORK

__all__ = ["Cut", "at", "bind_workers", "cuts_of", "full_cuts", "is_blas_matrix", "worker_count"]

Job = TypeVar("Job")
Cut = tuple[slice, ...]


def worker_count(jobs: int, work: int) -> int:
    """How many workers share ``jobs`` jobs that take ``work`` elementary operations together."""
    return min(MOST.value, jobs) if work >= SPREAD_WORK.value else 1


def bind_workers(
    stream: Stream, jobs: Sequence[Job], workers: int, calls: Callable[[Job, int], Iterable[Call]]
) -> Call:
    """The call that does all jobs, in at most ``workers`` threads.

    ``calls(job, worker)`` gives the calls of a job. Jobs of one worker run one after the other; jobs of different
    workers run at the same time, so they write into different parts of the workspace: its arrays have a first axis of
    ``workers``.
    """
    count = min(workers_of(stream), workers, len(jobs))
    parts = [bound(partial(_calls_of, calls, jobs[mine], i)) for i, mine in enumerate(shares(len(jobs), count))]
    return at_once(parts)


def _calls_of(calls: Callable[[Job, int], Iterable[Call]], jobs: Sequence[Job], worker: int) -> Iterator[Call]:
    for job in jobs:
        yield from calls(job, worker)


# --- windows of arrays ----------------------------------------------------------------------------------------------


def at(*parts: Any) -> Any:
    """An index for ``x[at(i, some, *cut)]``: a tuple that type checkers accept whatever its parts."""
    return parts


def full_cuts(shape: Sequence[int], elements: int) -> list[Cut]:
    """Windows of at most ``elements`` elements (at least one) that cover ``shape``, a slice for each axis. In a dense
    array the elements of a window lie one behind the other."""
    whole = [slice(0, n) for n in shape]
    cuts = []
    for cut in tile_cuts(shape, max(1, elements), keep_last=False):
        some = [] if cut == (...,) else [slice(c.start, min(c.stop, n)) for c, n in zip(cut, shape, strict=False)]
        cuts.append((*some, *whole[len(some) :]))
    return cuts


def cuts_of(count: int, shape: Sequence[int], elements: int) -> list[tuple[int, Cut]]:
    """`full_cuts` of ``shape`` for each of ``count`` numbers."""
    return list(product(range(count), full_cuts(shape, elements)))


def is_blas_matrix(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Whether the last two axes lie as BLAS reads a matrix or a transposed one."""
    (m, n), (down, across) = shape[-2:], strides[-2:]
    rows = (across == item or n == 1) and down % item == 0 and (down >= n * item or m == 1)
    columns = (down == item or m == 1) and across % item == 0 and (across >= m * item or n == 1)
    return rows or columns
