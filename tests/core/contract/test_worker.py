"""`WorkerStream`: any device's work on a thread of its own, in order, beside the caller."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Step, StepError, Stream, WorkerStream
from opweave.runtime.host.device import HostDevice
from tests.support.async_device import AsyncDevice, Boom, kernels, vector
from tests.support.devices import Separate


class Gate(Separate):
    """Kernels that wait until they are let go."""

    def __init__(self) -> None:
        super().__init__("gate")
        self.go = threading.Event()
        self.begun = threading.Event()

    def _open(self, **params):
        return Held(self)


class Held(Stream):
    def _run(self, calls):
        self.device.begun.set()
        assert self.device.go.wait(10)
        super()._run(calls)


def filled(device, *values):
    buffers = [device.alloc(64) for _ in values]
    for buffer, value in zip(buffers, values, strict=True):
        buffer.upload(0, np.full(16, value, np.float32))
    return buffers


def add(out, a, b):
    return Step("add", vector(out), (vector(a), vector(b)), {})


def read(buffer):
    out = np.empty(16, np.float32)
    buffer.download(0, out)
    return out


def test_submitting_returns_at_once_and_synchronize_waits():
    device = Gate()
    a, b, out = filled(device, 1, 2, 0)
    with device.open(worker=True) as stream:
        assert isinstance(stream, WorkerStream)
        assert stream.is_async
        stream.compile([add(out, a, b)]).run()
        mark = stream.record()
        assert device.begun.wait(10)
        assert not mark.done
        device.go.set()
        stream.synchronize()
        assert mark.done
    assert read(out)[0] == 3


def test_a_name_with_a_parameter_opens_one():
    with ow.open_device("host?worker=1") as stream:
        assert isinstance(stream, WorkerStream)
    with ow.open_device("host?worker=0") as stream:
        assert not isinstance(stream, WorkerStream)


def test_transfers_happen_in_the_order_of_the_stream():
    device = Gate()
    a, b, out = filled(device, 1, 2, 0)
    with device.open(worker=True) as stream:
        plan = stream.compile([add(out, a, b)])
        seen = np.empty(16, np.float32)
        plan.run()
        stream.upload(a, 0, np.full(16, 5, np.float32))
        plan.run()
        stream.download(out, 0, seen)
        device.go.set()
        stream.synchronize()
    assert seen[0] == 7


@pytest.mark.parametrize("other", [HostDevice, AsyncDevice])
def test_it_waits_for_events_of_streams_of_any_class(other):
    first, second = Gate(), other()
    second.kernels = getattr(second, "kernels", kernels)
    a, b, out = filled(first, 1, 2, 0)
    with first.open(worker=True) as ahead, second.open(worker=True) as behind:
        order = []
        ahead.compile([add(out, a, b)]).run()
        ahead.call(lambda: order.append("ahead"))
        behind.wait(ahead.record())
        behind.call(lambda: order.append("behind"))
        time.sleep(0.02)
        assert order == []
        first.go.set()
        behind.synchronize()
    assert order == ["ahead", "behind"]


def test_a_failure_names_the_step_drops_what_follows_and_is_raised_once():
    device = AsyncDevice()
    a, b, out = filled(device, 1, 2, 0)
    fails = Step("tanh", vector(out), (vector(a),), {})
    with device.open(worker=True) as stream:
        plan = stream.compile([add(out, a, b), fails])
        plan.run()
        ran = []
        stream.call(lambda: ran.append(1))
        late = stream.record()
        with pytest.raises(ow.ExecutionError) as caught:
            stream.synchronize()
        chain = []
        error: BaseException | None = caught.value
        while error is not None:
            chain.append(error)
            error = error.__cause__
        step = next(e for e in chain if isinstance(e, StepError))
        assert step.step == 1
        assert step.plan is plan
        assert isinstance(chain[-1], Boom)
        assert ran == [], "work behind a failure is dropped"
        with pytest.raises(ow.ExecutionError):
            late.synchronize()
        stream.recover()
        stream.synchronize()
        stream.call(lambda: ran.append(2))
        stream.synchronize()
        assert ran == [2]


def test_waiting_for_an_event_of_a_failed_stream_fails_and_never_hangs():
    device, other = AsyncDevice(), HostDevice()
    (a,) = filled(device, 1)
    with device.open(worker=True) as ahead, other.open(worker=True) as behind:
        gate = threading.Event()
        ahead.call(lambda: gate.wait(10))
        ahead.compile([Step("tanh", vector(a), (vector(a),), {})]).run()
        behind.wait(ahead.record())
        ran = []
        behind.call(lambda: ran.append(1))
        gate.set()
        with pytest.raises(ow.ExecutionError, match="at once"):
            behind.synchronize()
        assert ran == []
        with pytest.raises(ow.ExecutionError):
            ahead.synchronize()


def test_aborting_ends_what_is_queued_and_the_running_plan_after_its_step():
    device = Gate()
    a, b, out = filled(device, 1, 2, 0)
    with device.open(worker=True) as stream:
        stream.abort()  # without work in flight it does nothing
        stream.synchronize()
        stream.compile([add(out, a, b)] * 3).run()
        ran = []
        stream.call(lambda: ran.append(1))
        assert device.begun.wait(10)
        stream.abort()
        device.go.set()
        with pytest.raises(ow.ExecutionError) as caught:
            stream.synchronize()
        assert isinstance(caught.value.__cause__, ow.Cancelled)
        assert ran == []


def test_a_worker_over_a_worker_is_refused():
    with HostDevice().open(worker=True) as stream, pytest.raises(ow.LifetimeError, match="already has a thread"):
        WorkerStream(stream)


def test_a_dropped_stream_works_off_what_it_took_and_ends_its_thread():
    device = Gate()
    a, b, out = filled(device, 1, 2, 0)
    stream = device.open(worker=True)
    ended = stream.worker.ended
    device.go.set()
    stream.compile([add(out, a, b)]).run()
    del stream
    assert ended.wait(10)
    assert read(out)[0] == 3


def test_memory_that_is_collected_on_a_worker_is_freed_without_waiting_for_others():
    device = Gate()
    with device.open(worker=True) as stream, HostDevice().open(worker=True) as other:
        (a,) = filled(device, 1)
        alive = [a]
        b, out = filled(device, 2, 0)
        stream.compile([add(out, b, b)]).run()  # blocked: nothing on the worker may wait for it
        freed = threading.Event()
        del a
        other.call(alive.clear)
        other.call(freed.set)
        assert freed.wait(10)
        device.go.set()


FORGOTTEN = """
import numpy as np, opweave as ow

