"""Runs beside the caller: futures, overlapping, fed arrays, failures, cancelling, too little memory."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Stream
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate

F = np.float32


class Gated(Stream):
    """Every plan waits until it is let go; its beginning and end are noted."""

    def _run(self, calls: Any) -> None:
        device: Any = self.device
        device.log.append((device.name, "begin"))
        device.begun.set()
        assert device.go.wait(10)
        super()._run(calls)
        device.log.append((device.name, "end"))


class Gate(Separate):
    stream_class = Gated

    def __init__(self, name: str, log: list[Any] | None = None) -> None:
        super().__init__(name)
        self.go, self.begun = threading.Event(), threading.Event()
        self.log: list[Any] = [] if log is None else log


def ones(value: float = 1) -> np.ndarray:
    return np.full(16, value, F)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def parallel(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_submit_returns_before_the_run_and_its_future_gives_what_run_gives(parallel):
    device = Gate("a")
    x = ow.input("x", (16,))
    with ow.Scheduler(device, parallel=parallel) as scheduler:
        program = scheduler.build({"y": x + 1})
        future = program.submit(x=ones())
        assert device.begun.wait(10)
        assert not future.done()
        device.go.set()
        assert future.result(10)["y"][0] == 2
        assert program.run(x=ones(5))["y"][0] == 6


def test_fed_arrays_may_be_overwritten_when_submit_returns_unless_borrowed(parallel):
    device = Gate("a")
    x, y = ow.input("x", (16,)), ow.input("lent", (16,), borrowed=True)
    with ow.Scheduler(device, parallel=parallel) as scheduler:
        blocker = scheduler.build(ow.neg(x))
        program = scheduler.build([x + 1, y + 1])
        first = blocker.submit(x=ones())
        fed, lent = ones(1), ones(1)
        future = program.submit(x=fed, lent=lent)
        fed[:] = 50
        lent[:] = 7  # not read yet: a borrowed array is read when the run begins
        device.go.set()
        first.result(10)
        taken, read = future.result(10)
        assert taken[0] == 2
        assert read[0] == 8


def test_feeds_that_do_not_fit_are_refused_by_submit_itself(parallel):
    x = ow.input("x", (16,))
    with ow.Scheduler(HostDevice(), parallel=parallel) as scheduler:
        program = scheduler.build(x + 1)
        with pytest.raises(ow.ShapeError):
            program.submit(x=np.zeros(3, F))
        with pytest.raises(ow.SchedulerError, match="no value"):
            program.submit()
        assert program.run(x=ones())[0] == 2


def test_runs_end_in_order_and_see_the_states_of_those_before(parallel):
    x, total = ow.input("x", (16,)), ow.state("total", (16,))
    a, b = Separate("a"), Separate("b")
    with ow.Scheduler([a, b], parallel=parallel) as scheduler:
        doubled = x + x
        program = scheduler.build(ow.assign(total, total + doubled), pins={doubled: "a"})
        futures = [program.submit(x=ones(i)) for i in range(20)]
        assert [f.result(10)[0] for f in futures] == [i * (i + 1) for i in range(20)]
        assert program.read(total)[0] == 380


def test_run_comes_after_what_was_submitted(parallel):
    x, total = ow.input("x", (16,)), ow.state("total", (16,))
    with ow.Scheduler(HostDevice(), parallel=parallel) as scheduler:
        program = scheduler.build(ow.assign(total, total + x))
        for _ in range(5):
            program.submit(x=ones())
        assert program.run(x=ones())[0] == 6
        program.submit(x=ones())
        program.write(total, ones(100))
        assert program.run(x=ones())[0] == 101
        program.submit(x=ones())
        scheduler.synchronize()
        assert ow.read(total)[0] == 102


def test_successive_runs_overlap_on_different_devices():
    log: list[Any] = []
    a, b = Gate("a", log), Gate("b", log)
    x = ow.input("x", (16,))
    with ow.Scheduler([a, b], parallel=True) as scheduler:
        assert scheduler.n_slots == 2
        first = x + 1
        program = scheduler.build(ow.neg(first), pins={first: "a", ow.neg(first): "b"})
        assert program.slots == 2
        futures = [program.submit(x=ones(i)) for i in range(3)]
        a.go.set()
        assert b.begun.wait(10)
        deadline = time.monotonic() + 10
        while log.count(("a", "end")) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert log.count(("a", "end")) >= 2, "a works on the next run while b still has the first one"
        assert ("b", "end") not in log
        b.go.set()
        assert [f.result(10)[0] for f in futures] == [-1, -2, -3]


def test_devices_that_share_memory_overlap_too():
    x = ow.input("x", (64, 64))
    shared = [HostDevice(), HostDevice()]
    shared[1].name = "other"
    with ow.Scheduler(shared, parallel=3) as scheduler:
        first = x + 1
        second = first @ first
        program = scheduler.build([second, first], pins={first: shared[0], second: shared[1]})
        assert program.slots == 3
        assert program.n_copies == 0
        arrays = [np.full((64, 64), i, F) for i in range(20)]
        for i, future in enumerate([program.submit(x=array) for array in arrays]):
            product, plain = future.result(10)
            assert (plain == i + 1).all()
            assert (product == 64 * (i + 1) ** 2).all()


def test_no_more_than_twice_as_many_runs_as_slots_are_under_way():
    device = Gate("a")
    x = ow.input("x", (16,))
    with ow.Scheduler(device, parallel=1) as scheduler:
        program = scheduler.build(x + 1)
        futures = [program.submit(x=ones(i)) for i in range(2)]
        done = threading.Event()

        def third() -> None:
            futures.append(program.submit(x=ones(2)))
            done.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not done.wait(0.05)
        device.go.set()
        assert done.wait(10)
        thread.join()
        assert [f.result(10)[0] for f in futures] == [1, 2, 3]


def test_programs_that_share_memory_run_one_after_the_other():
    x = ow.input("x", (256,))
    a, b = Separate("a"), Separate("b")
    with ow.Scheduler([a, b], parallel=True) as scheduler:
        one = scheduler.build((x + 1) * 2, pins={x + 1: "a", (x + 1) * 2: "b"})
        two = scheduler.build(ow.neg(x) - 3, pins={ow.neg(x): "b", ow.neg(x) - 3: "a"})
        futures = [p.submit(x=np.full(256, i, F)) for i in range(12) for p in (one, two)]
        for i in range(12):
            assert (futures[2 * i].result(10) == (i + 1) * 2).all()
            assert (futures[2 * i + 1].result(10) == -i - 3).all()


def test_a_future_can_be_awaited():
    x = ow.input("x", (16,))
    with ow.Scheduler(HostDevice(), parallel=True) as scheduler:
        program = scheduler.build(x + 1)

        async def both() -> list[Any]:
            return await asyncio.gather(*[asyncio.wrap_future(program.submit(x=ones(i))) for i in range(2)])

        assert [y[0] for y in asyncio.run(both())] == [1, 2]


# --- failures -------------------------------------------------------------------------------------------------------


class Fuse:
    """A function for `ow.custom` that fails at its n-th call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, array: np.ndarray) -> np.ndarray:
        self.left -= 1
        if self.left == 0:
            raise ValueError("burnt")
        return array + 1


