"""Where weights in shards lie: shares, cuts, memory, new values, devices that are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import opweave as ow
from opweave.graph.leaf import Shards
from opweave.runtime.host.device import HostDevice
from opweave.sharding.placing import cuts_of
from tests.core.scheduler.test_lost import Fragile
from tests.support.devices import Separate

F = np.float32


@pytest.fixture
def pair():
    return [Separate("left"), Separate("right")]


def shards_of(tensor: ow.Tensor) -> Shards:
    assert tensor.leaf is not None
    assert tensor.leaf.shards is not None
    return tensor.leaf.shards


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F)


# --- cuts -----------------------------------------------------------------------------------------------------------


LENGTHS = st.one_of(st.integers(1, 3000), st.sampled_from([8192, 12288, 32768]))


@given(
    LENGTHS, st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.sampled_from([1, 32, 256]),
    st.sampled_from([None, 1, 7, 64]),
)  # fmt: skip
def test_cuts_follow_the_shares_in_whole_units(length, shares, block, multiple):
    cuts = cuts_of(length, shares, block, multiple)
    unit = np.lcm(block, multiple or 1)
    if cuts is None:
        assert length % unit or length // unit < len(shares)
        return
    assert cuts[0] == 0
    assert cuts[-1] == length
    lengths = np.diff(cuts)
    assert min(lengths) > 0
    assert cuts_of(length, [share * 2.0**1016 for share in shares], block, multiple) == cuts  # whatever their sum
    assert not any(cut % unit for cut in cuts)
    if length >= 16 * 256 * len(shares) and multiple is None and length % 256 == 0 and min(shares) > 0.2 * sum(shares):
        assert not any(cut % 256 for cut in cuts)
        np.testing.assert_allclose(lengths / length, np.array(shares) / sum(shares), atol=256 / length + 1e-9)


def test_shares_are_given_or_those_of_free_memory(pair):
    pair[1].mem_info = lambda: (3 << 30, 3 << 30)
    given, free = (
        ow.weights({"w": numbers(64, 8)}, device=how)["w"]
        for how in (ow.Sharded({pair[0]: 3, pair[1]: 1}), ow.Sharded(pair))
    )
    assert [part.shape for part in shards_of(given).parts] == [(48, 8), (16, 8)]
    assert [part.shape for part in shards_of(free).parts] == [(16, 8), (48, 8)]


def test_what_cannot_be_split_is_refused(pair):
    with pytest.raises(ow.BoundsError, match="axis 1"):
        ow.weights({"w": numbers(8)}, device=ow.Sharded(pair, axis=1))
    with pytest.raises(ow.LayoutError, match="blocks of 32"):
        ow.weights({"w": ow.quantize(numbers(4, 32), "q8_0")}, device=ow.Sharded(pair, axis=1))
    with pytest.raises(ow.LayoutError, match="multiples of 8"):
        ow.weights({"w": numbers(12, 4)}, device=ow.Sharded(pair, multiple=8))
    with pytest.raises(ow.SchedulerError, match="twice"):
        ow.Sharded([pair[0], pair[0]])
    with pytest.raises(ow.SchedulerError, match="share"):
        ow.Sharded({pair[0]: 1, pair[1]: 0})
    with pytest.raises(ow.SchedulerError, match="devices or their names"):
        ow.Sharded([])
    with pytest.raises(ow.SchedulerError, match="devices or their names"):
        ow.Sharded(3)  # type: ignore[arg-type]
    with pytest.raises(ow.SchedulerError, match="devices or their names"):
        ow.Sharded({*pair})  # type: ignore[arg-type]  # it has no order
    with pytest.raises(ow.SchedulerError, match="share"):
        ow.Sharded({pair[0]: 10**400})
    with pytest.raises(ow.SchedulerError, match="axis"):
        ow.Sharded(pair, axis=True)
    assert ow.Sharded(pair, axis=np.int64(1), multiple=np.int32(8)).axis == 1  # type: ignore[arg-type]
    with pytest.raises(ow.SchedulerError, match="multiple"):
        ow.Sharded(pair, multiple=0)
    with pytest.raises(ow.UnknownNameError):
        ow.weights({"w": numbers(8)}, device=ow.Sharded(["nowhere"]))
    with pytest.raises(ow.UnknownNameError, match="pattern"):
        ow.weights({"w": numbers(8)}, device={"x*": ow.Sharded(pair)})
    with pytest.raises(ow.SchedulerError, match="buffer_type"):
        ow.weights({"w": numbers(8)}, device=ow.Sharded(pair), buffer_type=pair[0].default_buffer_type)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_no_device_holds_the_whole_and_the_whole_can_be_read(pair):
    array = numbers(40, 24)
    group = ow.weights({"w": array}, device=ow.Sharded({pair[0]: 3, pair[1]: 1}, axis=1))
    sizes = [sum(b.size for b in getattr(buffer, "buffers", [buffer])) for buffer in group.buffers]
    assert sizes == [40 * 18 * 4, 40 * 6 * 4]
    assert np.array_equal(ow.read(group["w"]), array)
    for part, columns in zip(shards_of(group["w"]).parts, (array[:, :18], array[:, 18:]), strict=True):
        assert np.array_equal(ow.read(part), columns)
    x = ow.input("x_memory", (2, 24))
    with ow.Scheduler(pair) as scheduler:
        used = scheduler.build(ow.linear(x, group["w"])).memory
    assert (used["left"].weights, used["right"].weights) == (40 * 18 * 4, 40 * 6 * 4)


def test_new_values_reach_every_part(pair):
    group = ow.weights(
        {"w": numbers(8, 12), "v": numbers(6, 8)}, device={"w": ow.Sharded(pair, axis=1), "v": ow.Sharded(pair)}
    )
    x = ow.input("x_values", (3, 12))
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(ow.linear(ow.linear(x, group["w"]), group["v"]))
        program.run(x_values=numbers(3, 12))
        w, v = numbers(8, 12, seed=1), numbers(6, 8, seed=2)
        group.write({"w": w, "v": v})
        assert np.array_equal(program.run(x_values=numbers(3, 12)), numbers(3, 12) @ w.T @ v.T)
    assert np.array_equal(ow.read(group["w"]), w)


def test_weights_are_split_without_bytes_for_planning(pair):
    group = ow.weights({"w": ow.Spec((8, 12))}, device=ow.Sharded(pair))
    with ow.Scheduler(pair) as scheduler:
        plan = scheduler.partition(ow.linear(ow.input("x_plan", (3, 12)), group["w"]))
    assert [plan.memory[d.name].weights for d in pair] == [4 * 12 * 4, 4 * 12 * 4]


def test_a_part_on_a_device_that_a_scheduler_lacks_is_copied(pair):
    w = ow.weights({"w": numbers(8, 12)}, device=ow.Sharded(pair))["w"]
    with ow.Scheduler(pair[0]) as scheduler:
        program = scheduler.build(ow.linear(ow.input("x_lack", (3, 12)), w))
        assert np.array_equal(program.run(x_lack=numbers(3, 12)), numbers(3, 12) @ numbers(8, 12).T)


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def network(pair):
    names = {"up": numbers(24, 12), "down": numbers(12, 24, seed=1)}
    group = ow.weights(names, device={"up": ow.Sharded(pair), "down": ow.Sharded(pair, axis=1)})
    x = ow.input("x_network", (5, 12))
    hidden = ow.relu(ow.linear(x, group["up"]))
    return x, hidden, ow.linear(hidden, group["down"]) + x


def expected(value):
    return np.maximum(value @ numbers(24, 12).T, 0) @ numbers(12, 24, seed=1).T + value


def test_runs_overlap_over_slots(pair, network):
    values = [numbers(5, 12, seed=i) for i in range(12)]
    with ow.Scheduler(pair, parallel=3) as scheduler:
        program = scheduler.build(network[2])
        assert program.slots == 3
        futures = [program.submit(x_network=value) for value in values]
        for future, value in zip(futures, values, strict=True):
            assert np.array_equal(future.result(), expected(value))


def test_programs_built_before_go_on(pair, network):
    with ow.Scheduler(pair) as scheduler:
        before = scheduler.build(network[0] * 2.0)
        program = scheduler.build(network[2])
        assert [stream.has_thread for stream in scheduler.streams] == [True, True]
        for seed in range(3):
            value = numbers(5, 12, seed=seed)
            assert np.array_equal(before.run(x_network=value), value * 2)
            assert np.array_equal(program.run(x_network=value), expected(value))
        assert scheduler.build(network[2]) is program


def test_outputs_are_looked_up_by_the_tensors_of_the_graph(pair, network):
    _, hidden, out = network
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build({"out": out, "hidden": hidden}, pins={out: pair[1]})
        value = numbers(5, 12, seed=3)
        got = program.run(x_network=value)
        assert np.array_equal(got["out"], expected(value))
        assert np.array_equal(got["hidden"], np.maximum(value @ numbers(24, 12).T, 0))
        assert np.array_equal(program.read(out), expected(value))
        assert program.device_of(out) is pair[1]
        seen = {}
        with program.observe(lambda node, array: seen.update({node.name: array}), [out]):
            program.run(x_network=value)
        assert [array.tolist() for array in seen.values()] == [expected(value).tolist()]


@pytest.mark.parametrize("parallel", [False, True])
def test_a_lost_device_is_replaced_by_the_others_with_the_values_of_the_host(parallel):
    lost = Fragile("gpu")
    devices = [Separate("stays"), lost]
    w, v = numbers(24, 12), numbers(12, 24, seed=1) / 8
    group = ow.weights({"w": w, "v": v}, device={"w": ow.Sharded(devices), "v": ow.Sharded(devices, axis=1)})
    x = ow.input("x_lost", (5, 12))
    out = ow.linear(ow.exp(-ow.linear(x, group["w"])), group["v"])
    value = numbers(5, 12) / 8
    want = np.exp(-(value @ w.T)) @ v.T
    scheduler = ow.Scheduler([*devices, HostDevice()], parallel=parallel)
    np.testing.assert_allclose(scheduler.build(out).run(x_lost=value), want, rtol=1e-4, atol=1e-5)
    lost.lost = True
    with pytest.raises(ow.ExecutionError, match="fell off the bus") as caught:
        scheduler.build(out).run(x_lost=value)
    assert isinstance(caught.value.__cause__, ow.DeviceLostError)
    assert caught.value.device == "gpu", str(caught.value)
    with scheduler.without("gpu") as rest:
        np.testing.assert_allclose(rest.build(out).run(x_lost=value), want, rtol=1e-4, atol=1e-5)
        assert set(rest.build(out).memory) == {"stays", "hostdevice"}
