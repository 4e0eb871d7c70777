"""Level 5, first part: whatever waits for a failed stream raises its failure; `recover` makes it usable again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Event as Flag
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from opweave.contract import Call, Event, Stream, WorkerStream
from opweave.errors import BoundsError, ExecutionError, LayoutError, LifetimeError, chain_of
from opweave_conformance.bench import Bench, StreamChecklist, join_threads, start_threads
from opweave_conformance.checklist import Mismatch, expect, expect_raises, inapplicable
from opweave_conformance.workload import Workload

__all__ = ["CHECKS", "Planted"]

Uses = dict[str, Callable[[], object]]

stream = StreamChecklist(5, "fault")
CHECKS = stream.checks


DRIVER_ROUNDS: Final = 25
"""How often work of the driver fails: which of several threads is told of it depends on timing."""


class Planted(Exception):
    """The exception that checks raise in place of a call."""


def _number_of_calls(task: Workload) -> int:
    """How many calls the plan has; a stream may compile several steps into one."""
    seen: list[int] = []

    def around(index: int, call: Call) -> Call:
        seen.append(index)
        return call

    task.plan.run(around)
    task.stream.synchronize()
    return len(seen)


def _raising(at: int) -> Callable[[int, Call], Call]:
    """A wrapper for `Plan.run` that replaces one call by one that raises."""

    def fail() -> None:
        raise Planted(f"planted in call {at}")

    return lambda index, call: fail if index == at else call


def _break(task: Workload, at: int) -> ExecutionError | None:
    """Run the plan with call ``at`` raising; the error, if `run` raises it at once."""
    try:
        task.plan.run(_raising(at))
    except ExecutionError as error:
        return error
    return None


def _failure(queue: Stream, error: ExecutionError | None) -> ExecutionError:
    """The error that was raised at once, or that waiting for the stream raises."""
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


def _expect_refused(uses: Uses, when: str) -> None:
    for what, use in uses.items():
        expect_raises(LifetimeError, f"{what} {when}", use)


@stream("raised")
def _(bench: Bench) -> None:
    """A call that raises in the middle of a plan is reported with its exception and the step's number."""
    from opweave.contract import StepError

    queue, task = bench.with_long_task()
    bench.feed(task)
    count = _number_of_calls(task)
    for at in sorted({0, count // 2, count - 1}):
        error = _failure(queue, _break(task, at))
        steps = [e.step for e in chain_of(error) if isinstance(e, StepError)]
        expect(steps, f"no StepError tells which step it was: {error}")
        if count == len(task.plan):
            expect(steps[-1] == at, f"call {at} raised, the error says step {steps[-1]}")
        queue.recover()
        bench.expect_right(task, f"a plan after its call {at} raised once")


@stream("queued")
def _(bench: Bench) -> None:
    """What a kernel's call raises is reported, also where the stream's own queue makes the call later."""
    made: list[bool] = []

    def fail() -> None:
        made.append(True)
        raise Planted("planted in a kernel")

    queue, sound = bench.with_task()
    try:
        with patch.object(bench.device.kernels, "bind", return_value=fail):
            task = bench.task(queue)
    except Exception as why:
        inapplicable(f"its streams need more of a kernel than that it can be called: {why}")
    error: ExecutionError | None = None
    try:
        task.plan.run()
        queue.synchronize()
    except ExecutionError as raised:
        error = raised
    if not made:
        inapplicable("its streams do not make the calls of its kernels")
    _failure(queue, error)
    queue.recover()
    bench.expect_right(sound, "a plan after a kernel's call raised")


@stream("driver")
def _(bench: Bench) -> None:
    """Work that the driver accepts and fails to do is reported to everybody who waits for it, and then is over."""
    make = bench.subject.failing_call
    if make is None:
        inapplicable("conformance.toml names no failing_call")
    queue, task = bench.with_task()
    fail = make(queue.inner if isinstance(queue, WorkerStream) else queue)
    for _ in range(DRIVER_ROUNDS):
        bench.feed(task)
        error: ExecutionError | None = None
        try:
            task.plan.run(lambda index, call: call if index else fail)
        except ExecutionError as at_once:
            error = at_once
        events = [queue.record() for _ in range(4)]
        told: list[bool] = []

        def wait(event: Event, told: list[bool] = told) -> None:
            try:
                event.synchronize()
            except ExecutionError:
                told.append(True)

        join_threads(start_threads(*[partial(wait, event) for event in events]))
        expect(len(told) == len(events), f"work fails, and {len(told)} of {len(events)} threads that wait are told so")
        try:
            queue.synchronize()
        except ExecutionError as late:
            error = error or late
        expect(error is not None, "queued work fails, and neither run() nor synchronize() says so")
        queue.recover()
        bench.expect_right(task, "a plan after queued work failed")


@stream("remembered")
def _(bench: Bench) -> None:
    """A failed stream raises its failure at each synchronization until it recovers."""
    queue, task = bench.with_task()
    _failure(queue, _break(task, 0))
    for _ in range(2):
        expect(queue.failure is not None, "a stream that failed has no failure")
        expect_raises(ExecutionError, "synchronizing a stream that failed", queue.synchronize)
    queue.settle()
    queue.recover()
    expect(queue.failure is None, f"a stream that recovered still has the failure {queue.failure}")
    queue.synchronize()


@stream("events")
def _(bench: Bench) -> None:
    """Waiting for events behind a failure raises, also after recovering; events before it are not affected."""
    queue, task = bench.with_task()
    bench.start(task)
    before = queue.record()
    before.synchronize()
    error = _break(task, 0)
    behind = [queue.record(), queue.record()]
    for event in behind:
        expect_raises(ExecutionError, "waiting for an event behind a failure", event.synchronize)
        expect(event.done and event.failure is not None, "Event.failure is None for an event behind a failure")
    _failure(queue, error)
    queue.recover()
    after = queue.record()
    after.synchronize()
    expect(after.failure is None, "an event made after recovering is failed")
    before.synchronize()
    expect(before.failure is None, "an event that was reached before a failure is failed")
    for event in behind:
        expect_raises(ExecutionError, "waiting for an event behind a failure, after recovering", event.synchronize)


@stream("waits")
def _(bench: Bench) -> None:
    """Streams that wait for an event of a failed stream fail and do not hang; they too can recover."""
    queue, other, host = bench.open(), bench.open(), bench.open_host()
    task, theirs = bench.task(queue), bench.task(other)
    error = _break(task, 0)
    event = queue.record()
    for waiting in (other, host):

        def wait(waiting: Stream = waiting) -> None:
            waiting.wait(event)
            waiting.synchronize()

        expect_raises(ExecutionError, f"waiting in {waiting!r} for an event behind a failure", wait)
        waiting.recover()
        waiting.synchronize()
    bench.expect_right(theirs, "a stream that had waited for a failed one")
    _failure(queue, error)
    queue.recover()
    bench.expect_right(task, "a stream that others had waited for when it failed")


@stream("recovers")
def _(bench: Bench) -> None:
    """After recovering, plans, uploads, downloads and events are as before, again and again."""
    queue, task = bench.with_task()
    for _ in range(3):
        _failure(queue, _break(task, 0))
        queue.recover()
        expect(queue.failure is None, "a stream that recovered has a failure")
        values, got = task.values(bench.rng), task.empty()
        queue.upload(task.x, 0, values)
        task.plan.run()
        queue.download(task.out, 0, got)
        event = queue.record()
        event.synchronize()
        expect(event.done and event.failure is None, "an event made after recovering is failed")
        task.expect(got, values, "upload, plan and download after recovering")
        queue.synchronize()


@stream("refused")
def _(bench: Bench) -> None:
    """Invalid transfers (ranges, arrays, memory) raise their error at once and do not make the stream fail."""
    queue, task = bench.with_task()
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
    bench.expect_right(task, "a plan after transfers that were refused")


@stream("freed")
def _(bench: Bench) -> None:
    """Transfers, copies and plans with freed memory raise a LifetimeError and do not make the stream fail."""
    queue = bench.open()
    task, other = bench.task(queue), bench.task(queue)
    bench.start(task)
    task.x.free()
    data = np.zeros(8, np.uint8)
    uses: Uses = {
        "running a plan": task.plan.run,
        "a queued upload": lambda: queue.upload(task.x, 0, data),
        "a queued download": lambda: queue.download(task.x, 0, data),
        "a queued copy": lambda: queue.copy_from(task.out, 0, task.x, 0, 8),
        "compiling": lambda: Workload(queue, other.nbytes // other.dtype.itemsize, 1, task.x),
        "reading": task.x.read,
    }
    _expect_refused(uses, "with a freed buffer")
    queue.synchronize()
    bench.expect_right(other, "a plan after uses of freed memory were refused")


@stream("closed")
def _(bench: Bench) -> None:
    """Every use of a closed plan or stream raises a LifetimeError; closing twice does nothing."""
    queue = bench.open()
    task, other = bench.task(queue), bench.task(queue)
    task.plan.close()
    task.plan.close()
    expect_raises(LifetimeError, "running a closed plan", task.plan.run)
    bench.expect_right(other, "a plan after another one was closed")
    event = queue.record()
    queue.close()
    queue.close()
    data = np.zeros(8, np.uint8)
    uses: Uses = {
        "running a plan": other.plan.run,
        "an event": queue.record,
        "waiting for an event": lambda: queue.wait(event),
        "an upload": lambda: queue.upload(other.x, 0, data),
        "a download": lambda: queue.download(other.x, 0, data),
        "a copy": lambda: queue.copy_from(other.x, 0, other.out, 0, 8),
        "compiling": lambda: queue.compile([]),
    }
    _expect_refused(uses, "on a closed stream")


@stream("second-thread")
def _(bench: Bench) -> None:
    """While one thread submits a plan, submitting from another one raises LifetimeError; both can go on afterwards."""
    if bench.worker:
        inapplicable("submitting only queues")
    queue, task = bench.with_task()
    values = bench.feed(task)
    inside, go = Flag(), Flag()

    def around(index: int, call: Call) -> Call:
        def held() -> Any:
            inside.set()
            go.wait()
            return call()

        return held if index == 0 else call

    threads = start_threads(lambda: task.plan.run(around))
    try:
        inside.wait()
        uses: Uses = {
            "running a plan": task.plan.run,
            "an event": queue.record,
            "an upload": lambda: queue.upload(task.x, 0, values),
        }
        _expect_refused(uses, "while another thread submits")
    finally:
        go.set()
    join_threads(threads)
    queue.synchronize()
    task.expect_result(values, "a plan while another thread was refused")
    bench.expect_right(task, "a plan after two threads wanted to submit")
