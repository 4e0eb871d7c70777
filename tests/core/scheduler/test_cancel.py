"""`Scheduler.cancel` and the ``cancel`` of futures: one meaning on every device, alone and in pairs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_combined
from opweave.contract import Stream
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate
from tests.support.real_devices import COMBINATIONS, combined

F = np.float32
SOON = 0.03
"""Seconds in which nothing happens that must not happen."""
LATE = 60


class Gate:
    """A function for `ow.custom` that waits until it is let go. ``begun`` is set when it is called for the first time,
    ``calls`` counts."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.calls += 1
        self.begun.set()
        assert self.go.wait(LATE)
        return array


class Gated:
    """A program that waits at a gate, and then adds what it is fed to a state of the last device."""

    def __init__(self, devices: list[ow.Device], parallel: bool) -> None:
        host = [d for d in devices if d.kind is ow.Kind.HOST] or [HostDevice()]
        self.scheduler = ow.Scheduler([*devices, *[d for d in host if d not in devices]], parallel=parallel)
        self.gate = Gate()
        self.x, self.total = ow.input("x", (8,)), ow.state("total", (8,))
        first = ow.neg(ow.custom(self.gate, self.x, like=self.x))
        added = ow.assign(self.total, self.total - first)
        self.program = self.scheduler.build([added, ow.exp(first)], pins={first: devices[0], added: devices[-1]})
        ow.write(self.total, np.zeros(8, F))

    def submit(self, count: int) -> list[Any]:
        """So many runs, the first of which has arrived at the gate."""
        futures = [self.program.submit({self.x: np.full(8, i + 1, F)}) for i in range(count)]
        assert self.gate.begun.wait(LATE)
        return futures

    def check_works(self) -> None:
        """Runs work, and find what was written."""
        self.gate.go.set()
        ow.write(self.total, np.full(8, 5, F))
        total, other = self.program.run({self.x: np.ones(8, F)})
        assert (total == 6).all()
        np.testing.assert_allclose(other, np.exp(-np.ones(8)), rtol=1e-5)
        assert (self.program.submit({self.x: np.ones(8, F)}).result(LATE)[0] == 7).all()
        assert (self.program.read(self.total) == 7).all()