def test_a_failure_names_node_device_and_states_and_only_ends_what_was_under_way(parallel):
    x, total = ow.input("x", (16,)), ow.state("total", (16,))
    host, a = HostDevice(), Separate("a")
    with ow.Scheduler([a, host], parallel=parallel) as scheduler:
        burning = ow.custom(Fuse(3), x, like=x)
        kept = ow.assign(total, total + burning)
        program = scheduler.build([kept, ow.exp(x)], pins={kept: "a", ow.exp(x): "a"})
        futures = [program.submit(x=ones()) for _ in range(5)]
        assert futures[0].result(10)[0][0] == 2
        assert futures[1].result(10)[0][0] == 4
        with pytest.raises(ow.ExecutionError, match=r"custom.*burnt") as caught:
            futures[2].result(10)
        assert caught.value.device == host.name
        assert isinstance(caught.value.__cause__, ValueError)
        if not parallel:
            # The state was not touched by the run that failed: later ones go on.
            assert futures[3].result(10)[0][0] == 6
            return
        for future in futures[3:]:
            with pytest.raises(ow.ExecutionError):
                future.result(10)
        with pytest.raises(ow.ExecutionError, match="half written"):
            program.read(total)
        program.write(total, np.zeros(16, F))
        assert program.run(x=ones())[0][0] == 2, "written anew, everything can be used again"