def main():
    scheduler = ow.Scheduler("host", parallel=True)
    x = ow.input("x", (4,))
    program = scheduler.build(ow.exp(x))
    program.run(x=np.zeros(4, "f4"))
    program.submit(x=np.zeros(4, "f4"))
    raise ValueError("nobody closes the scheduler, and this keeps it")

main()
"""


def test_a_process_ends_whoever_still_holds_a_stream():
    ended = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: nobody closes the scheduler, and this keeps it\n")


def test_a_stream_in_a_cycle_that_nobody_closed_is_collected():
    # Weak references to the worker are called before the finalizer of the stream: its thread has ended by then.
    class Cycle:
        pass

    for _ in range(4):
        cycle = Cycle()
        cycle.me, cycle.stream = cycle, HostDevice().open(worker=True)
        cycle.stream.call(int)
        del cycle
        gc.collect()


def test_a_failure_that_arrives_while_a_stream_begins_to_wait_is_told_once(monkeypatch):
    gate, go = threading.Event(), threading.Event()

    def fail():
        go.wait(10)
        raise Boom("late")

    failing, waiting = HostDevice().open(worker=True), HostDevice().open(worker=True)
    failing.call(fail)
    event = failing.record()
    queue = waiting.call

    def queue_and_let_fail(work):
        queue(work)
        go.set()
        with pytest.raises(ow.ExecutionError):
            event.synchronize()
        gate.set()

    monkeypatch.setattr(waiting, "call", queue_and_let_fail)
    waiting.wait(event)
    assert gate.is_set()
    with pytest.raises(ow.ExecutionError, match="late"):
        waiting.synchronize()
    waiting.recover()
    waiting.synchronize()
    failing.recover()
    for stream in (failing, waiting):
        stream.close()