@pytest.fixture(params=[False, True], ids=["in turn", "parallel"])
def parallel(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextmanager
def gated(names: str, parallel: bool) -> Iterator[Gated]:
    with combined(names) as devices:
        made = Gated(devices, parallel)
        with made.scheduler:
            try:
                yield made
            finally:
                made.gate.go.set()


@pytest.mark.parametrize("names", COMBINATIONS)
def test_runs_that_have_begun_and_that_wait_are_cancelled_at_once(names: str, parallel: bool) -> None:
    with gated(names, parallel) as case:
        futures = case.submit(4)
        case.scheduler.cancel()
        for future in futures:  # while the gate is closed
            assert future.done()
            with pytest.raises(ow.Cancelled, match=r"cancel\(\)"):
                future.result(0)
            assert isinstance(future.exception(0), ow.Cancelled)
        with pytest.raises(ow.ExecutionError, match=r"half written.*cancel\(\)"):
            ow.read(case.total)
        written = threading.Event()

        def write() -> None:
            ow.write(case.total, np.full(8, 3, F))
            written.set()

        thread = threading.Thread(target=write)
        thread.start()
        assert not written.wait(SOON), "what goes on may still write the state"
        case.gate.go.set()
        assert written.wait(LATE)
        thread.join()
        assert (ow.read(case.total) == 3).all()
        assert case.gate.calls <= (4 if parallel else 1)
        case.check_works()
        case.scheduler.cancel()  # without runs it does nothing
        case.check_works()


@pytest.mark.parametrize("names", COMBINATIONS)
def test_runs_that_are_submitted_afterwards_wait_and_are_not_cancelled(names: str, parallel: bool) -> None:
    with gated(names, parallel) as case:
        old = case.submit(2)
        case.scheduler.cancel()
        untouched = ow.input("y", (4,))
        later: list[Any] = []
        other = case.scheduler.build(ow.neg(untouched)) if parallel else None
        thread = threading.Thread(
            target=lambda: later.append((other or case.scheduler.build(ow.neg(untouched))).submit({untouched: [1] * 4}))
        )
        thread.start()
        thread.join(SOON)
        assert not any(future.done() for future in later)
        case.gate.go.set()
        thread.join(LATE)
        assert later[0].result(LATE).tolist() == [-1] * 4
        assert all(isinstance(future.exception(0), ow.Cancelled) for future in old)
        case.check_works()


@pytest.mark.parametrize("names", ["cpu", "opencl", "torch", "ort", "remote", "cpu + cpu 2"])
def test_threads_that_run_a_program_are_cancelled_too(names: str, parallel: bool) -> None:
    with gated(names, parallel) as case:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                case.program.run({case.x: np.ones(8, F)})
            except ow.OpweaveError as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert case.gate.begun.wait(LATE)
        threads[0].join(SOON)  # the others wait for the first, or are queued behind it
        case.scheduler.cancel()
        case.gate.go.set()
        for thread in threads:
            thread.join(LATE)
        assert [type(error) for error in errors] == [ow.Cancelled] * 3
        with pytest.raises(ow.ExecutionError, match="half written"):
            ow.read(case.total)
        case.check_works()


@pytest.mark.parametrize("names", COMBINATIONS)
def test_a_future_cancels_its_own_run_alone(names: str, parallel: bool) -> None:
    with gated(names, parallel) as case:
        futures = case.submit(4 if not parallel else 3)
        called: list[Any] = []
        futures[0].add_done_callback(called.append)
        for future in (futures[0], futures[2]):
            assert future.cancel()
            assert future.cancel()
            assert future.cancelled()
            assert future.done()
            for kind in (ow.Cancelled, concurrent.futures.CancelledError):
                with pytest.raises(kind, match=r"cancel\(\)"):
                    future.result(0)
        assert called == [futures[0]]
        if not parallel:
            with pytest.raises(ow.ExecutionError, match="half written"):
                ow.read(case.total)
        case.gate.go.set()
        if parallel:  # all of them are in the queues of the devices, and go on
            assert (futures[1].result(LATE)[0] == 3).all()
        else:
            with pytest.raises(ow.ExecutionError, match="half written"):
                futures[1].result(LATE)
            assert case.gate.calls == 1, "a run that has not begun never does"
        case.scheduler.synchronize()
        assert not futures[1].cancel(), "it has ended"
        case.check_works()
        waited = concurrent.futures.wait(futures, LATE)
        assert waited.done == set(futures)


def test_the_only_run_that_overlaps_is_ended_by_its_future() -> None:
    with gated("cpu", True) as case:
        (future,) = case.submit(1)
        assert future.cancel()
        with pytest.raises(ow.ExecutionError, match="half written"):
            ow.read(case.total)
        case.gate.go.set()
        case.scheduler.synchronize()
        case.check_works()


def test_who_stops_waiting_in_asyncio_cancels_the_run(parallel: bool) -> None:
    with gated("cpu + cpu 2", parallel) as case:

        async def impatient() -> Any:
            future = case.program.submit({case.x: np.ones(8, F)})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(future), SOON)
            return future

        assert asyncio.run(impatient()).cancelled()
        case.check_works()


def test_what_awaits_a_run_is_not_taken_for_cancelled_itself(parallel: bool) -> None:
    with gated("cpu + cpu 2", parallel) as case:

        async def waiting() -> None:
            future = case.program.submit({case.x: np.ones(8, F)})
            asyncio.get_running_loop().call_later(SOON, case.scheduler.cancel)
            with pytest.raises(ow.Cancelled):
                await asyncio.wrap_future(future)

        asyncio.run(waiting())
        case.check_works()


def test_what_an_opencl_driver_has_accepted_goes_on_but_nobody_gets_its_results(parallel: bool) -> None:
    cl = pytest.importorskip("pyopencl")
    for names in ("opencl", "opencl 2"):
        with combined(names) as devices, ow.Scheduler(devices, parallel=parallel) as scheduler:
            x, total = ow.input("x", (8,)), ow.state("total", (8,))
            program = scheduler.build(ow.assign(total, total + x))
            program.run({x: np.ones(8, F)})
            stream: Any = scheduler.streams[0]
            queue = getattr(stream, "inner", stream).queue
            held = cl.UserEvent(queue.context)
            cl.enqueue_barrier(queue, wait_for=[held])
            futures = [program.submit({x: np.ones(8, F)}) for _ in range(2)]
            scheduler.cancel()
            try:
                for future in futures:
                    with pytest.raises(ow.Cancelled):
                        future.result(0)
            finally:
                held.set_status(cl.command_execution_status.COMPLETE)
            ow.write(total, np.zeros(8, F))
            assert (program.run({x: np.ones(8, F)}) == 1).all()
            assert f"cancelling on {devices[0].name}: what was queued goes on" in str(program.explain())


