"""Level 3: marks on a stream's timeline, and waiting for them on the host and in other streams."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from opweave.conformance.bench import ROUNDS, Bench, Ways, beside, joined
from opweave.conformance.checklist import expect
from opweave.contract.event import Event
from opweave.contract.stream import Stream
from opweave.contract.worker import WorkerStream

__all__ = ["CHECKS"]

stream = Ways(3, "async")
CHECKS = stream.checks

SLOW: Final = 0.01
"""Seconds that slow work of the host takes."""


def _tells(queue: Stream) -> bool:
    """Whether marks of the stream say by themselves that they are reached."""
    inner = queue.inner if isinstance(queue, WorkerStream) else queue
    return not inner.is_async or type(inner)._query is not Stream._query


def _await(mark: Event) -> None:
    while not mark.done:
        time.sleep(0.0002)


@stream("mark-done")
def _(bench: Bench) -> None:
    """A mark says that it is reached only when the work before it is done, and says so without being waited for."""
    queue = bench.open()
    task = bench.long_task(queue)
    for _ in range(ROUNDS):
        values = bench.feed(task)
        task.poison()
        task.plan.run()
        mark = queue.record()
        if _tells(queue):
            _await(mark)
            task.expect_result(values, "after a mark said that it is reached")
        queue.synchronize()
        expect(mark.done, "a mark does not say that it is reached after its stream was synchronized")


@stream("mark-synchronize")
def _(bench: Bench) -> None:
    """Waiting for a mark on the host waits for all the work before it."""
    queue = bench.open()
    task = bench.long_task(queue)
    for _ in range(ROUNDS):
        values = bench.feed(task)
        task.poison()
        task.plan.run()
        mark = queue.record()
        mark.synchronize()
        task.expect_result(values, "after waiting for a mark")
        expect(mark.done, "a mark that was waited for does not say that it is reached")


@stream("mark-order")
def _(bench: Bench) -> None:
    """When a mark is reached, so are those before it, and their work is done."""
    queue = bench.open()
    tasks = [bench.long_task(queue) for _ in range(3)]
    for _ in range(ROUNDS):
        fed = [bench.feed(task) for task in tasks]
        marks = []
        for task in tasks:
            task.poison()
        for task in tasks:
            task.plan.run()
            marks.append(queue.record())
        marks[1].synchronize()
        expect(marks[0].done, "a mark is not reached although a later one is")
        for task, values in list(zip(tasks, fed, strict=True))[:2]:
            task.expect_result(values, "after waiting for a later mark")
        queue.synchronize()
        expect(all(mark.done for mark in marks), "marks are not reached after their stream was synchronized")


@stream("mark-idle")
def _(bench: Bench) -> None:
    """A mark on a stream without work is reached at once or soon, also the second time."""
    queue = bench.open()
    for _ in range(3):
        mark = queue.record()
        if _tells(queue):
            _await(mark)
        mark.synchronize()
        expect(mark.done, "a mark without work before it is not reached")


@stream("mark-closed")
def _(bench: Bench) -> None:
    """Marks of a stream that was closed are reached, and can be waited for by the host and by other streams."""
    queue, other, host = bench.open(), bench.open(), bench.open_host()
    task = bench.long_task(queue)
    values = bench.feed(task)
    task.plan.run()
    mark = queue.record()
    queue.close()
    expect(mark.done, "a mark of a stream that was closed is not reached")
    mark.synchronize()
    other.wait(mark)
    host.wait(mark)
    other.synchronize()
    host.synchronize()
    task.expect_result(values, "after waiting for a mark of a stream that was closed")


@stream("mark-threads")
def _(bench: Bench) -> None:
    """Other threads may wait for marks, and for the stream, while it is submitted to."""
    queue = bench.open()
    task = bench.task(queue)
    values = bench.feed(task)
    for _ in range(10):
        task.plan.run()
        mark = queue.record()
        threads = beside(mark.synchronize, partial(getattr, mark, "done"), queue.synchronize, queue.settle)
        for _ in range(10):
            task.plan.run()
            queue.record()
        joined(threads)
        expect(mark.done, "a mark that a thread has waited for is not reached")
    queue.synchronize()
    task.expect_result(values, "after threads have waited for marks")


# --- in other streams -----------------------------------------------------------------------------------------------


@stream("wait-before-reading")
def _(bench: Bench) -> None:
    """A stream that waits for another one's mark sees what was made before it."""
    maker, reader = bench.open(), bench.open()
    first = bench.long_task(maker)
    second = bench.task(reader, first.out)
    for _ in range(ROUNDS):
        values = bench.feed(first)
        first.poison()
        second.poison()
        first.plan.run()
        reader.wait(maker.record())
        second.plan.run()
        reader.synchronize()
        second.expect_result(first.result(values), "what a stream makes of another one's result")
        maker.synchronize()


