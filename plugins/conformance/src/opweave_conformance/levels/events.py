"""Level 3: events of a stream, and waiting for them on the host and in other streams."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from opweave.contract import Event, Stream, WorkerStream
from opweave_conformance.bench import ROUNDS, Bench, StreamChecklist, join_threads, start_threads
from opweave_conformance.checklist import expect

__all__ = ["CHECKS"]

stream = StreamChecklist(3, "async")
CHECKS = stream.checks

SLOW: Final = 0.01
"""Seconds that slow work of the host takes."""


def _can_query(queue: Stream) -> bool:
    """Whether the stream can tell without waiting that an event is reached."""
    inner = queue.inner if isinstance(queue, WorkerStream) else queue
    return not inner.is_async or type(inner)._query is not Stream._query


def _await(event: Event) -> None:
    while not event.done:
        time.sleep(0.0002)


@stream("event-done")
def _(bench: Bench) -> None:
    """`Event.done` becomes true only when the work before the event is done, and without anyone waiting for it."""
    queue, task = bench.with_long_task()
    for _ in range(ROUNDS):
        values = bench.start(task)
        event = queue.record()
        if _can_query(queue):
            _await(event)
            task.expect_result(values, "after Event.done became true")
        queue.synchronize()
        expect(event.done, "Event.done is false after the stream was synchronized")


@stream("event-synchronize")
def _(bench: Bench) -> None:
    """Waiting for an event on the host waits for all the work before it."""
    queue, task = bench.with_long_task()
    for _ in range(ROUNDS):
        values = bench.start(task)
        event = queue.record()
        event.synchronize()
        task.expect_result(values, "after waiting for an event")
        expect(event.done, "Event.done is false after waiting for the event")


@stream("event-order")
def _(bench: Bench) -> None:
    """When an event is reached, so are those before it, and their work is done."""
    queue = bench.open()
    tasks = [bench.long_task(queue) for _ in range(3)]
    for _ in range(ROUNDS):
        fed = [bench.feed(task) for task in tasks]
        events = []
        for task in tasks:
            task.poison()
        for task in tasks:
            task.plan.run()
            events.append(queue.record())
        events[1].synchronize()
        expect(events[0].done, "an event is not reached although a later one is")
        for task, values in list(zip(tasks, fed, strict=True))[:2]:
            task.expect_result(values, "after waiting for a later event")
        queue.synchronize()
        expect(all(event.done for event in events), "events are not reached after their stream was synchronized")


@stream("event-idle")
def _(bench: Bench) -> None:
    """An event on a stream without work is reached at once or soon, also the second time."""
    queue = bench.open()
    for _ in range(3):
        event = queue.record()
        if _can_query(queue):
            _await(event)
        event.synchronize()
        expect(event.done, "an event without work before it is not reached")


@stream("event-closed")
def _(bench: Bench) -> None:
    """Events of a stream that was closed are reached, and can be waited for by the host and by other streams."""
    queue, other, host = bench.open(), bench.open(), bench.open_host()
    task = bench.long_task(queue)
    values = bench.start(task)
    event = queue.record()
    queue.close()
    expect(event.done, "an event of a stream that was closed is not reached")
    event.synchronize()
    other.wait(event)
    host.wait(event)
    other.synchronize()
    host.synchronize()
    task.expect_result(values, "after waiting for an event of a stream that was closed")


@stream("event-threads")
def _(bench: Bench) -> None:
    """Other threads may wait for events, and for the stream, while it is submitted to."""
    queue, task = bench.with_task()
    values = bench.feed(task)
    for _ in range(10):
        task.plan.run()
        event = queue.record()
        threads = start_threads(event.synchronize, partial(getattr, event, "done"), queue.synchronize, queue.settle)
        for _ in range(10):
            task.plan.run()
            queue.record()
        join_threads(threads)
        expect(event.done, "an event that a thread has waited for is not reached")
    queue.synchronize()
    task.expect_result(values, "after threads have waited for events")


# --- in other streams -----------------------------------------------------------------------------------------------


@stream("wait-before-reading")
def _(bench: Bench) -> None:
    """A stream that waits for another stream's event sees what that stream wrote before it."""
    maker, reader = bench.open(), bench.open()
    first = bench.long_task(maker)
    second = bench.task(reader, first.out)
    for _ in range(ROUNDS):
        second.poison()
        values = bench.start(first)
        reader.wait(maker.record())
        second.plan.run()
        reader.synchronize()
        second.expect_result(first.result(values), "what a stream makes of another one's result")
        maker.synchronize()


@stream("wait-before-writing")
def _(bench: Bench) -> None:
    """A stream that waits for another stream's event may overwrite what that stream read before it."""
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
    """In a chain of three streams, each of which waits for the one before it, each sees the previous one's result."""
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
        tasks[-1].expect_result(values, "the last of three streams, each of which waits for the one before it")


@stream("wait-mutual")
def _(bench: Bench) -> None:
    """Two streams may wait for each other's events: each sees the other one's result, without a deadlock."""
    queues = bench.open(), bench.open()
    tasks = [bench.long_task(queue) for queue in queues]
    readers = [bench.task(queue, task.out) for queue, task in zip(queues, reversed(tasks), strict=True)]
    for _ in range(ROUNDS):
        fed = [bench.feed(task) for task in tasks]
        events = []
        for queue, task, reader in zip(queues, tasks, readers, strict=True):
            task.poison()
            reader.poison()
            task.plan.run()
            events.append(queue.record())
        for queue, event in zip(queues, reversed(events), strict=True):
            queue.wait(event)
        for reader in readers:
            reader.plan.run()
        for queue in queues:
            queue.synchronize()
        for reader, task, values in zip(readers, reversed(tasks), reversed(fed), strict=True):
            reader.expect_result(task.result(values), "after two streams waited for each other")


@stream("wait-again")
def _(bench: Bench) -> None:
    """A stream may wait for its own events, for events that are already reached, and for one event several times."""
    queue, other = bench.open(), bench.open()
    task = bench.task(queue)
    values = bench.feed(task)
    old = queue.record()
    old.synchronize()
    task.plan.run()
    event = queue.record()
    for waiting in (queue, other):
        for which in (old, event, event):
            waiting.wait(which)
    other.synchronize()
    task.expect_result(values, "after waiting for events that were waited for before")
    queue.synchronize()


@stream("wait-for-host")
def _(bench: Bench) -> None:
    """A stream that waits for an event of a host stream sees what that stream wrote before it."""
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
        task.expect_result(values, "what a stream makes of what the host has written before its event")


@stream("wait-of-host")
def _(bench: Bench) -> None:
    """A host stream that waits for the device's event sees what the device wrote before it."""
    queue, host = bench.open(), bench.open_host()
    task = bench.long_task(queue)
    for _ in range(ROUNDS):
        got, values = task.empty(), bench.start(task)
        host.wait(queue.record())
        host.call(partial(task.out.download, 0, got))
        host.synchronize()
        task.expect(got, values, "what the host sees after waiting for an event")
        queue.synchronize()
