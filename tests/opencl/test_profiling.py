"""Kernel times: while tracing is on, one trace event for each kernel, in the host's clock."""

from __future__ import annotations

from time import perf_counter_ns, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

import opweave as ow
import opweave_cost
from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave.tracing import TRACE, TraceEvent
from opweave_opencl.clock import DeviceClock

N = 1 << 20
SLACK = 1_000_000  # ns by which the clocks may differ


def vector(buffer, n=N):
    return Arg(buffer, 0, as_dtype("f32"), (n,), (4,))


@pytest.fixture
def steps(device):
    a, b = vector(device.alloc(4 * N)), vector(device.alloc(4 * N))
    a.buffer.clear()
    return [Step("add", b, (a, a), {}), Step("exp", a, (b,), {}), Step("neg", b, (a,), {})]


def kernels(heard):
    return [h for h in heard if h.kind == "kernel"]


def test_each_kernel_emits_an_event_with_its_name_and_times(device, steps):
    heard: list[TraceEvent] = []
    with device.open(profiling=True) as stream:
        plan = stream.compile(steps)
        plan.run()  # tracing is off
        stream.synchronize()
        with TRACE.listen(heard.append):
            before = perf_counter_ns()
            plan.run()
            stream.synchronize()
            after = perf_counter_ns()
    events = kernels(heard)
    assert [h.name for h in events] == ["add", "exp", "neg"]
    assert all(h.data["device"] == device.name and h.data["kernel"] for h in events)
    assert before - SLACK <= events[0].start < events[0].end <= events[1].start < events[1].end <= events[2].start
    assert events[2].start < events[2].end <= after + SLACK


def test_streams_that_are_opened_during_tracing_trace_their_kernels(device, steps):
    heard: list[TraceEvent] = []
    with TRACE.listen(heard.append), device.open() as stream:
        stream.compile(steps).run()
        stream.synchronize()
    assert [h.name for h in kernels(heard)] == ["add", "exp", "neg"]


def test_a_kernel_of_several_steps_is_named_after_all(device, steps):
    heard: list[TraceEvent] = []
    with TRACE.listen(heard.append), device.open(profiling=True) as stream:
        stream.compile(stream.fuse(steps)).run()
        stream.synchronize()
    assert " ".join(h.name for h in kernels(heard)) == "add exp neg"


def test_other_streams_do_not_pay_for_it(device, stream, steps):
    heard: list[TraceEvent] = []
    with TRACE.listen(heard.append):
        stream.run(steps)
        stream.synchronize()
    assert not kernels(heard)
    assert not int(stream.queue.properties)


def test_what_ran_without_tracing_is_not_emitted_later(device, steps):
    heard: list[TraceEvent] = []
    with device.open(profiling=True) as stream:
        plan = stream.compile(steps)
        with TRACE.listen(heard.append):
            plan.run()
        stream.synchronize()
        with TRACE.listen(heard.append):
            stream.synchronize()
    assert not kernels(heard)


def test_a_program_emits_events_step_by_step(device):
    heard: list[TraceEvent] = []
    x = ow.input("x", (64, 64))
    with device.open(profiling=True) as stream, ow.Scheduler([stream, "host"]) as scheduler:
        program = scheduler.build(ow.softmax(x) @ x)
        with TRACE.listen(heard.append):
            program.run(x=np.ones((64, 64), np.float32))
    assert {"softmax", "matmul"} <= {h.name for h in kernels(heard)}


class Clocks:
    """A device whose clock runs at another rate and from another origin than the host's, with a timer or without."""

    def __init__(self, rate: float, origin: int, timer: str) -> None:
        self.rate, self.origin, self.timer = rate, origin, timer

    def now(self) -> int:
        return round(perf_counter_ns() * self.rate) + self.origin

    def device_and_host_timer(self):
        if self.timer == "none":
            raise cl.LogicError("clGetDeviceAndHostTimer failed: INVALID_OPERATION")
        return (self.now() if self.timer == "same" else 5), 7

    def marker(self, queue):
        # Drivers report when markers ended, and not always when they were queued.
        return SimpleNamespace(wait=lambda: None, profile=SimpleNamespace(queued=0, end=self.now()))


@pytest.mark.parametrize("timer", ["same", "another", "none"])
@pytest.mark.parametrize(("rate", "origin"), [(1.0, 0), (2.5, -(10**12)), (0.04, 10**15)])
def test_another_rate_and_origin(monkeypatch, timer, rate, origin):
    clocks: Any = Clocks(rate, origin, timer)
    monkeypatch.setattr(cl, "CommandQueue", lambda *args: None)
    monkeypatch.setattr(cl, "enqueue_marker", clocks.marker)
    clock = DeviceClock(clocks, clocks)
    readings = []
    for _ in range(5):
        readings.append((perf_counter_ns(), clocks.now()))
        sleep(0.01)
    scale = clock.scale()
    for host, device in readings:
        assert abs(scale(device) - host) < SLACK


def test_a_reading_does_not_wait_for_queued_work(device, steps):
    with device.open(profiling=True) as stream:
        gate = cl.UserEvent(device.context)
        cl.enqueue_barrier(stream.queue, wait_for=[gate])
        stream.queue.flush()
        stream._profiler._clock.scale()
        gate.set_status(cl.command_execution_status.COMPLETE)


def test_profile_run_tells_kernel_times_of_a_program_that_was_made_without(device):
    x = ow.input("x", (256, 256))
    heard: list[TraceEvent] = []
    with device.open(profiling=False) as stream, ow.Scheduler([stream]) as scheduler:
        program = scheduler.build(ow.softmax(x) @ x)
        with TRACE.listen(heard.append):
            profile = opweave_cost.profile_run(program, x=np.ones((256, 256), np.float32), runs=1, limits=False)
        assert not int(stream.queue.properties)
    rows = [row for row in profile.rows if row.kind == "step"]
    assert [row.ops for row in rows] == [("softmax",), ("matmul",)]
    for row in rows:
        times = [(h.end - h.start) / 1e9 for h in kernels(heard) if h.name == row.ops[0]]
        assert row.seconds in [sum(times[len(times) // 2 :]), times[-1]], "of the second run of two"