def test_the_failure_of_another_run_comes_out_of_futures_and_never_out_of_submit():
    x = ow.input("x", (16,))
    host, a = HostDevice(), Separate("a")
    with ow.Scheduler([a, host], parallel=True) as scheduler:
        burning = ow.custom(Fuse(1), x, like=x)
        program = scheduler.build(ow.exp(burning), pins={ow.exp(burning): "a"})
        failed = 0
        for _ in range(50):
            burning.attrs["fn"].left = 1
            futures = [program.submit(x=ones()) for _ in range(4)]
            failed += sum(future.exception(10) is not None for future in futures)
        assert failed >= 50


def test_cancelling_ends_runs_in_the_middle_of_a_plan(parallel):
    device = Gate("a")
    x, total = ow.input("x", (16,)), ow.state("total", (16,))
    with ow.Scheduler(device, parallel=parallel) as scheduler:
        scheduler.cancel()  # without runs in flight it does nothing
        program = scheduler.build([ow.assign(total, total + x), ow.exp(ow.exp(x))])
        future = program.submit(x=ones())
        assert device.begun.wait(10)
        scheduler.cancel()
        device.go.set()
        with pytest.raises(ow.Cancelled, match=r"cancel\(\)"):
            future.result(10)
        with pytest.raises(ow.ExecutionError, match="half written"):
            program.read(total)
        program.write(total, np.zeros(16, F))
        assert program.run(x=ones())[0][0] == 1


def test_states_of_every_split_that_cancelling_may_have_struck_are_marked(parallel):
    device, other = Gate("a"), Separate("b")
    x, early, late = ow.input("x", (16,)), ow.state("early", (16,)), ow.state("late", (16,))
    with ow.Scheduler([device, other], parallel=parallel) as scheduler:
        first = ow.assign(early, x)
        second = ow.assign(late, first + 1)
        program = scheduler.build([first, second], pins={first: "a", second: "b"})
        future = program.submit(x=ones())
        assert device.begun.wait(10)
        scheduler.cancel()
        device.go.set()
        with pytest.raises(ow.Cancelled):
            future.result(10)
        with pytest.raises(ow.ExecutionError, match="half written"):
            ow.read(early)


def test_a_run_is_not_started_from_within_a_run(parallel):
    x = ow.input("x", (16,))
    with ow.Scheduler(HostDevice(), parallel=parallel) as scheduler:
        inner = scheduler.build(x + 1)

        def nested(array: np.ndarray) -> np.ndarray:
            result: np.ndarray = inner.run(x=array)
            return result

        program = scheduler.build(ow.custom(nested, x, like=x))
        with pytest.raises(ow.ExecutionError, match="from within a run"):
            program.run(x=ones())
        assert inner.run(x=ones())[0] == 2


def test_a_closed_scheduler_takes_nothing_and_closing_waits_for_what_it_took(parallel):
    x = ow.input("x", (16,))
    scheduler = ow.Scheduler(HostDevice(), parallel=parallel)
    program = scheduler.build(x + 1)
    futures = [program.submit(x=ones(i)) for i in range(4)]
    scheduler.close()
    assert [f.result(0)[0] for f in futures] == [1, 2, 3, 4]
    with pytest.raises(ow.LifetimeError):
        program.submit(x=ones())


