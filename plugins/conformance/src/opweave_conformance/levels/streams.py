"""Level 3: several streams, copies between them and between devices, and ending work early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from opweave.errors import Cancelled, ExecutionError, chain_of
from opweave.runtime.host.device import HostDevice
from opweave_conformance.bench import ROUNDS, Bench, StreamChecklist, join_threads, start_threads
from opweave_conformance.checklist import Mismatch, expect, expect_equal, inapplicable
from opweave_conformance.companions import SeparateMemory

if TYPE_CHECKING:
    from opweave.contract import Buffer, Device, Stream
    from opweave_conformance.workload import Workload

__all__ = ["CHECKS"]

stream = StreamChecklist(3, "async")
CHECKS = stream.checks

TOTAL: Final = 300_000
BY_THE_HOST: Final = "it copies by way of the host"


@stream("streams-several")
def _(bench: Bench) -> None:
    """Several streams of the device work at once without disturbing each other."""
    tasks = [bench.long_task(bench.open()) for _ in range(4)]
    for _ in range(ROUNDS):
        fed = [task.values(bench.rng) for task in tasks]
        got = [task.empty() for task in tasks]
        for task, values in zip(tasks, fed, strict=True):
            task.stream.upload(task.x, 0, values)
            task.plan.run()
        for task, out in zip(tasks, got, strict=True):
            task.stream.download(task.out, 0, out)
        for i, (task, values, out) in enumerate(zip(tasks, fed, got, strict=True)):
            task.stream.synchronize()
            task.expect(out, values, f"stream {i} of {len(tasks)}")


@stream("streams-threads")
def _(bench: Bench) -> None:
    """Several threads may submit at the same time, each to a stream of its own."""
    tasks = [bench.task(bench.open()) for _ in range(4)]
    fed = [bench.feed(task) for task in tasks]

    def work(i: int) -> None:
        task, values = tasks[i], fed[i]
        for _ in range(8):
            got = task.empty()
            task.stream.upload(task.x, 0, values)
            task.plan.run()
            task.stream.download(task.out, 0, got)
            task.stream.synchronize()
            task.expect(got, values, f"stream {i} of {len(tasks)}, each with a thread")

    join_threads(start_threads(*[lambda i=i: work(i) for i in range(len(tasks))]))


# --- copies ---------------------------------------------------------------------------------------------------------


def _queue_copy(task: Workload, queue: Stream, target: Buffer) -> None:
    """Queue a copy of the result of ``task`` to ``target``; skips the check where the device copies by the host."""
    if not queue.copy_from(target, 0, task.out, 0, task.nbytes):
        task.stream.synchronize()
        inapplicable(BY_THE_HOST)


@stream("copy-order")
def _(bench: Bench) -> None:
    """A queued copy runs after the work submitted before it and before the work submitted after it."""
    queue, task = bench.with_long_task()
    kept = bench.alloc(task.nbytes)
    for _ in range(ROUNDS):
        kept.fill(0xA5)
        values = bench.start(task)
        _queue_copy(task, queue, kept)
        queue.upload(task.out, 0, values * 0)
        queue.synchronize()
        task.expect_result(values, "a copy between a plan and an upload over what it reads", kept)


@stream("copy-between-streams")
def _(bench: Bench) -> None:
    """A queued copy that waits for another stream's event copies what that stream wrote before the event."""
    maker, copier = bench.open(), bench.open()
    task = bench.long_task(maker)
    kept = bench.alloc(task.nbytes)
    for _ in range(ROUNDS):
        kept.fill(0xA5)
        values = bench.start(task)
        copier.wait(maker.record())
        _queue_copy(task, copier, kept)
        copier.synchronize()
        task.expect_result(values, "a copy of what another stream has made", kept)
        maker.synchronize()


