"""`Bench`: streams, buffers and workloads of a check, released at its end; `StreamChecklist`: checks of streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from opweave.contract import WorkerStream
from opweave.errors import OpweaveError
from opweave.runtime.host.device import HostDevice
from opweave_conformance.checklist import Check, Checklist, Mismatch, Subject, expect
from opweave_conformance.workload import STEPS, Workload, large_enough, long_enough

if TYPE_CHECKING:
    import numpy as np

    from opweave.contract import Buffer, Stream

__all__ = ["ROUNDS", "Bench", "StreamChecklist", "join_threads", "start_threads"]

ROUNDS: Final = 2
"""How often a check whose result depends on timing is repeated."""

SHORT: Final = 1
"""Steps of a short workload."""

TAIL: Final = 1024
"""Elements at the end of a large result."""


class Bench:
    """Makes streams, buffers and workloads for a check, and closes and frees them at the end of a ``with`` block.

    Args:
        worker: open streams with a thread of their own (``device.open(worker=True)``).

    Attributes:
        device: the device under test.
        rng: the check's random generator.
    """

    def __init__(self, subject: Subject, *, worker: bool = False) -> None:
        self.subject, self.device, self.rng, self.worker = subject, subject.device, subject.rng, worker
        self._streams: list[Stream] = []
        self._tasks: list[Workload] = []
        self._buffers: list[Buffer] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        late: OpweaveError | None = None
        for release in [
            *[stream.close for stream in self._streams],
            *[task.free for task in self._tasks],
            *[buffer.free for buffer in self._buffers],
        ]:
            try:
                release()
            except OpweaveError as failure:
                late = late or failure
        if late is not None and kind is None:
            raise late

    def open(self) -> Stream:
        """A stream of the device."""
        stream = self.device.open(worker=True) if self.worker else self.device.open()
        self._streams.append(stream)
        return stream

    def open_host(self) -> WorkerStream:
        """A stream of the host with a thread of its own; it and the device's streams wait for each other's events."""
        stream = HostDevice().open(worker=True)
        assert isinstance(stream, WorkerStream)
        self._streams.append(stream)
        return stream

    def task(self, stream: Stream, source: Buffer | None = None) -> Workload:
        """A workload of one step, with as many elements as a long one."""
        return self._task(stream, SHORT, source)

    def large_task(self, stream: Stream) -> Workload:
        """A workload of which each step takes long, however long its submission takes."""
        return self._task(stream, STEPS[0], None, large_enough(self.device))

    def tail_task(self, large: Workload) -> Workload:
        """A workload of one step on the last elements of the result of another one, which are computed last."""
        return self._task(large.stream, SHORT, large.out, min(TAIL, large_enough(self.device)))

    def long_task(self, stream: Stream, source: Buffer | None = None) -> Workload:
        """A workload that takes so long that reading its result without waiting for it gives a wrong one."""
        return self._task(stream, long_enough(self.device).steps, source)

    def with_task(self) -> tuple[Stream, Workload]:
        """A new stream, and a workload of one step on it."""
        stream = self.open()
        return stream, self.task(stream)

    def with_long_task(self) -> tuple[Stream, Workload]:
        """A new stream, and a long workload on it."""
        stream = self.open()
        return stream, self.long_task(stream)

    def _task(self, stream: Stream, steps: int, source: Buffer | None, elements: int | None = None) -> Workload:
        task = Workload(stream, elements or long_enough(self.device).elements, steps, source)
        self._tasks.append(task)
        return task

    def alloc(self, size: int) -> Buffer:
        buffer = self.device.alloc(size)
        self._buffers.append(buffer)
        return buffer

    def feed(self, task: Workload) -> np.ndarray[Any, Any]:
        """Random values, uploaded to ``task.x`` when this returns."""
        values = task.values(self.rng)
        task.x.upload(0, values)
        return values

    def start(self, task: Workload) -> np.ndarray[Any, Any]:
        """Run the plan of ``task``, on whose stream nothing is under way, on random values, which this returns."""
        values = self.feed(task)
        task.poison()
        task.plan.run()
        return values

    def expect_right(self, task: Workload, what: str) -> None:
        """Run the plan of ``task``; raises `Mismatch` unless its result is right."""
        values = self.start(task)
        task.stream.synchronize()
        task.expect_result(values, what)


class StreamChecklist(Checklist):
    """Checks of streams. Each is performed twice: with the device's own streams, and with streams that have a thread of
    their own, which schedulers open for ``parallel=True``; the id of the second begins with ``worker-``."""

    def __call__(self, name: str) -> Callable[[Callable[[Bench], None]], None]:  # type: ignore[override]
        def register(ask: Callable[[Bench], None]) -> None:
            about = (ask.__doc__ or "").strip().split("\n")[0]
            for worker in (False, True):
                prefix = f"worker-{self.prefix}" if worker else self.prefix
                self.checks.append(Check(f"{prefix}-{name}", self.level, about, partial(_ask, ask, worker)))

        return register


def _ask(ask: Callable[[Bench], None], worker: bool, subject: Subject) -> None:
    with Bench(subject, worker=worker) as bench:
        ask(bench)


def start_threads(*works: Callable[[], object]) -> list[_CheckThread]:
    """Start a thread for each function; `join_threads` raises what they raised."""
    threads = [_CheckThread(work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def join_threads(threads: list[_CheckThread]) -> None:
    """Wait for the threads of `start_threads`; raises the exception of the first one that failed."""
    for thread in threads:
        thread.join()
        error = thread.error
        if isinstance(error, Mismatch):
            raise error
        expect(error is None, f"in another thread it raises {type(error).__name__}: {error}")


class _CheckThread(Thread):
    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(name="opweave conformance", daemon=True)
        self.work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error
