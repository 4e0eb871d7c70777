"""The calling thread does one device's work of a run over shards, and what interrupts and errors in it lead to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave import processors
from opweave.processors import NOWHERE, Apart, current_processor
from opweave.runtime.host.device import HostDevice
from tests.support.devices import BASIC, Separate
from tests.support.interrupts import interrupted, needs_timer

F = np.float32
ROWS, WIDTH = 6, 64


def integers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F)


UP, DOWN, VALUE = integers(96, WIDTH), integers(WIDTH, 96, seed=1), integers(ROWS, WIDTH, seed=2)
WANT = np.maximum(VALUE @ UP.T, 0) @ DOWN.T


class Watched(Separate):
    """Calls a function whenever it computes ``relu``, and notes the threads in which it does."""

    def __init__(self, name: str) -> None:
        super().__init__(name, [op for op in BASIC if op != "relu"])
        self.threads: list[str] = []
        self.then: Callable[[], object] = bool
        self.kernels("relu", dtypes="f32")(self._relu)

    def _relu(self, stream: Any, op: str, out: Any, x: Any) -> Any:
        def run() -> None:
            self.threads.append(threading.current_thread().name)
            self.then()
            np.maximum(x.view, 0, out=out.view)

        return run


@pytest.fixture
def pair():
    return Watched("left"), Watched("right")


def mlp(pair: Any, name: str) -> ow.Tensor:
    by = {"up": ow.Sharded(pair), "down": ow.Sharded(pair, axis=1)}
    w = ow.weights({"up": UP, "down": DOWN}, device=by)
    return ow.linear(ow.relu(ow.linear(ow.input(name, (ROWS, WIDTH)), w["up"])), w["down"])


def own_of(program: ow.Program[Any]) -> Any:
    """The device whose work the caller does."""
    own = program.run_lists[0].caller
    assert own is not None
    return own.stream.device


def test_the_caller_computes_in_place_of_one_thread(pair):
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(mlp(pair, "x_own"))
        for _ in range(3):
            assert np.array_equal(program.run(x_own=VALUE), WANT)
        own = own_of(program)
        (other,) = [device for device in pair if device is not own]
        assert own.name == program.device_of(program.partition.graph.outputs[0]).name
        assert set(own.threads) == {threading.current_thread().name}
        assert set(other.threads) == {f"opweave {other.name}"}
        own.threads.clear()
        assert np.array_equal(program.submit(x_own=VALUE).result(20), WANT)
        assert own.threads == ["opweave runs"]


def test_threads_do_all_work_where_runs_overlap(pair):
    with ow.Scheduler(pair, parallel=2) as scheduler:
        program = scheduler.build(mlp(pair, "x_overlap"))
        for future in [program.submit(x_overlap=VALUE) for _ in range(4)]:
            assert np.array_equal(future.result(20), WANT)
        assert {t for device in pair for t in device.threads} == {"opweave left", "opweave right"}


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_names_the_device_whoever_computes(pair, which):
    def fail() -> None:
        raise ValueError("no luck")

    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(mlp(pair, f"x_error{which}"))
        pair[which].then = fail
        for _ in range(2):
            with pytest.raises(ow.ExecutionError, match="no luck") as caught:
                program.run({f"x_error{which}": VALUE})
            assert caught.value.device == pair[which].name
        pair[which].then = bool
        assert np.array_equal(program.run({f"x_error{which}": VALUE}), WANT)


def test_an_interrupt_of_the_caller_ends_the_run_and_says_what_is_half_written(pair):
    def interrupt() -> None:
        raise KeyboardInterrupt

    total = ow.state("total_own", (ROWS, WIDTH), device=pair[0])
    with ow.Scheduler([*pair, HostDevice()]) as scheduler:
        out = mlp(pair, "x_interrupt")
        program = scheduler.build([ow.assign(total, total + out), out])
        program.run(x_interrupt=VALUE)
        own = own_of(program)
        own.then = interrupt
        with pytest.raises(KeyboardInterrupt):
            program.run(x_interrupt=VALUE)
        own.then = bool
        with pytest.raises(ow.ExecutionError, match="half written"):
            ow.read(total)
        ow.write(total, np.zeros((ROWS, WIDTH), F))
        again = program.run(x_interrupt=VALUE)
        assert np.array_equal(again[0], WANT)
        assert np.array_equal(again[1], WANT)


def test_a_run_within_the_work_of_the_caller_is_refused(pair):
    caught: list[BaseException] = []
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(mlp(pair, "x_within"))

        def run() -> None:
            for within in (lambda: program.run(x_within=VALUE), scheduler.synchronize, scheduler.close):
                with pytest.raises(ow.SchedulerError) as error:
                    within()
                caught.append(error.value)

        own_of(program).then = run
        assert np.array_equal(program.run(x_within=VALUE), WANT)
        assert len(caught) == 3


def test_the_run_is_cancelled_while_the_caller_computes(pair):
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(mlp(pair, "x_cancel"))
        program.run(x_cancel=VALUE)
        own = own_of(program)
        own.then = scheduler.cancel
        with pytest.raises(ow.Cancelled):
            program.run(x_cancel=VALUE)
        own.then = bool
        assert np.array_equal(program.run(x_cancel=VALUE), WANT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer it ends there
@needs_timer
def test_runs_go_on_after_interrupts_at_any_moment(cpus):
    """Ctrl-C in the middle of collectives."""
    x = ow.input("x_storm", (ROWS, WIDTH))
    by = {"up": ow.Sharded(cpus[:2]), "down": ow.Sharded(cpus[:2], axis=1)}
    w = ow.weights({"up": UP, "down": DOWN}, device=by)
    with ow.Scheduler(cpus[:2], threads=1) as scheduler:
        program = scheduler.build(ow.linear(ow.relu(ow.linear(x, w["up"])), w["down"]))

        def check() -> None:
            assert np.array_equal(program.run(x_storm=VALUE), WANT)
            assert np.array_equal(program.submit(x_storm=VALUE).result(20), WANT)
            scheduler.synchronize()

        assert interrupted(400, lambda: program.run(x_storm=VALUE), check, every=5, longest=1e-3) >= 400


# --- processors ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system places threads itself")
def test_a_thread_moves_off_the_processor_of_the_one_that_woke_it(monkeypatch):
    apart, moves, usable = Apart(), [], {0, 1, 2}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: moves.append(set(given)))
    here = [1]
    monkeypatch.setattr(processors, "current_processor", lambda: here[0])
    for processor in (NOWHERE, 0, 2):
        apart.move_off(processor)
        assert moves == [], "it runs elsewhere"
    apart.move_off(1)
    assert moves == [{0, 2}, {0, 1, 2}]
    apart.move_off(1)
    assert len(moves) == 2, "not at every wake"
    apart._next, usable = 0.0, {1}
    apart.move_off(1)
    assert len(moves) == 2, "there is no other one"


def test_a_thread_may_use_the_same_processors_as_before():
    before = getattr(os, "sched_getaffinity", lambda _: None)(0)
    Apart().move_off(current_processor())
    assert getattr(os, "sched_getaffinity", lambda _: None)(0) == before
