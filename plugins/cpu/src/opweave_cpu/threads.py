"""The threads that compute: how many BLAS may use, and the workers that share big kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.concurrency import Lock, start_thread
from opweave.host.cores import usable_cores

if TYPE_CHECKING:
    from opweave.futures import Task

__all__ = ["THREADS", "CpuThreads", "set_up_numpy"]

BUFFER: Final = 2048
"""Elements of NumPy's buffers. It copies operands with gaps, or with repeated rows, through these unless their rows are
long beside a buffer. Measured: passes over such operands; with NumPy's own 8192 none is faster and many take a fifth
longer."""


def set_up_numpy(buffer: int = BUFFER) -> None:
    """Have NumPy compute in this thread, or this context, as kernels need it: short buffers, and no warnings."""
    np.setbufsize(buffer)
    np.seterr(all="ignore")


MOST: Final = 8
"""Threads that share one kernel at most. An estimate: between two NumPy calls each needs the interpreter's lock, for
which more threads would mostly wait."""


class CpuThreads:
    """The threads of this process that compute.

    Attributes:
        cores: processors that the process may use, by its affinity and its control group's quota.
        default: threads of streams that were opened without ``threads``; ``None``: all cores, and BLAS as it was found.
        blas_limit: how many threads BLAS may use at present, ``None``: as many as it was found with.
    """

    __slots__ = ("_blas_found", "_lock", "_tasks", "blas_limit", "cores", "default")

    def __init__(self) -> None:
        self.cores: Final = usable_cores().usable
        self.default: int | None = None
        self.blas_limit: int | None = None
        self._blas_found: list[tuple[Any, int]] = []
        self._tasks: SimpleQueue[Task[Any]] | None = None  # for the workers, once there are some
        self._lock = Lock()

    @property
    def most(self) -> int:
        """The most threads among which one kernel's work is spread."""
        return min(self.cores, MOST)

    def limit_blas(self, n: int | None) -> None:
        """Let BLAS use ``n`` threads, ``None``: as many as it was found with. Costs nothing while ``n`` is the same."""
        if n != self.blas_limit:
            self._set_blas(n)

    def _set_blas(self, n: int | None) -> None:
        with self._lock:
            if not self._blas_found:
                from threadpoolctl import ThreadpoolController

                libraries = ThreadpoolController().select(user_api="blas").lib_controllers
                self._blas_found = [(library, library.num_threads) for library in libraries]
            for library, found in self._blas_found:
                library.set_num_threads(found if n is None else n)
            self.blas_limit = n

    def spread(self, jobs: Sequence[Callable[[], Any]]) -> None:
        """Do all jobs, the first one in this thread and the others in workers; raises the first error.

        Returns when every job has ended, also after an error.
        """
        from opweave.futures import Task  # importing the plugin must not pay for it

        queue = self._tasks or self._start()
        tasks = [Task(job) for job in jobs[1:]]
        try:
            for task in tasks:
                queue.put(task)
            jobs[0]()
            errors = [task.future.exception() for task in tasks]
        except BaseException:
            for task in tasks:
                if not task.future.cancel():  # it has begun
                    task.future.exception()
            raise
        for error in errors:
            if error is not None:
                raise error

    def spread_products(self, jobs: Sequence[Callable[[], Any]]) -> None:
        """`spread` with one thread of BLAS for each job: with more of them the jobs would wait for each other in it."""
        before = self.blas_limit
        try:
            self.limit_blas(1)
            self.spread(jobs)
        finally:
            self.limit_blas(before)

    def _start(self) -> SimpleQueue[Task[Any]]:
        with self._lock:
            if self._tasks is None:
                tasks: SimpleQueue[Task[Any]] = SimpleQueue()
                for i in range(max(1, self.cores - 1)):
                    start_thread(_work_off, tasks, name=f"opweave-cpu_{i}")
                self._tasks = tasks
            return self._tasks

    def _after_fork(self) -> None:
        # Threads do not survive a fork: a child that submitted to the parent's workers would wait for ever.
        self._tasks = None


def _work_off(tasks: SimpleQueue[Task[Any]]) -> None:
    set_up_numpy()
    while True:
        tell = tasks.get()()
        if tell is not None:
            tell()
        del tell


THREADS: Final = CpuThreads()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=THREADS._after_fork)
