"""`ow.tune`: the placement that is fastest when it is measured, and what it leaves behind for predictions."""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.contract import Arg, Call, Usage
from opweave.contract.kernels import KernelTable
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from tests.support.devices import Separate, reference_kernel

F = np.float32
SLOW = 0.004


class Uneven(Separate):
    """Takes 4 ms longer for some operations, of which its profile says nothing: all steps take 1 µs. Has ``room``
    bytes of memory."""

    def __init__(self, name: str, slow: Collection[str], room: int = 1 << 30) -> None:
        super().__init__(name)
        self.kernels = KernelTable("f32", "strided")
        self.room, self.used = room, 0

        @self.kernels("linear", "exp", "neg", "add", "assign")
        def kernel(stream: ow.Stream, op: str, out: Arg, *srcs: Arg, **attrs: object) -> Call:
            compute = reference_kernel(stream, op, out, *srcs, **attrs)

            def call() -> None:
                if op in slow:
                    time.sleep(SLOW)
                compute()

            return call

    def declared(self) -> Profile:
        line = Curve.line(1e-6, 1e12)
        return Profile(self.name, 0.0, line, line, {ANY: {ANY: OpCost(line)}})

    def mem_info(self) -> tuple[int, int]:
        return self.room - self.used, self.room

    def _alloc(self, size: int, usage: Usage):
        if self.used + size > self.room:
            raise ow.AllocationError(f"memory of {self.name}", size, self.room - self.used)
        self.used += size
        return super()._alloc(size, usage)

    def _free(self, memory) -> None:
        self.used -= memory.nbytes
        super()._free(memory)


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    """As many as are asked for: what sleeps needs no repeating."""
    monkeypatch.setattr("opweave_cost.autotune.RUN_SECONDS", 0.0)


@pytest.fixture
def graph():
    x = ow.input("tuned", (3, 5))
    w = ow.weights({"tuned.w": np.full((7, 5), 0.5, F)})["tuned.w"]
    y = ow.linear(x, w)
    return x, y, ow.exp(y)


def test_each_node_goes_where_it_is_fast_though_the_profiles_know_nothing(graph):
    _, y, z = graph
    a, b = Uneven("a", {"exp"}), Uneven("b", {"linear"})
    feed = np.linspace(-1, 1, 15, dtype=F).reshape(3, 5)
    with ow.Scheduler([a, b]) as scheduler:
        found = opweave_cost.tune(scheduler, z, {"tuned": feed}, runs=3)
        assert dict(found.pins) == {y: a, z: b}
        best = found.candidates[0]
        assert best.name == "cost"
        assert dict(best.nodes) == {"a": 1, "b": 1}
        assert best.seconds < SLOW <= min(c.seconds for c in found.candidates[1:])
        assert {c.name for c in found.candidates} == {"priority", "only b", "cost"}, "priority is a alone"
        assert "1 nodes on a, 1 nodes on b" in str(found)
        program = scheduler.build(z, pins=found.pins)
        np.testing.assert_allclose(program.run({"tuned": feed}), np.exp(feed @ np.full((5, 7), 0.5, F)), rtol=1e-5)


def test_later_predictions_use_what_steps_took(graph):
    _, y, z = graph
    a, b = Uneven("a", {"exp"}), Uneven("b", {"linear"})
    with ow.Scheduler([a, b], placement="cost") as scheduler:
        before = scheduler.partition(z).predicted
        assert before.seconds < 1e-4
        opweave_cost.tune(scheduler, z, tuned=np.ones((3, 5), F), runs=3)
        plan = scheduler.partition(z)
        assert {t.name for t in (plan.partition.assignment.targets[plan.partition.assignment.target_of[n]]
                                 for n in (y, z))} == {"a", "b"}  # fmt: skip
        alone = ow.Scheduler([b]).partition(z).predicted
        assert SLOW * 0.75 < alone.nodes[y] < SLOW * 10, "a busy machine wakes late"
        assert alone.nodes[z] < alone.nodes[y] / 4
    copy = opweave_cost.simulate("copy of b", like=b)
    assert ow.Scheduler([copy]).partition(z).predicted.nodes[y] == alone.nodes[y]
    faster = opweave_cost.simulate("faster", like=b, launch=1e-7)
    assert ow.Scheduler([faster]).partition(z).predicted.nodes[y] < 1e-5, "its figures are its own"


