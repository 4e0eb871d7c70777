"""Runs over shards: each device computes in a thread of its own; what interrupts and errors there lead to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opweave as ow
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


@pytest.mark.parametrize("parallel", [False, 2])
def test_each_device_computes_in_its_thread(pair, parallel):
    with ow.Scheduler(pair, parallel=parallel) as scheduler:
        program = scheduler.build(mlp(pair, f"x_threads{parallel}"))
        for future in [program.submit({f"x_threads{parallel}": VALUE}) for _ in range(4)]:
            assert np.array_equal(future.result(20), WANT)
        for device in pair:
            assert set(device.threads) == {f"opweave {device.name}"}


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_names_the_device(pair, which):
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


def test_an_interrupt_in_a_kernel_ends_the_run_and_says_what_is_half_written(pair):
    def interrupt() -> None:
        raise KeyboardInterrupt

    total = ow.state("total_own", (ROWS, WIDTH), device=pair[0])
    with ow.Scheduler([*pair, HostDevice()]) as scheduler:
        out = mlp(pair, "x_interrupt")
        program = scheduler.build([ow.assign(total, total + out), out])
        program.run(x_interrupt=VALUE)
        pair[0].then = interrupt
        with pytest.raises(KeyboardInterrupt):
            program.run(x_interrupt=VALUE)
        pair[0].then = bool
        with pytest.raises(ow.ExecutionError, match="half written"):
            ow.read(total)
        ow.write(total, np.zeros((ROWS, WIDTH), F))
        again = program.run(x_interrupt=VALUE)
        assert np.array_equal(again[0], WANT)
        assert np.array_equal(again[1], WANT)


def test_a_run_within_the_work_of_a_run_is_refused(pair):
    caught: list[BaseException] = []
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(mlp(pair, "x_within"))

        def run() -> None:
            for within in (lambda: program.run(x_within=VALUE), scheduler.synchronize, scheduler.close):
                with pytest.raises(ow.SchedulerError) as error:
                    within()
                caught.append(error.value)

        pair[0].then = run
        assert np.array_equal(program.run(x_within=VALUE), WANT)
        assert len(caught) == 3


def test_the_run_is_cancelled_from_within(pair):
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(mlp(pair, "x_cancel"))
        program.run(x_cancel=VALUE)
        pair[0].then = scheduler.cancel
        with pytest.raises(ow.Cancelled):
            program.run(x_cancel=VALUE)
        pair[0].then = bool
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