def test_what_ends_a_process_ends_a_run_once_and_leaves_everything_usable(parallel):
    x, state = ow.input("x", (16,)), ow.state("s", (16,))
    ends = [True]

    def leave(array: np.ndarray) -> np.ndarray:
        if ends[0]:
            raise SystemExit("enough")
        return array

    with ow.Scheduler(HostDevice(), parallel=parallel) as scheduler:
        program = scheduler.build(ow.assign(state, ow.custom(leave, x, like=x)))
        for start in (lambda: program.run(x=ones()), lambda: program.submit(x=ones()).result(10)):
            with pytest.raises(SystemExit, match="enough"):
                start()
            scheduler.synchronize()
            with pytest.raises(ow.ExecutionError, match="half written"):
                ow.read(state)
            ow.write(state, ones())
        ends[0] = False
        assert program.run(x=ones(2))[0] == 2


def test_callbacks_of_futures_may_use_programs_whatever_is_queued_behind_them(parallel):
    x, state = ow.input("x", (16,)), ow.state("s", (16,))
    device, seen = Gate("a"), []
    with ow.Scheduler(device, parallel=parallel) as scheduler:
        program = scheduler.build([x + 1, ow.assign(state, x)])

        def done(future: Any) -> None:
            seen.append(program.run(x=ones(7))[0][0])
            seen.append(program.read(state)[0])
            program.write(state, ones(3))
            scheduler.synchronize()
            later.append(program.submit(x=ones(9)))
            try:
                scheduler.close()
            except ow.SchedulerError as error:
                seen.append(str(error))

        later: list[Any] = []
        futures = [program.submit(x=ones(i)) for i in range(3)]
        futures[0].add_done_callback(done)
        device.go.set()
        assert [f.result(10)[0][0] for f in futures] == [1, 2, 3]
        while len(seen) < 3:
            time.sleep(0.001)
        assert later[0].result(10)[0][0] == 10
    assert seen[0] == 8
    assert "callback of one of its futures" in str(seen[2])


def test_what_would_wait_for_the_end_of_a_run_is_refused_within_it():
    x, state = ow.input("x", (16,)), ow.state("s", (16,))
    refused: list[str] = []
    scheduler = ow.Scheduler(HostDevice(), parallel=True)

    def inside(array: np.ndarray) -> np.ndarray:
        for work in (
            scheduler.synchronize, scheduler.close, scheduler.reset, program.close, lambda: program.read(state),
            lambda: program.write(state, array), lambda: scheduler.without("host"),
        ):  # fmt: skip
            try:
                work()
            except ow.SchedulerError as error:
                refused.append(str(error))
        return array

    program = scheduler.build([ow.custom(inside, x, like=x), ow.assign(state, x)])
    assert program.submit(x=ones()).result(10)[0][0] == 1
    assert len(refused) == 7
    scheduler.close()


@pytest.mark.parametrize("what", ["scheduler", "program", "everything"])
def test_a_run_does_not_close_what_it_runs_on(what):
    x = ow.input("x", (16,))
    scheduler = ow.Scheduler(HostDevice())

    def inside(array: np.ndarray) -> np.ndarray:
        {"scheduler": scheduler.close, "program": program.close, "everything": scheduler.reset}[what]()
        return array

    program = scheduler.build(ow.custom(inside, x, like=x))
    with pytest.raises(ow.ExecutionError, match="closed from within a run"):
        program.run(x=ones())
    assert scheduler.build(x + 1).run(x=ones())[0] == 2


def slow(array: np.ndarray) -> np.ndarray:
    time.sleep(0.001)
    return array


