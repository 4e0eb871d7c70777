"""`ThreadPool`: the threads that compute on the processor, as an object that programs and schedulers share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import get_native_id, local
from typing import TYPE_CHECKING, Any, Final

from opweave.concurrency import Latch, Lock, start_thread
from opweave.errors import PluginError
from opweave.futures import Task
from opweave.lifecycle import notify_after_fork
from opweave.processors import Apart, current_processor
from opweave.runtime.checks import check_threads
from opweave.runtime.host.cores import usable_cores

if TYPE_CHECKING:
    from types import TracebackType

    _Order = tuple[Task[Any], int]  # a job, and the processor of the thread that gave it

__all__ = ["NODES", "ThreadPool", "node_processors", "numbers_in", "pool_of"]

NODES: Final = Path("/sys/devices/system/node")
"""Where Linux lists the NUMA nodes of the machine."""


class ThreadPool:
    """Threads that compute on the processor. Given to ``device.open(threads=pool)`` and ``Scheduler(threads=pool)``, as
    often as one likes: each run uses no more threads than the pool has. Runs that several threads of the program make
    at once use as many each, as BLAS, torch and ONNX Runtime have threads of their own.

    Backends take of it what their libraries allow. ``cpu`` shares its passes and products among the pool's threads.
    ``torch`` computes in as many threads of its own, which it does not let others place. ``ort`` gives its sessions as
    many threads, on the pool's processors.

    Args:
        size: how many threads compute at once, the one that runs a program among them; ``None``: one for each processor
            of ``affinity``, or for each that the process may use.
        affinity: numbers of the processors on which they run, the thread that runs a program too, for as long as it
            does; ``"node:1"``: those of a NUMA node, on which the memory that they touch first lies then. ``None``:
            any.
        priority: the nice value of the pool's own threads, from -20, first, to 19, last; below 0 needs a privilege. A
            thread that runs a program keeps its own.

    Raises:
        PluginError: a size or a priority that makes no sense; processors that do not exist, that the process may not
            use, or cannot choose on this system; a priority that it may not set.
    """

    def __init__(
        self, size: int | None = None, *, affinity: Iterable[int] | str | None = None, priority: int = 0
    ) -> None:
        self.affinity: Final = None if affinity is None else _checked_processors(affinity)
        default = usable_cores().usable if self.affinity is None else len(self.affinity)
        self.size: Final = default if size is None else check_threads(size)
        self.priority: Final = _checked_priority(priority)
        self._tasks: SimpleQueue[_Order | None] | None = None
        self._paused: Latch | None = None
        self._closed = False
        self._recall: Callable[[], None] | None = None
        self._lock: Final = Lock()
        notify_after_fork(self)

    def __repr__(self) -> str:
        where = f" on processors {sorted(self.affinity)}" if self.affinity is not None else ""
        state = ", closed" if self._closed else ", paused" if self.paused else ""
        return f"<ThreadPool of {self.size}{where}{state}>"

    # --- pausing ----------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether it was paused."""
        return self._paused is not None

    def pause(self) -> None:
        """Let no further run begin with this pool until `resume`: threads that begin one wait. Runs that have begun go
        on. Pausing twice does nothing."""
        with self._lock:
            if self._paused is None:
                self._paused = Latch()

    def resume(self) -> None:
        """Let runs begin again, and those that wait. Resuming twice does nothing."""
        with self._lock:
            latch, self._paused = self._paused, None
        if latch is not None:
            latch.set()

    # --- for backends -----------------------------------------------------------------------------------------------

    def __enter__(self) -> ThreadPool:
        """Begin a run in this thread: wait while the pool is paused, then go to its processors."""
        while (latch := self._paused) is not None:
            latch.wait()
        if self.affinity is not None:
            _THREAD.before.append(os.sched_getaffinity(0))
            os.sched_setaffinity(0, self.affinity)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a run in this thread: back to the processors where it was before."""
        if self.affinity is not None:
            os.sched_setaffinity(0, _THREAD.before.pop())

    def spread(self, jobs: Sequence[Callable[[], Any]]) -> None:
        """Do all jobs, the first one in this thread and the others in the pool's; raises the first error.

        Returns when every job has ended, also after an error.
        """
        if self.size == 1 or self._closed:
            for job in jobs:
                job()
            return
        queue = self._tasks or self._start()
        tasks = [Task(job) for job in jobs[1:]]
        try:
            here = current_processor()
            for task in tasks:
                queue.put((task, here))
            self.recall()
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

    def lend(self, job: Callable[[], Any], recall: Callable[[], None]) -> None:
        """Have one of the pool's threads do a job, as soon as one has nothing else to do, without waiting for it; no
        thread does it once the pool is closed.

        The job may go on for some time to wait for more work of its kind; ``recall`` is called when the threads are
        given other jobs, and has it end such waiting. All jobs lent share one ``recall``.
        """
        if self.size > 1 and not self._closed:
            self._recall = recall
            (self._tasks or self._start()).put((Task(job), current_processor()))

    def recall(self) -> None:
        """Have the threads that were lent end their waiting: before other threads, such as those of BLAS, compute."""
        if self._recall is not None:
            self._recall()

    def close(self) -> None:
        """End the pool's threads once they have done what they were given. Runs go on in one thread. Closing twice does
        nothing."""
        with self._lock:
            self._closed = True
            tasks, self._tasks = self._tasks, None
        self.resume()
        self.recall()
        if tasks is not None:
            for _ in range(self.size - 1):
                tasks.put(None)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the interpreter anything may be gone
            self.close()

    def _start(self) -> SimpleQueue[_Order | None]:
        with self._lock:
            if self._tasks is None:
                tasks: SimpleQueue[_Order | None] = SimpleQueue()
                for i in range(self.size - 1):
                    start_thread(_work_off, tasks, self.affinity, self.priority, name=f"opweave-pool_{i}")
                self._tasks = tasks
            return self._tasks

    def after_fork(self) -> None:
        # Threads do not survive a fork: a child that submitted to the parent's workers would wait for ever.
        self._tasks, self._paused = None, None


class _ThreadState(local):
    """The processors that this thread could use before each run that moved it to a pool's, the latest last."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []


_THREAD: Final = _ThreadState()


def pool_of(threads: object) -> tuple[ThreadPool | None, int | None]:
    """What a caller gave as the parameter ``threads`` of a stream: the pool, if it is one, and the number of threads.

    Raises:
        PluginError: neither a pool nor a positive whole number.
    """
    if isinstance(threads, ThreadPool):
        return threads, threads.size
    return None, None if threads is None else check_threads(threads)


def node_processors(node: int, root: Path = NODES) -> frozenset[int]:
    """The processors of a NUMA node, none for a node of memory only.

    Args:
        root: the folder in which Linux lists the nodes.

    Raises:
        PluginError: there is no such node.
    """
    try:
        text = (root / f"node{node}" / "cpulist").read_text(encoding="ascii")
    except OSError:
        known = sorted(path.name.removeprefix("node") for path in root.glob("node[0-9]*"))
        nodes = f"nodes of this machine: {', '.join(known) or 'unknown'}"
        raise PluginError(f"there is no NUMA node {node}", remedy=nodes) from None
    return numbers_in(text)


def numbers_in(text: str) -> frozenset[int]:
    """The numbers in a list as Linux writes it: ``"0-2,6"``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _work_off(tasks: SimpleQueue[_Order | None], affinity: frozenset[int] | None, priority: int) -> None:
    if affinity is not None:
        os.sched_setaffinity(0, affinity)
    if priority:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), priority)
    apart = Apart()
    while True:
        order = tasks.get()
        if order is None:
            return
        task, giver = order
        apart.move_off(giver)  # where the thread that gave it computes at the same time
        tell = task()
        if tell is not None:
            tell()
        del tell, task


def _checked_processors(given: Iterable[int] | str) -> frozenset[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise PluginError("this system does not let threads choose their processors", remedy="leave affinity out")
    if isinstance(given, str):
        head, _, number = given.partition(":")
        if head != "node" or not (number.isascii() and number.isdigit()):
            raise PluginError(f"affinity={given!r}", remedy="give numbers of processors, or a NUMA node as 'node:0'")
        wanted = node_processors(int(number))
    else:
        try:
            wanted = frozenset([n.__index__() for n in given])
        except (TypeError, AttributeError):
            raise PluginError(f"affinity is numbers of processors, or 'node:0', not {given!r:.60}") from None
    usable = os.sched_getaffinity(0)
    if not wanted or wanted - usable:
        raise PluginError(
            f"affinity {sorted(wanted)} is not among the processors that the process may use",
            remedy=f"choose from {sorted(usable)}",
        )
    return wanted


def _checked_priority(priority: int) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -20 <= priority <= 19:
        raise PluginError(f"priority is a nice value from -20 to 19, not {priority!r:.60}")
    if priority and not hasattr(os, "setpriority"):
        raise PluginError("this system has no nice values", remedy="leave priority out")
    if priority < 0:
        before = os.getpriority(os.PRIO_PROCESS, get_native_id())
        try:
            os.setpriority(os.PRIO_PROCESS, get_native_id(), priority)
            os.setpriority(os.PRIO_PROCESS, get_native_id(), before)
        except PermissionError:
            why = f"the process may not set the priority {priority}"
            raise PluginError(why, remedy="give one of at least 0") from None
    return priority
