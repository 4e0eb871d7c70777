"""Level 5, second part: out of memory, programs that fail in the middle, and leaks."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave import ops
from opweave.contract import Call, Plan, Stream
from opweave.errors import AllocationError, ExecutionError, chain_of
from opweave.graph.tensor import Tensor
from opweave.graph.tensor import input as leaf
from opweave.leaf_memory import read_leaf
from opweave.leaves import state
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.memory import host_memory_info
from opweave.scheduler import Scheduler
from opweave_conformance.bench import Bench
from opweave_conformance.checklist import Checklist, Mismatch, Subject, expect, expect_raises, inapplicable
from opweave_conformance.levels.faults import Planted
from opweave_conformance.trial import step_of

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.scheduler import Program

__all__ = ["CHECKS"]

fault = Checklist(5, "fault")
CHECKS = fault.checks

ABSURD: Final = 1 << 57
"""Elements of a tensor that no device holds."""

CYCLES: Final = 12
ELEMENTS: Final = 1 << 20
"""Elements of the tensors that a cycle allocates and frees."""

F32: Final = np.float32


@contextmanager
def _failing(stream: Stream, nth: int = 0) -> Iterator[None]:
    """A ``with`` block in which the ``nth`` plan that is run on ``stream`` fails: its last call raises."""
    count = 0

    def launch(plan: Plan, calls: list[Call]) -> None:
        nonlocal count
        number, count = count, count + 1
        right(plan, [*calls[:-1], fail] if number == nth else calls)

    def fail() -> None:
        raise Planted("planted")

    right = stream.make_calls
    stream.make_calls = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stream.make_calls


def _works_here(program: Program, device: Device) -> None:
    if not any(split.target.device is device and split.steps for split in program.splits):
        inapplicable("it runs none of add, neg and assign")


def _expect_planted(error: BaseException, what: str) -> None:
    expect(any(isinstance(e, Planted) for e in chain_of(error)), f"{what} fails for another reason: {error}")


def _expect_equal(got: Any, want: Any, what: str) -> None:
    expect(np.array_equal(got, want), f"{what}: it gives {np.ravel(got)[:4]}..., not {np.ravel(want)[:4]}...")


# --- no memory ------------------------------------------------------------------------------------------------------


@fault("allocation")
def _(subject: Subject) -> None:
    """Allocations larger than the device's memory raise AllocationError; queued work goes on."""
    with Bench(subject) as bench:
        queue, task = bench.with_long_task()
        values = bench.start(task)
        size = 4 * ABSURD
        error = expect_raises(AllocationError, f"allocating {size:,} bytes", lambda: bench.alloc(size))
        expect(error.requested == size, f"the error says that {error.requested:,} bytes were asked for")
        queue.synchronize()
        task.expect_result(values, "a plan during which an allocation failed")
        bench.alloc(1000).fill(1)
        bench.expect_right(task, "a plan after an allocation failed")


@fault("allocation-state")
def _(subject: Subject) -> None:
    """A state larger than the device's memory raises AllocationError; a small one can be made afterwards."""
    device = subject.device
    expect_raises(AllocationError, "a state beyond all memory", lambda: state("big", (ABSURD,), device=device))
    small = state("small", (5,), device=device, fill=2)
    _expect_equal(read_leaf(small), np.full(5, 2, F32), "a state after one had no room")


@fault("allocation-program")
def _(subject: Subject) -> None:
    """Building a program larger than the device's memory raises AllocationError; its scheduler remains usable."""
    build = _unary(subject.device)
    with Scheduler(subject.device) as scheduler:
        big = build(leaf("x", (ABSURD,)))
        expect_raises(AllocationError, "building a program beyond all memory", lambda: scheduler.build(big))
        values = np.arange(6, dtype=F32)
        x = leaf("x", (6,))
        got = scheduler.build(build(x)).run(x=values)
        with Scheduler(HostDevice()) as host:
            _expect_equal(got, host.build(build(x)).run(x=values), "a program after one had no room")


def _unary(device: Device) -> Callable[[Tensor], Tensor]:
    """An operation of one operand that the device runs."""
    for build in (ops.neg, ops.relu, lambda x: ops.add(x, x), lambda x: ops.mul(x, x), ops.copy, ops.exp):
        if device.why_not(step_of(build(leaf("x", (6,))))) is None:
            return build
    inapplicable("it runs none of neg, relu, add, mul, copy and exp on f32")


# --- programs -------------------------------------------------------------------------------------------------------


@fault("program")
def _(subject: Subject) -> None:
    """A failed run names the device and the half-written states; reading these raises until they are written again."""
    device, values = subject.device, np.arange(8, dtype=F32)
    total, x = state("total", (8,), device=device), leaf("x", (8,))
    new = ops.assign(total, total + x)
    with Bench(subject) as bench:
        queue = bench.open()
        with Scheduler([queue, HostDevice()]) as scheduler:
            program, other = scheduler.build(new), scheduler.build(ops.neg(x))
            _works_here(program, device)
            _expect_equal(program.run(x=values), values, "a run")
            with _failing(queue):
                error = expect_raises(ExecutionError, "a run in which a call fails", lambda: program.run(x=values))
            _expect_planted(error, "a run")
            expect(error.device == device.name, f"the error says it was on {error.device!r}")
            expect(error.node, "the error names no node")
            if program.device_of(new) is device:
                expect(error.states == ("total",), f"half written may be total, the error says {error.states}")
                expect_raises(ExecutionError, "reading a state that may be half written", lambda: read_leaf(total))
                expect_raises(ExecutionError, "running with such a state", lambda: program.run(x=values))
            _expect_equal(other.run(x=values), -values, "another program after a failed run")
            program.write(total, np.ones(8, F32))
            for n in (1, 2):
                _expect_equal(program.run(x=values), 1 + n * values, f"run {n} after the state was written anew")
                _expect_equal(read_leaf(total), 1 + n * values, f"the state after run {n}")