@stream("wait-before-writing")
def _(bench: Bench) -> None:
    """A stream that waits for another one's mark may overwrite what was read before it."""
    reader, writer = bench.open(), bench.open()
    ahead, task = bench.long_task(reader), bench.task(reader)
    bench.feed(ahead)
    for _ in range(ROUNDS):
        values = bench.feed(task)
        task.poison()
        ahead.plan.run()
        task.plan.run()
        writer.wait(reader.record())
        writer.upload(task.x, 0, values * 0)
        writer.synchronize()
        reader.synchronize()
        task.expect_result(values, "what a stream makes of memory that another one overwrites after waiting")


@stream("wait-in-turn")
def _(bench: Bench) -> None:
    """Three streams that wait for each other in turn hand on their results."""
    queues = [bench.open() for _ in range(3)]
    first = bench.long_task(queues[0])
    second = bench.long_task(queues[1], first.out)
    tasks = [first, second, bench.long_task(queues[2], second.out)]
    for _ in range(ROUNDS):
        values = bench.feed(tasks[0])
        for task in tasks:
            task.poison()
        for i, (queue, task) in enumerate(zip(queues, tasks, strict=True)):
            if i:
                queue.wait(queues[i - 1].record())
            task.plan.run()
        queues[-1].synchronize()
        for task in tasks[:-1]:
            values = task.result(values)
        tasks[-1].expect_result(values, "the last of three streams that hand on their results")


@stream("wait-mutual")
def _(bench: Bench) -> None:
    """Two streams may wait for each other's marks: each sees what the other one made, and nobody waits for ever."""
    queues = bench.open(), bench.open()
    tasks = [bench.long_task(queue) for queue in queues]
    readers = [bench.task(queue, task.out) for queue, task in zip(queues, reversed(tasks), strict=True)]
    for _ in range(ROUNDS):
        fed = [bench.feed(task) for task in tasks]
        marks = []
        for queue, task, reader in zip(queues, tasks, readers, strict=True):
            task.poison()
            reader.poison()
            task.plan.run()
            marks.append(queue.record())
        for queue, mark in zip(queues, reversed(marks), strict=True):
            queue.wait(mark)
        for reader in readers:
            reader.plan.run()
        for queue in queues:
            queue.synchronize()
        for reader, task, values in zip(readers, reversed(tasks), reversed(fed), strict=True):
            reader.expect_result(task.result(values), "after two streams waited for each other")


@stream("wait-again")
def _(bench: Bench) -> None:
    """A stream may wait for its own marks, for marks reached long ago, and several times for one."""
    queue, other = bench.open(), bench.open()
    task = bench.task(queue)
    values = bench.feed(task)
    old = queue.record()
    old.synchronize()
    task.plan.run()
    mark = queue.record()
    for waiting in (queue, other):
        for which in (old, mark, mark):
            waiting.wait(which)
    other.synchronize()
    task.expect_result(values, "after waiting for marks that were waited for before")
    queue.synchronize()


@stream("wait-for-host")
def _(bench: Bench) -> None:
    """A stream that waits for a mark of the host's comes after what the host has done before it."""
    host, queue = bench.open_host(), bench.open()
    task = bench.task(queue)
    for _ in range(ROUNDS):
        values = task.values(bench.rng)
        task.x.fill(0xFF)
        host.call(partial(time.sleep, SLOW))
        host.call(partial(task.x.upload, 0, values))
        queue.wait(host.record())
        task.plan.run()
        queue.synchronize()
        task.expect_result(values, "what a stream makes of what the host has written before its mark")


@stream("wait-of-host")
def _(bench: Bench) -> None:
    """The host's stream that waits for a mark sees what was made before it."""
    queue, host = bench.open(), bench.open_host()
    task = bench.long_task(queue)
    for _ in range(ROUNDS):
        values, got = bench.feed(task), task.empty()
        task.poison()
        task.plan.run()
        host.wait(queue.record())
        host.call(partial(task.out.download, 0, got))
        host.synchronize()
        task.expect(got, values, "what the host sees after waiting for a mark")
        queue.synchronize()