@pytest.mark.parametrize("end", ["close", "reset"])
def test_ending_while_others_submit_leaves_nobody_waiting(parallel, end):
    x = ow.input("x", (16,))
    for _ in range(3):
        scheduler = ow.Scheduler(HostDevice(), parallel=parallel)
        program = scheduler.build(ow.custom(slow, x, like=x))
        taken: list[Any] = []
        begun = threading.Event()

        def submit(program: Any = program, taken: list[Any] = taken, begun: threading.Event = begun) -> None:
            with suppress(ow.LifetimeError):
                while True:
                    taken.append(program.submit(x=ones()))
                    begun.set()
                    time.sleep(0.0005)

        threads = [threading.Thread(target=submit, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert begun.wait(10)
        ending = threading.Thread(target=getattr(scheduler, end), daemon=True)
        ending.start()
        for thread in (ending, *threads):
            thread.join(10)
            assert not thread.is_alive()
        for future in taken:
            error = future.exception(10)
            assert error is None or isinstance(error, ow.LifetimeError)
        scheduler.close()


# --- memory ---------------------------------------------------------------------------------------------------------


class Small(Separate):
    """A device whose memory is soon full."""

    def __init__(self, name: str, room: int) -> None:
        super().__init__(name)
        self.room = room

    def _alloc(self, size: int, usage: Any) -> Any:
        if size > self.room:
            raise MemoryError(f"{self.room} bytes are left")
        self.room -= size
        return super()._alloc(size, usage)


def test_too_little_memory_for_several_slots_is_said_and_one_is_taken():
    a, b = Small("a", 3 * 4096), Separate("b")
    x = ow.input("x", (1024,))
    with ow.Scheduler([a, b], parallel=4) as scheduler:
        first = x + 1
        with pytest.warns(RuntimeWarning, match=r"4 slots.*a .*bytes"):
            program = scheduler.build(ow.neg(first), pins={first: "a", ow.neg(first): "b"})
        assert program.slots == 1
        futures = [program.submit(x=np.full(1024, i, F)) for i in range(8)]
        assert [f.result(10)[0] for f in futures] == [-1, -2, -3, -4, -5, -6, -7, -8]


def test_only_what_passes_between_queues_has_memory_in_every_slot():
    a, b = Separate("a"), Separate("b")
    x = ow.input("x", (1024,))
    with ow.Scheduler([a, b]) as one, ow.Scheduler([a, b], parallel=3) as three:
        inner = x
        for _ in range(6):
            inner = ow.exp(inner) + inner
        out = ow.neg(inner)
        pins: dict[ow.Tensor, Any] = {inner: "a", out: "b"}
        single, triple = one.build(out, pins=pins), three.build(out, pins=pins)
        # Each slot has its own input and its own copy of the value at the device boundary; the rest is shared.
        assert triple.memory["a"].temporaries - single.memory["a"].temporaries <= 3 * 2 * 4096
        assert triple.memory["b"].temporaries == single.memory["b"].temporaries


def test_streams_without_a_thread_are_refused_for_overlapping():
    with HostDevice().open() as stream, pytest.raises(ow.SchedulerError, match="worker=True"):
        ow.Scheduler(stream, parallel=True)
    with HostDevice().open(worker=True) as stream, ow.Scheduler(stream, parallel=True) as scheduler:
        x = ow.input("x", (16,))
        assert scheduler.build(x + 1).run(x=ones())[0] == 2


def test_stats_count_what_was_done():
    a, b = Separate("a"), HostDevice()
    x = ow.input("x", (16,))
    with ow.Scheduler([a, b]) as scheduler:
        assert scheduler.stats == (0, 0, 0, 0, 0)
        first = ow.neg(x)
        pins: dict[ow.Tensor, Any] = {first: b, first + 1: a}
        program = scheduler.build(first + 1, pins=pins)
        scheduler.build(first + 1, pins=pins)
        program.run(x=ones())
        program.run(x=ones())
        stats = scheduler.stats
        assert (stats.built, stats.reused, stats.runs, stats.copied) == (1, 1, 2, 2 * 64)
        assert stats.allocated == sum(scheduler.buffer_size(d) for d in scheduler.devices)
