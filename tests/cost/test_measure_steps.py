"""`ow.measure_steps`: what the steps of a graph take on a device, for predictions."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.contract import Arg, Call
from opweave.contract.kernels import KernelTable
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from tests.support.devices import Separate, reference_kernel

SLOW = 0.004


class Counting(Separate):
    """Takes 4 ms longer for ``exp``, of which its profile says nothing; counts what it runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kernels = KernelTable("f32", "strided")
        self.ran: Counter[str] = Counter()

        @self.kernels("linear", "exp", "add", "assign")
        def kernel(stream: ow.Stream, op: str, out: Arg, *srcs: Arg, **attrs: object) -> Call:
            compute = reference_kernel(stream, op, out, *srcs, **attrs)

            def call() -> None:
                self.ran[op] += 1
                if op == "exp":
                    time.sleep(SLOW)
                compute()

            return call

    def declared(self) -> Profile:
        line = Curve.line(1e-6, 1e12)
        return Profile(self.name, 0.0, line, line, {ANY: {ANY: OpCost(line)}})


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr("opweave_cost.step_times.RUN_SECONDS", 0.0)


def alike(device: ow.Device, outputs: ow.Tensor) -> float:
    return ow.Scheduler(opweave_cost.simulate("alike", like=device)).partition(outputs).predicted.seconds


def known(node: ow.Tensor, device: ow.Device) -> bool:
    assert node.signature is not None
    return node.signature.support[device].seconds > 0


def test_predictions_use_what_was_measured():
    device = Counting("measured")
    w = ow.weights({"w": ow.Spec((7, 5))})["w"]
    y = ow.exp(ow.exp(ow.linear(ow.input("ms_x", (3, 5)), w)))
    assert alike(device, y) < SLOW / 10, "the profile knows nothing of it"
    opweave_cost.measure_steps(y, device, runs=2)
    assert 2 * SLOW <= alike(device, y) < 20 * SLOW
    ran = device.ran.copy()
    opweave_cost.measure_steps(y, device, runs=2)
    assert device.ran == ran, "what is known is not measured again"


@pytest.mark.parametrize(("limit", "times"), [(1, 1), (1 << 20, 6)])
def test_of_large_models_the_first_step_of_each_kind(limit, times):
    device = Counting("limited")
    w = ow.weights({str(i): ow.Spec((6, 6)) for i in range(6)})
    h = ow.input(f"ms_limit{limit}", (times, 6))  # kinds of its own: equal ones would be known
    for i in range(6):
        h = ow.linear(h, w[str(i)])
    out = ow.exp(h)
    opweave_cost.measure_steps(out, device, runs=1, limit=limit)
    assert device.ran["linear"] == times * device.ran["exp"]
    assert all(known(n, device) for n in (h, out))


def test_states_keep_their_values_and_refused_steps_are_left_out():
    device = Counting("kept")
    sums = ow.state("ms_sums", (4,), fill=3.0)
    new = ow.assign(sums, sums + ow.exp(ow.sin(ow.input("ms_y", (4,)))))
    opweave_cost.measure_steps(new, device, runs=1)
    assert device.ran["assign"] == device.ran["exp"] > 0
    np.testing.assert_array_equal(ow.read(sums), np.full(4, 3.0, np.float32))


def test_values_are_made_up_for_every_kind_of_leaf():
    device = ow.device("cpu")
    shapes = {"table": ((16, 64), "bf16"), "router": ((8, 64), "f32"), "up": ((8, 32, 64), "q4_0"),
              "out": ((48, 32), "q8_0")}  # fmt: skip
    weights = ow.weights({name: ow.Spec(shape, ow.as_dtype(dtype)) for name, (shape, dtype) in shapes.items()})
    h = ow.cast(ow.embedding(weights["table"], ow.input("ms_ids", (4,), "i32")), "f32")
    ids = ow.top_k(ow.linear(h, weights["router"]), 2)[1]
    y = ow.linear(ow.expert_linear(h, weights["up"], ids), weights["out"])
    opweave_cost.measure_steps(y, device, runs=1)
    with ow.Scheduler(device) as scheduler:
        for node in [n for split in scheduler.partition(y).splits for n in split.nodes]:
            assert known(node, device), node


def test_bad_input():
    y = ow.exp(ow.input("ms_bad", (2,)))
    with pytest.raises(ow.SchedulerError, match="is simulated"):
        opweave_cost.measure_steps(y, opweave_cost.simulate("gone", flops=1e9, bandwidth=1e9))
    with pytest.raises(ow.SchedulerError, match="runs is a whole number"):
        opweave_cost.measure_steps(y, "cpu", runs=0)
    with pytest.raises(ow.SchedulerError, match="limit is a whole number"):
        opweave_cost.measure_steps(y, "cpu", limit=0)