@stream("copy-ranges")
def _(bench: Bench) -> None:
    """A copy from any device's memory, queued or by way of the host, copies exactly its range."""
    queue = bench.open()
    held = bench.rng.integers(0, 256, TOTAL, np.uint8)
    target = bench.alloc(TOTAL)
    target.upload(0, held)
    could = 0
    for device in _sources(bench):
        source = device.alloc(TOTAL)
        with source:
            values = bench.rng.integers(0, 256, TOTAL, np.uint8)
            source.upload(0, values)
            for to, at, size in (
                (0, 0, TOTAL),
                (1, 3, 1),
                (64, 128, 4096),
                (7, 0, 100_001),
                (TOTAL, 5, 0),
                (99, 1, 77),
            ):
                done = queue.copy_from(target, to, source, at, size)
                expect(isinstance(done, bool), f"copy_from gives {done!r}, not whether it could")
                held[to : to + size] = values[at : at + size]
                could += done and size > 0
                queue.synchronize()
                what = f"after copy_from of {size} bytes from {device.name} that said {done}"
                expect_equal(target.read(), held, what)
                expect_equal(source.read(), values, f"the source {what}")
    if not could:
        inapplicable(BY_THE_HOST)


@stream("copy-within")
def _(bench: Bench) -> None:
    """A copy within one buffer, queued or by way of the host, is correct, also of overlapping ranges."""
    queue = bench.open()
    held = bench.rng.integers(0, 256, TOTAL, np.uint8)
    buffer = bench.alloc(TOTAL)
    buffer.upload(0, held)
    could = False
    for to, at, size in ((0, TOTAL // 2, TOTAL // 2), (1, 0, TOTAL - 1), (0, 100, 5000), (100, 0, 5000)):
        could |= queue.copy_from(buffer, to, buffer, at, size)
        held[to : to + size] = held[at : at + size].copy()
        queue.synchronize()
        expect_equal(buffer.read(), held, f"after a queued copy of {size} bytes from {at} to {to} in one buffer")
    if not could:
        inapplicable(BY_THE_HOST)


@stream("copy-keeps-source")
def _(bench: Bench) -> None:
    """The source of a queued copy may be freed at once: freeing waits."""
    queue, task = bench.with_long_task()
    kept = bench.alloc(task.nbytes)
    kept.fill(0xA5)
    values = bench.start(task)
    _queue_copy(task, queue, kept)
    task.out.free()
    bench.alloc(task.nbytes).fill(0xFF)
    queue.synchronize()
    task.expect_result(values, "a copy whose source was freed after it was queued", kept)


def _sources(bench: Bench) -> Iterator[Device]:
    """Devices to copy from: all of the backend's, the host, and one whose memory no other device reaches."""
    yield bench.device
    yield from (device for device in bench.subject.devices if device is not bench.device)
    yield from (HostDevice(), SeparateMemory())


# --- ending early ---------------------------------------------------------------------------------------------------


@stream("abort-idle")
def _(bench: Bench) -> None:
    """Aborting an idle stream changes neither finished results nor later work."""
    queue, task = bench.with_task()
    queue.abort()
    values = bench.start(task)
    queue.synchronize()
    queue.abort()
    queue.synchronize()
    task.expect_result(values, "after aborting a stream that was done")
    bench.expect_right(task, "a plan after aborting a stream that was done")


@stream("abort-running")
def _(bench: Bench) -> None:
    """Aborting from another thread ends the work or lets it end; after recovering the stream works as before."""
    queue, task = bench.with_long_task()
    for round_ in range(3):
        values = bench.feed(task)
        begun = threading.Event()

        def abort(begun: threading.Event = begun, delay: float = 0.002 * round_) -> None:
            begun.wait()
            time.sleep(delay)
            queue.abort()

        threads = start_threads(abort)
        begun.set()
        ended = _ended(bench, task.plan.run) or _ended(bench, queue.synchronize)
        join_threads(threads)
        if not ended:
            task.expect_result(values, "a plan that was not ended by abort()")
        _ended(bench, queue.synchronize)
        queue.recover()
        queue.synchronize()
        bench.expect_right(task, "a plan after abort() and recover()")


def _ended(bench: Bench, work: Callable[[], None]) -> bool:
    """Whether ``work`` raises `Cancelled`; it may raise nothing else."""
    try:
        work()
    except (Cancelled, ExecutionError) as error:
        if not any(isinstance(e, Cancelled) for e in chain_of(error)):
            raise Mismatch(f"abort() makes {bench.device.name} fail: {type(error).__name__}: {error}") from error
        return True
    return False