@pytest.mark.parametrize("names", ["cpu", "torch", "ort", "host", "cpu + cpu 2"])
def test_a_long_run_is_ended_in_the_middle(names: str, parallel: bool) -> None:
    with combined(names) as devices, ow.Scheduler(devices, parallel=parallel) as scheduler:
        x, last = ow.input("x", (96, 96)), ow.state("last", (96, 96))
        h = x
        for _ in range(1500):
            h = ow.tanh(ow.matmul(h, x))
        program = scheduler.build(ow.assign(last, h + 1))
        ow.write(last, np.full((96, 96), 7, F))
        future = program.submit({x: np.eye(96, dtype=F)})
        while not future.running():
            assert not future.done()
        scheduler.cancel()
        scheduler.synchronize()
        assert last.leaf is not None
        assert last.leaf.placement is not None
        kept = last.leaf.placement.buffer.read().view(F)
        assert (kept[: 96 * 96] == 7).all(), "the last of 3,000 steps was not computed"
        assert ("cancelling on" in str(program.explain())) is (names == "torch"), "which has a queue of its own here"


class GatedStream(Stream):
    """Every plan waits at its beginning until it is let go."""

    def _run(self, calls: Iterator[Any]) -> None:
        device: Any = self.device
        device.begun.set()
        assert device.go.wait(LATE)
        super()._run(calls)


class GatedDevice(Separate):
    stream_class = GatedStream

    def __init__(self) -> None:
        super().__init__("gated")
        self.begun, self.go = threading.Event(), threading.Event()


def test_a_server_ends_what_it_computes(parallel: bool) -> None:
    from tests.support.remote import beside

    served = GatedDevice()
    with beside([served]) as (_, connection), ow.Scheduler(connection.devices, parallel=parallel) as scheduler:
        x, total = ow.input("x", (8,)), ow.state("total", (8,))
        program = scheduler.build(ow.assign(total, ow.exp(x)))
        ow.write(total, np.full(8, 7, F))
        future = program.submit({x: np.zeros(8, F)})
        assert served.begun.wait(LATE)
        scheduler.cancel()
        with pytest.raises(ow.Cancelled):
            future.result(0)
        # The message to the server goes ahead of this answer, on the same connection.
        connection.devices[0].mem_info()
        served.go.set()
        scheduler.synchronize()
        assert total.leaf is not None
        assert total.leaf.placement is not None
        assert (total.leaf.placement.buffer.read().view(F)[:8] == 7).all(), "no step was computed"
        ow.write(total, np.zeros(8, F))
        assert (program.run({x: np.zeros(8, F)}) == 1).all()


def test_work_that_was_ended_on_purpose_is_no_failure_of_its_device() -> None:
    device = GatedDevice()
    x = ow.input("x", (8,))
    with ow.Scheduler(device, parallel=True) as scheduler:
        state = ow.state("beside", (8,))
        scheduler.build(ow.assign(state, ow.exp(state)), pins={state: device})  # which gives it memory there
        program = scheduler.build(ow.exp(x))
        futures = [program.submit({x: np.zeros(8, F)}) for _ in range(2)]
        assert device.begun.wait(LATE)
        device.go.set()
        scheduler.cancel()
        device.synchronize()
        ow.write(state, np.ones(8, F))
        assert (ow.read(state) == 1).all()
        assert all(isinstance(future.exception(LATE), ow.Cancelled) for future in futures)


def test_a_combination_ends_the_program_of_its_members() -> None:
    with combined("cpu + cpu 2") as devices:
        both = opweave_combined.combine(devices)
        with ow.Scheduler(both) as scheduler:
            x = ow.input("x", (96, 96))
            h = x
            for _ in range(300):
                h = ow.tanh(ow.matmul(h, x))
            program = scheduler.build(h)
            stream: Any = scheduler.streams[0]
            program.run({x: np.eye(96, dtype=F)})
            future = program.submit({x: np.eye(96, dtype=F)})
            while not stream.members.runner:
                assert not future.done()
            ended = stream.members.scheduler.stats.runs
            scheduler.cancel()
            scheduler.synchronize()
            assert stream.members.scheduler.stats.runs == ended
            assert isinstance(future.exception(0), ow.Cancelled)
            np.testing.assert_allclose(program.run({x: np.eye(96, dtype=F)}), _tanhs(300), rtol=1e-4, atol=1e-6)


def _tanhs(count: int) -> np.ndarray[Any, Any]:
    h = np.eye(96)
    for _ in range(count):
        h = np.tanh(h)
    return h
