"""Level 5, first part: what fails on a stream is told to everyone who waits, and the stream goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event as Flag
from typing import Any

import numpy as np

from opweave.conformance.bench import Bench, Ways, beside, chain_of, joined
from opweave.conformance.checklist import Mismatch, expect, expect_raises, inapplicable
from opweave.conformance.workload import Task
from opweave.contract.step import Call
from opweave.contract.stream import Stream
from opweave.errors import BoundsError, ExecutionError, LayoutError, LifetimeError

__all__ = ["CHECKS", "Planted"]

stream = Ways(5, "fault")
CHECKS = stream.checks


class Planted(Exception):
    """What a call raises in place of its work."""


def _number_of_calls(task: Task) -> int:
    """How many calls the plan has; a stream may compile several steps into one."""
    seen: list[int] = []

    def around(index: int, call: Call) -> Call:
        seen.append(index)
        return call

    task.plan.run(around)
    task.stream.synchronize()
    return len(seen)


def _raising(at: int) -> Callable[[int, Call], Call]:
    """In place of one call of a plan, one that raises."""

    def fail() -> None:
        raise Planted(f"planted in call {at}")

    return lambda index, call: fail if index == at else call


def _break(task: Task, at: int) -> ExecutionError | None:
    """Run the plan with a call that raises; what is raised by that, if it is told at once."""
    try:
        task.plan.run(_raising(at))
    except ExecutionError as error:
        return error
    return None


def _told(queue: Stream, error: ExecutionError | None) -> ExecutionError:
    """What was raised at once, or is raised by waiting for the stream."""
    try:
        queue.synchronize()
    except ExecutionError as late:
        error = error or late
    if error is None:
        raise Mismatch("a call of a plan raised, and neither run() nor synchronize() says so")
    expect(
        any(isinstance(e, Planted) for e in chain_of(error)),
        f"the error does not come from what the call raised: {error}",
    )
    return error


def _expect_right(bench: Bench, task: Task, what: str) -> None:
    values = bench.feed(task)
    task.poison()
    task.plan.run()
    task.stream.synchronize()
    task.expect_result(values, what)


@stream("raised")
def _(bench: Bench) -> None:
    """A call that raises in the middle of a plan is told, with what it raised and which step it was."""
    from opweave.contract.plan import StepError

    queue = bench.open()
    task = bench.long_task(queue)
    bench.feed(task)
    count = _number_of_calls(task)
    for at in sorted({0, count // 2, count - 1}):
        error = _told(queue, _break(task, at))
        steps = [e.step for e in chain_of(error) if isinstance(e, StepError)]
        expect(steps, f"no StepError tells which step it was: {error}")
        if count == len(task.plan):
            expect(steps[-1] == at, f"call {at} raised, the error says step {steps[-1]}")
        queue.recover()
        _expect_right(bench, task, f"a plan after its call {at} raised once")


@stream("remembered")
def _(bench: Bench) -> None:
    """A stream that failed says so each time it is synchronized, until it recovers."""
    queue = bench.open()
    task = bench.task(queue)
    _told(queue, _break(task, 0))
    for _ in range(2):
        expect(queue.failure is not None, "a stream that failed has no failure")
        expect_raises(ExecutionError, "synchronizing a stream that failed", queue.synchronize)
    queue.settle()
    queue.recover()
    expect(queue.failure is None, f"a stream that recovered still has the failure {queue.failure}")
    queue.synchronize()


@stream("marks")
def _(bench: Bench) -> None:
    """Marks behind a failure are failed and waiting for them raises, also after recovering; those before it are not."""
    queue = bench.open()
    task = bench.task(queue)
    bench.feed(task)
    task.plan.run()
    before = queue.record()
    before.synchronize()
    error = _break(task, 0)
    behind = [queue.record(), queue.record()]
    for mark in behind:
        expect_raises(ExecutionError, "waiting for a mark behind a failure", mark.synchronize)
        expect(mark.done and mark.failure is not None, "a mark behind a failure does not say that it has failed")
    _told(queue, error)
    queue.recover()
    after = queue.record()
    after.synchronize()
    expect(after.failure is None, "a mark made after recovering is failed")
    before.synchronize()
    expect(before.failure is None, "a mark that was reached before a failure is failed")
    for mark in behind:
        expect_raises(ExecutionError, "waiting for a mark behind a failure, after recovering", mark.synchronize)


@stream("waits")
def _(bench: Bench) -> None:
    """Streams that wait for a mark of a failed one fail and do not hang; they too go on after recovering."""
    queue, other, host = bench.open(), bench.open(), bench.open_host()
    task, theirs = bench.task(queue), bench.task(other)
    error = _break(task, 0)
    mark = queue.record()
    for waiting in (other, host):

        def wait(waiting: Stream = waiting) -> None:
            waiting.wait(mark)
            waiting.synchronize()

        expect_raises(ExecutionError, f"waiting in {waiting!r} for a mark behind a failure", wait)
        waiting.recover()
        waiting.synchronize()
    _expect_right(bench, theirs, "a stream that had waited for a failed one")
    _told(queue, error)
    queue.recover()
    _expect_right(bench, task, "a stream that others had waited for when it failed")


@stream("recovers")
def _(bench: Bench) -> None:
    """After recovering, plans, uploads, downloads and marks are as before, again and again."""
    queue = bench.open()
    task = bench.task(queue)
    for _ in range(3):
        _told(queue, _break(task, 0))
        queue.recover()
        expect(queue.failure is None, "a stream that recovered has a failure")
        values, got = task.values(bench.rng), task.empty()
        queue.upload(task.x, 0, values)
        task.plan.run()
        queue.download(task.out, 0, got)
        mark = queue.record()
        mark.synchronize()
        expect(mark.done and mark.failure is None, "a mark made after recovering is failed")
        task.expect(got, values, "upload, plan and download after recovering")
        queue.synchronize()


@stream("refused")
def _(bench: Bench) -> None:
    """Transfers that are refused (ranges, arrays, memory) raise their error at once and leave the stream as it was."""
    queue = bench.open()
    task = bench.task(queue)
    end, frozen = task.nbytes, np.zeros(8, np.uint8)
    frozen.flags.writeable = False
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (BoundsError, "an upload past the end", lambda: queue.upload(task.x, end - 4, np.zeros(8, np.uint8))),
        (BoundsError, "a download before the start", lambda: queue.download(task.x, -1, np.zeros(8, np.uint8))),
        (BoundsError, "a copy past the end", lambda: queue.copy_from(task.x, 0, task.out, end - 4, 8)),
        (LayoutError, "an upload of an array with gaps", lambda: queue.upload(task.x, 0, np.zeros(8, np.uint8)[::2])),
        (LayoutError, "a download into a read-only array", lambda: queue.download(task.x, 0, frozen)),
    ]
    for kind, what, use in refused:
        expect_raises(kind, what, use)
        expect(queue.failure is None, f"{what} made the stream fail")
    queue.synchronize()
    _expect_right(bench, task, "a plan after transfers that were refused")


@stream("freed")
def _(bench: Bench) -> None:
    """Freed memory is refused in transfers, copies and plans with a LifetimeError, and the stream goes on."""
    queue = bench.open()
    task, other = bench.task(queue), bench.task(queue)
    bench.feed(task)
    task.plan.run()
    task.x.free()
    data = np.zeros(8, np.uint8)
    uses: dict[str, Callable[[], object]] = {
        "running a plan": task.plan.run,
        "a queued upload": lambda: queue.upload(task.x, 0, data),
        "a queued download": lambda: queue.download(task.x, 0, data),
        "a queued copy": lambda: queue.copy_from(task.out, 0, task.x, 0, 8),
        "compiling": lambda: Task(queue, other.nbytes // other.dtype.itemsize, 1, task.x),
        "reading": task.x.read,
    }
    for what, use in uses.items():
        expect_raises(LifetimeError, f"{what} with a freed buffer", use)
    queue.synchronize()
    _expect_right(bench, other, "a plan after uses of freed memory were refused")


@stream("closed")
def _(bench: Bench) -> None:
    """A closed plan and a closed stream are refused everywhere with a LifetimeError; closing twice does nothing."""
    queue = bench.open()
    task, other = bench.task(queue), bench.task(queue)
    task.plan.close()
    task.plan.close()
    expect_raises(LifetimeError, "running a closed plan", task.plan.run)
    _expect_right(bench, other, "a plan after another one was closed")
    mark = queue.record()
    queue.close()
    queue.close()
    data = np.zeros(8, np.uint8)
    uses: dict[str, Callable[[], object]] = {
        "running a plan": other.plan.run,
        "a mark": queue.record,
        "waiting for a mark": lambda: queue.wait(mark),
        "an upload": lambda: queue.upload(other.x, 0, data),
        "a download": lambda: queue.download(other.x, 0, data),
        "a copy": lambda: queue.copy_from(other.x, 0, other.out, 0, 8),
        "compiling": lambda: queue.compile([]),
    }
    for what, use in uses.items():
        expect_raises(LifetimeError, f"{what} on a closed stream", use)


@stream("second-thread")
def _(bench: Bench) -> None:
    """While one thread submits a plan, others are refused with a LifetimeError; both can go on afterwards."""
    if bench.worker:
        inapplicable("submitting only queues")
    queue = bench.open()
    task = bench.task(queue)
    values = bench.feed(task)
    inside, go = Flag(), Flag()

    def around(index: int, call: Call) -> Call:
        def held() -> Any:
            inside.set()
            go.wait()
            return call()

        return held if index == 0 else call

    threads = beside(lambda: task.plan.run(around))
    try:
        inside.wait()
        uses: dict[str, Callable[[], object]] = {
            "running a plan": task.plan.run,
            "a mark": queue.record,
            "an upload": lambda: queue.upload(task.x, 0, values),
        }
        for what, use in uses.items():
            expect_raises(LifetimeError, f"{what} while another thread submits", use)
    finally:
        go.set()
    joined(threads)
    queue.synchronize()
    task.expect_result(values, "a plan while another thread was refused")
    _expect_right(bench, task, "a plan after two threads wanted to submit")
