"""The threads that compute: how many BLAS may use, and the workers that share big kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any, Final

import numpy as np

from opweave.concurrency import Lock
from opweave.lifecycle import notify_after_fork
from opweave.runtime.host.cores import usable_cores
from opweave.runtime.host.threads import ThreadPool
from opweave_cpu.hardware import openblas_function
from opweave_cpu.tunables import limit

__all__ = ["CURRENT", "MOST", "THREADS", "CpuThreads", "set_up_numpy"]

BUFFER: Final = 2048
"""Elements of NumPy's buffers. It copies operands with gaps, or with repeated rows, through these unless their rows are
long beside a buffer. Measured: passes over such operands; with NumPy's own 8192 none is faster and many take a fifth
longer."""


def set_up_numpy(buffer: int = BUFFER) -> None:
    """Have NumPy compute in this thread, or this context, as kernels need it: short buffers, and no warnings."""
    np.setbufsize(buffer)
    np.seterr(all="ignore")


MOST: Final = limit("threads", min(usable_cores().usable, 8), 1, 8, bounds=(1, 8))
"""Threads that share one kernel at most. An estimate: between two NumPy calls each needs the interpreter's lock, for
which more threads would mostly wait."""


class CpuThreads:
    """The threads of this process that compute.

    Attributes:
        cores: processors that the process may use, by its affinity and its control group's quota.
        default: threads of streams that were opened without ``threads``; ``None``: all cores.
    """

    __slots__ = ("__weakref__", "_blas", "_lock", "_pool", "_runs", "cores", "default")

    def __init__(self) -> None:
        self.cores: Final = usable_cores().usable
        self.default: int | None = None
        self._blas: list[tuple[Callable[[int], Any], int]] | None = None  # see `_blas_limits`
        self._runs = 0
        self._pool: ThreadPool | None = None  # shared by the runs that have no pool of their own
        self._lock = Lock()
        notify_after_fork(self)

    def begin_run(self) -> None:
        """Let BLAS use one thread until the last run has ended, as kernels share their products themselves. Threads of
        BLAS look for further products for tens of milliseconds after each one, on processors that others then lack: a
        prompt of a mixture of experts took 1.8 times as long."""
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._limit_blas(1)

    def end_run(self) -> None:
        """Let BLAS use as many threads as it was found with, if no run is left."""
        with self._lock:
            self._runs = max(0, self._runs - 1)  # 0 where an interrupt came before the run had begun
            if not self._runs:
                self._limit_blas(None)

    def _limit_blas(self, n: int | None) -> None:
        if self._blas is None:
            self._blas = _blas_limits()
        for change, found in self._blas:
            change(found if n is None else n)

    def after_fork(self) -> None:
        # Runs of other threads go on in the parent alone.
        self._runs, self._lock = 0, Lock()

    def pool(self) -> ThreadPool:
        """The pool of the run that this thread makes, else that of the process."""
        return CURRENT.pool or self._pool or self._start()

    def recall(self) -> None:
        """Have the threads that wait for parts of kernels leave their processors; see `ThreadPool.recall`."""
        pool = CURRENT.pool or self._pool
        if pool is not None:
            pool.recall()

    def spread(self, jobs: Sequence[Callable[[], Any]]) -> None:
        """Do all jobs in the threads of the pool of the run, else in those of the process; see `ThreadPool.spread`."""
        self.pool().spread([jobs[0], *[partial(_in_worker, job) for job in jobs[1:]]])

    def _start(self) -> ThreadPool:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPool(max(2, self.cores))
            return self._pool


def _blas_limits() -> list[tuple[Callable[[int], Any], int]]:
    """What sets how many threads each BLAS of the process may use, where it uses several, and how many it does."""
    # Called at the beginning and the end of every run: threadpoolctl takes 2 us for a call, which is as long as a
    # small run, and since 3.8 does nothing in other threads than the first one that limited OpenBLAS.
    change, count = [openblas_function(f"openblas_{name}_num_threads") for name in ("set", "get")]
    if change is not None and count is not None:
        limits = [(change, count())]
    else:
        from threadpoolctl import ThreadpoolController

        libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        limits = [(library.set_num_threads, library.num_threads) for library in libraries]
    return [(change, found) for change, found in limits if found > 1]


class _Current(local):
    """The state of this thread.

    Attributes:
        pool: the pool of the run that this thread makes.
        set_up: whether NumPy was set up in this thread, which is one of a pool.
    """

    pool: ThreadPool | None = None
    set_up: bool = False


CURRENT: Final = _Current()


def _in_worker(job: Callable[[], Any]) -> None:
    if not CURRENT.set_up:
        set_up_numpy()
        CURRENT.set_up = True
    job()


THREADS: Final = CpuThreads()