def test_a_single_device_is_preferred_where_copies_cost_more_than_they_save():
    x = ow.input("tuned.same", (3, 5))
    z = ow.exp(ow.neg(x))
    with ow.Scheduler([Uneven("a", ()), Uneven("b", {"exp", "neg"})]) as scheduler:
        found = opweave_cost.tune(scheduler, z, {"tuned.same": np.ones((3, 5), F)}, runs=3)
    assert {device.name for device in found.pins.values()} == {"a"}
    assert found.candidates[0].name == "priority"


def test_states_keep_their_values_and_may_lie_nowhere():
    total = ow.state("tuned.total", (2, 2), fill=3.0)
    bias = ow.state("tuned.bias", (2, 2))
    a, b = Uneven("a", {"assign"}), Uneven("b", ())
    with ow.Scheduler([a, b]) as scheduler:
        written = ow.assign(total, ow.add(total, bias))
        ow.write(bias, np.full((2, 2), 5, F))
        found = opweave_cost.tune(scheduler, written, runs=2)
        assert set(found.pins.values()) == {b}
        assert set(found.pins) <= set(scheduler.partition(written).partition.graph.nodes)
        program = scheduler.build(written, pins=found.pins)
        np.testing.assert_array_equal(program.run(), np.full((2, 2), 8, F))
        np.testing.assert_array_equal(program.run(), np.full((2, 2), 13, F))


def test_pins_of_the_scheduler_are_kept(graph):
    _, y, z = graph
    with ow.Scheduler([Uneven("a", {"exp"}), Uneven("b", {"linear"})]) as scheduler:
        scheduler.pin(y, "b")
        found = opweave_cost.tune(scheduler, z, tuned=np.ones((3, 5), F), runs=2)
    assert found.pins[y].name == "b"


def test_placements_that_do_not_fit_are_left_out():
    x = ow.input("tuned.wide", (1, 64))
    made = ow.weights({f"tuned.{i}": np.eye(64, dtype=F) for i in range(4)})
    z = x
    for w in made.values():
        z = ow.linear(z, w)
    size = 64 * 64 * 4
    devices = [Uneven(name, (), 3 * size) for name in "ab"]
    with ow.Scheduler(devices) as scheduler:
        found = opweave_cost.tune(scheduler, z, {"tuned.wide": np.ones((1, 64), F)}, runs=2)
        assert {device.name for device in found.pins.values()} == {"a", "b"}
        assert all(len(c.nodes) == 2 for c in found.candidates)
        np.testing.assert_array_equal(
            scheduler.build(z, pins=found.pins).run({"tuned.wide": np.ones((1, 64), F)}), np.ones((1, 64), F)
        )
    with ow.Scheduler([Uneven("c", (), size)]) as scheduler, pytest.raises(ow.AllocationError, match="c"):
        opweave_cost.tune(scheduler, z, {"tuned.wide": np.ones((1, 64), F)})


def test_wrong_arguments(graph):
    _, _, z = graph
    with ow.Scheduler([Uneven("a", ()), Uneven("b", ())]) as scheduler:
        with pytest.raises(ow.SchedulerError, match="not str"):
            opweave_cost.tune("cpu", z)  # type: ignore[arg-type]
        with pytest.raises(ow.SchedulerError, match="at least 1, not 0"):
            opweave_cost.tune(scheduler, z, runs=0)
        parts = ow.weights({"tuned.parts": ow.Spec((8, 5))}, device=ow.Sharded(scheduler.devices))["tuned.parts"]
        with pytest.raises(ow.SchedulerError, match="shards"):
            opweave_cost.tune(scheduler, ow.linear(ow.input("tuned.y", (2, 5)), parts))
        with pytest.raises(ow.OpweaveError, match="tuned"):
            opweave_cost.tune(scheduler, z)
