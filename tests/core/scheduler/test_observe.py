"""Looking on while a program runs: values in order, batching between them, ending the run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Stream
from opweave.runtime.host.device import HostDevice
from tests.core.scheduler.test_async import Reference
from tests.core.scheduler.test_random import _hazard, random_devices
from tests.support.devices import Separate
from tests.support.evaluate import evaluate
from tests.support.random_graphs import Case

F = np.float32


def chain() -> tuple[ow.Tensor, list[ow.Tensor]]:
    x = ow.input("x", (4,))
    nodes = [x + 1]
    for op in (ow.neg, ow.exp, ow.relu):
        nodes.append(op(nodes[-1]))
    return x, nodes


@pytest.mark.parametrize("parallel", [False, True])
def test_every_value_is_shown_in_order(parallel):
    x, nodes = chain()
    v = np.arange(4, dtype=F)
    seen: list[tuple[ow.Tensor, np.ndarray]] = []
    with ow.Scheduler([Separate("a"), HostDevice()], parallel=parallel) as scheduler:
        program = scheduler.build(nodes[-1], pins={nodes[1]: "hostdevice"})
        plain = program.run(x=v)
        with program.observe(lambda node, value: seen.append((node, value))):
            np.testing.assert_array_equal(program.run(x=v), plain)
            np.testing.assert_array_equal(program.submit(x=v).result(10), plain)
        assert [node for node, _ in seen] == nodes * 2
        for node, value in seen:
            np.testing.assert_array_equal(value, evaluate(node, {x: v}))
        seen.clear()
        program.run(x=v)
        assert seen == [], "nobody looks on any more"


def test_only_what_is_asked_for_is_shown_and_the_rest_runs_in_one_go():
    runs: list[int] = []

    class Counting(Stream):
        def _run(self, calls):
            runs.append(1)
            super()._run(calls)

    class Counted(Separate):
        stream_class = Counting

    _, nodes = chain()
    with ow.Scheduler(Counted("a")) as scheduler:
        program = scheduler.build(nodes[-1])
        seen: list[str] = []
        with program.observe(lambda node, value: seen.append(node.name), [nodes[1]]):
            program.run(x=np.ones(4, F))
        assert seen == ["neg"]
        assert len(runs) == 2, "one batch up to the observed node, one behind it"
        with program.observe(lambda node, value: seen.append(node.name), lambda node: node.name == "exp"):
            program.run(x=np.ones(4, F))
        assert seen == ["neg", "exp"]


def test_false_ends_the_run_and_an_exception_comes_out_of_it():
    _, nodes = chain()
    with ow.Scheduler(HostDevice()) as scheduler:
        program = scheduler.build(nodes[-1])
        seen: list[str] = []

        def stop(node: ow.Tensor, value: np.ndarray) -> bool:
            seen.append(node.name)
            return node is not nodes[1]

        with program.observe(stop), pytest.raises(ow.Cancelled, match="neg"):
            program.run(x=np.ones(4, F))
        assert seen == ["scale", "neg"]

        def fail(node: ow.Tensor, value: np.ndarray) -> None:
            raise KeyError("mine")

        with program.observe(fail), pytest.raises(KeyError, match="mine"):
            program.run(x=np.ones(4, F))
        assert program.run(x=np.ones(4, F)).shape == (4,)


def test_states_are_shown_as_they_are_after_the_node_that_writes_them():
    x, total = ow.input("x", (4,)), ow.state("total", (4,))
    kept = ow.assign(total[:2], x[:2])
    with ow.Scheduler([Separate("a"), HostDevice()]) as scheduler:
        program = scheduler.build(kept + 0)
        seen: list[np.ndarray] = []
        with program.observe(lambda node, value: seen.append(value), [kept]):
            program.run(x=np.arange(1, 5, dtype=F))
    assert seen[0].tolist() == [1, 2, 0, 0]


def test_what_cannot_be_observed_is_refused():
    x, nodes = chain()
    with ow.Scheduler(HostDevice()) as scheduler:
        program = scheduler.build(nodes[-1])
        with pytest.raises(ow.SchedulerError, match="not computed"), program.observe(print, [x]):
            pass
        with (
            program.observe(print),
            pytest.raises(ow.SchedulerError, match="observed already"),
            program.observe(print),
        ):
            pass
        program.close()
        with pytest.raises(ow.LifetimeError), program.observe(print):
            pass


@pytest.mark.parametrize("parallel", [False, True])
def test_runs_of_other_threads_go_on_while_observers_come_and_go(parallel):
    _, nodes = chain()
    with ow.Scheduler(HostDevice(), parallel=parallel) as scheduler:
        program = scheduler.build(nodes[-1])
        over = threading.Event()
        runs: list[None] = []
        wrong: list[Exception] = []

        def work() -> None:
            try:
                while not over.is_set():
                    program.run(x=np.zeros(4, F))
                    runs.append(None)
            except ow.OpweaveError as error:
                wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            before = len(runs)
            with program.observe(lambda node, value: None):
                while len(runs) < before + 2 and not wrong:
                    time.sleep(0.0002)
        over.set()
        for thread in threads:
            thread.join(10)
    assert not wrong


def asynchronous(rng: random.Random) -> list[ow.Device]:
    return [Reference("d0"), HostDevice()]


def observed_case(seed: int, make_devices: Callable[[random.Random], list[ow.Device]]) -> int:
    """How many values of a random graph were shown; each is that of the reference."""
    rng = random.Random(seed)
    case = Case(rng)
    if not case.outputs or _hazard(case.outputs):
        return 0
    with ow.Scheduler(make_devices(rng)) as scheduler:
        program = scheduler.build(case.outputs)
        chosen = rng.random()
        seen: list[tuple[ow.Tensor, np.ndarray]] = []
        with program.observe(lambda node, value: seen.append((node, value)), lambda node: rng.random() < chosen):
            program.run({name: case.feeds[name] for name in program.inputs})
    known: dict[ow.Tensor, np.ndarray] = {}
    for node, value in seen:
        np.testing.assert_array_equal(value, evaluate(node, case.leaves, known), err_msg=f"seed {seed}")
    return len(seen)


@pytest.mark.parametrize("make_devices", [random_devices, asynchronous])
def test_values_of_random_graphs_equal_the_references(make_devices):
    assert sum(observed_case(seed, make_devices) for seed in range(60)) > 100