@fault("program-overlapping")
def _(subject: Subject) -> None:
    """The future of a submitted run that fails raises; other runs neither hang nor give wrong results."""
    device = subject.device
    x, y = leaf("x", (64,)), leaf("y", (64,))
    with Scheduler([device, HostDevice()], parallel=2) as scheduler:
        program = scheduler.build(ops.neg(x + y))
        _works_here(program, device)
        fed = [{name: subject.rng.integers(-9, 9, 64).astype(F32) for name in ("x", "y")} for _ in range(8)]
        for nth in (0, 3):
            with _failing(scheduler.streams[0], nth):
                futures = [program.submit(feed) for feed in fed]
                failed = 0
                for i, (future, feed) in enumerate(zip(futures, fed, strict=True)):
                    try:
                        got = future.result()
                    except ExecutionError as error:
                        failed += 1
                        _expect_planted(error, f"submitted run {i}")
                    else:
                        _expect_equal(got, -(feed["x"] + feed["y"]), f"submitted run {i} beside one that failed")
            if not failed:
                raise Mismatch("a call of a submitted run raised, and no future says so")
            for feed in fed[:2]:
                _expect_equal(program.run(feed), -(feed["x"] + feed["y"]), "a run after a submitted one failed")


@fault("custom")
def _(subject: Subject) -> None:
    """A run whose Python function raises fails with that exception as its cause; later runs are correct."""
    healthy = True

    def function(x: Any) -> Any:
        if not healthy:
            raise Planted("planted")
        return x + 1

    x = leaf("x", (8,))
    h = ops.neg(x)
    values = np.arange(8, dtype=F32)
    for parallel in (False, True):
        with Scheduler([subject.device, HostDevice()], parallel=parallel) as scheduler:
            run = partial(scheduler.build(ops.neg(ops.custom(function, h, like=h))).run, x=values)
            for healthy in (True, False, True, False, True):
                if healthy:
                    _expect_equal(run(), values - 1, "a run with a Python function in it")
                else:
                    _expect_planted(expect_raises(ExecutionError, "a function that raises", run), "a run")


# --- leaks ----------------------------------------------------------------------------------------------------------


TASKS: Final = Path("/proc/self/task")
"""A folder for each thread of the process, those of drivers too, on Linux."""

PATIENCE: Final = 2.0
"""Seconds in which a thread ends at last, once it was told to."""


def _cycle(subject: Subject) -> None:
    """Make and release buffers, streams, threads and programs, with and without failures."""
    device = subject.device
    for worker in (False, True):
        with Bench(subject, worker=worker) as bench:
            queue, task = bench.with_task()
            bench.alloc(ELEMENTS)
            bench.start(task)
            queue.synchronize()
            with _failing(queue):
                try:
                    task.plan.run()
                    queue.synchronize()
                except ExecutionError:
                    queue.recover()
    x = leaf("x", (ELEMENTS,))
    for parallel in (False, True):
        with Scheduler([device, HostDevice()], parallel=parallel) as scheduler:
            program = scheduler.build(ops.neg(x + x))
            program.run(x=np.ones(ELEMENTS, F32))
            with _failing(scheduler.streams[0]):
                try:
                    program.run(x=np.ones(ELEMENTS, F32))
                except ExecutionError:
                    continue


@fault("leaks-objects")
def _(subject: Subject) -> None:
    """No buffers, streams or threads, those of drivers too, remain after everything was closed, also after failures."""

    def held() -> dict[str, int]:
        gc.collect()
        device = subject.device
        return {
            "buffers": sum(not buffer.freed for buffer in device.live_buffers),
            "streams": sum(not stream.closed for stream in device.live_streams),
            "threads": threading.active_count(),
            "threads of the driver": len(list(TASKS.iterdir())) if TASKS.is_dir() else 0,
        }

    _cycle(subject)  # a driver may keep what it makes at the first use
    before = held()
    for _ in range(2):
        _cycle(subject)
    after, deadline = held(), time.monotonic() + PATIENCE
    while any(count > before[what] for what, count in after.items()) and time.monotonic() < deadline:
        time.sleep(0.01)
        after = held()
    for what, count in after.items():
        left = count - before[what]
        expect(left <= 0, f"{left} {what} are left after everything was closed twice")


@fault("leaks-memory")
def _(subject: Subject) -> None:
    """The device's free memory is as before after everything was closed, also after failures."""
    device = subject.device
    free, total = device.mem_info()
    if not total:
        inapplicable("it does not know its memory")
    if total == host_memory_info()[1]:
        inapplicable("its memory is the machine's, which others use too")
    _cycle(subject)
    gc.collect()
    before, _ = device.mem_info()
    for _ in range(CYCLES):
        _cycle(subject)
    gc.collect()
    free, _ = device.mem_info()
    if free >= host_memory_info()[0] > 0:
        inapplicable("no more of its memory is free than of the machine's, which others use too")
    lost = before - free
    expect(lost < CYCLES * ELEMENTS // 2, f"{lost:,} bytes are missing after allocating and freeing {CYCLES} times")
