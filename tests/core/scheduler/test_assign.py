"""Which device runs which node, and the cause that is kept for it (design: assignment in five passes)."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Usage
from opweave.runtime.host.device import HostDevice
from tests.support.devices import BASIC, Beside, Plain, Separate


def split(outputs, *devices, pins=None, **options):
    return ow.Scheduler(list(devices), **options).partition(outputs, pins)


def chain(x: ow.Tensor, n: int) -> list[ow.Tensor]:
    nodes = [x]
    for _ in range(n):
        nodes.append(ow.exp(nodes[-1]))
    return nodes[1:]


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (4, 4))


def test_without_any_decision_the_first_device_that_supports_a_node_runs_it(x):
    first, second = Separate("first"), Separate("second")
    plan = split(ow.exp(x), first, second)
    assert plan.device_of(ow.exp(x)) is first
    assert plan.cause_of(ow.exp(x)) == "priority"


def test_an_op_the_first_device_lacks_goes_to_the_next_and_the_reason_is_kept(x):
    first, second = Separate("first", ["add"]), Separate("second")
    y = ow.exp(x) + x
    plan = split(y, first, second)
    assert plan.device_of(y.srcs[0]) is second
    assert "not on first: no kernel for exp" in plan.explain()


def test_pins_hold_and_neighbours_grow_from_them(x):
    first, second = Separate("first"), Separate("second")
    a, b, c = chain(x, 3)
    plan = split(c, first, second, pins={b: second})
    assert [plan.device_of(t) for t in (a, b, c)] == [second, second, second]
    assert [plan.cause_of(t) for t in (a, b, c)] == ["expand-up", "pinned", "expand-down"]


def test_devices_before_the_last_grow_first(x):
    first, last = Separate("first"), Separate("last")
    nodes = chain(x, 4)
    plan = split(nodes[-1], first, last, pins={nodes[0]: last, nodes[3]: first})
    assert [plan.device_of(t).name for t in nodes] == ["last", "first", "first", "first"]


def test_growth_stops_at_a_node_the_device_does_not_run(x):
    first, second = Separate("first", ["exp"]), Separate("second")
    a = ow.exp(x)
    b = ow.neg(a)
    c = ow.exp(b)
    plan = split(c, first, second, pins={a: first})
    assert [plan.device_of(t).name for t in (a, b, c)] == ["first", "second", "first"]


def test_a_pin_to_a_device_that_refuses_the_node_is_an_error_with_reasons(x):
    with pytest.raises(ow.UnsupportedOpError, match=r"pinned to first.*refuses") as caught:
        split(ow.exp(x), Separate("first", ["add"]), Plain(), pins={ow.exp(x): "first"})
    assert caught.value.reasons["first"] == "no kernel for exp"


def test_a_node_nobody_runs_is_an_error_with_every_reason(x):
    with pytest.raises(ow.UnsupportedOpError, match="no device runs exp") as caught:
        split(ow.exp(x), Separate("a", ["add"]), Separate("b", ["mul"]))
    assert caught.value.reasons == {"a": "no kernel for exp", "b": "no kernel for exp"}
    assert __file__ in str(caught.value), "the error names the place where the tensor was built"


def test_a_pin_to_a_device_that_is_not_here_is_an_error(x):
    with pytest.raises(ow.SchedulerError, match="'elsewhere' is not a device"):
        split(ow.exp(x), Plain(), pins={ow.exp(x): "elsewhere"})


def test_placed_weights_decide_and_the_rest_follows(x):
    first, second = Separate("first"), Separate("second")
    w = ow.weights({"w0": np.eye(4, dtype="f"), "w1": np.eye(4, dtype="f")}, device={"w0": first, "w1": second})
    h = ow.linear(x, w["w0"])
    r = ow.relu(h)
    y = ow.linear(r, w["w1"])
    plan = split(y, first, second)
    assert [plan.device_of(t).name for t in (h, r, y)] == ["first", "first", "second"]
    assert [plan.cause_of(t) for t in (h, r, y)] == ["weights", "expand-down", "weights"]


def test_the_largest_placed_weight_decides_and_vectors_do_not():
    x = ow.input("x", (4, 4))
    first, second = Separate("first"), Separate("second")
    w = ow.weights({"big": np.ones((4, 4), "f"), "bias": np.ones(4, "f")}, device={"big": second, "bias": first})
    y = ow.linear(x, w["big"], w["bias"])
    assert split(y, first, second).device_of(y) is second


def test_unplaced_weights_decide_nothing(x):
    first, second = Separate("first"), Separate("second")
    w = ow.weights({"w": np.eye(4, dtype="f")})
    y = ow.linear(x, w["w"])
    assert split(y, first, second).cause_of(y) == "priority"


def test_a_device_of_higher_priority_brings_host_weights_for_ops_it_wants(x):
    gpu, cpu = Separate("gpu", offload=["linear"]), Plain("cpu")
    w = ow.weights({"w": np.eye(4, dtype="f")}, device=cpu)
    leaf = w["w"].leaf
    assert leaf is not None
    assert leaf.placement is not None
    assert leaf.placement.buffer.usage is Usage.WEIGHTS
    y = ow.linear(x, w["w"])
    plan = split(y, gpu, cpu)
    assert (plan.device_of(y).name, plan.cause_of(y)) == ("gpu", "offload")
    assert {c.cause for c in plan.copies} == {"weight-fetch"}, "the input is fed where it is read"
    kept = split(y, gpu, cpu, op_offload=False)
    assert (kept.device_of(y).name, kept.cause_of(y)) == ("cpu", "weights")


def test_offload_gives_the_same_values_and_each_streamed_weight_starts_a_split(x):
    gpu, cpu = Separate("gpu", offload=["linear"]), Plain("cpu")
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((4, 4)).astype("f") for i in range(3)}
    w = ow.weights(arrays, device=cpu)
    y = x
    for name in arrays:
        y = ow.relu(ow.linear(y, w[name]))
    program = ow.Scheduler([gpu, cpu]).build(y)
    assert len(program.splits) == 3
    values = expected = rng.standard_normal((4, 4)).astype("f")
    for a in arrays.values():
        expected = np.maximum(expected @ a.T, 0)
    np.testing.assert_allclose(program.run(x=values), expected, rtol=1e-5)
    assert program.memory["gpu"].temporaries <= 4 * 64, "a streamed weight's memory is used again"


def test_an_accelerator_that_shares_the_memory_takes_what_it_wants(x):
    beside, cpu = Beside("beside", want=["matmul"]), Plain("cpu")
    a = ow.exp(x)
    y = ow.matmul(a, x)
    plan = split(y, beside, cpu, pins={a: cpu})
    assert (plan.device_of(y).name, plan.cause_of(y)) == ("beside", "upgrade")
    assert plan.n_copies == 0, "between devices that share memory nothing is copied"


def test_pinned_nodes_are_not_upgraded(x):
    beside, cpu = Beside("beside", want=["exp"]), Plain("cpu")
    assert split(ow.exp(x), beside, cpu, pins={ow.exp(x): cpu}).device_of(ow.exp(x)) is cpu


def test_open_nodes_go_where_most_of_their_sources_are(x):
    first, second = Separate("first", set(BASIC) - {"exp"}), Separate("second")
    a, b = ow.exp(x), ow.exp(ow.scale(x, 2.0))
    y = ow.add(a, b)
    plan = split(y, first, second)
    assert (plan.device_of(y).name, plan.cause_of(y)) == ("second", "most-inputs")


def test_a_writer_runs_where_its_state_lies(x):
    first, second = Separate("first"), Separate("second")
    cache = ow.state("cache", (8, 4), device=second)
    written = ow.assign(cache[0:4], x)
    plan = split(written, first, second)
    assert (plan.device_of(written).name, plan.cause_of(written)) == ("second", "storage")


def test_views_lie_where_their_root_lies(x):
    first, second = Separate("first"), Separate("second")
    a = ow.exp(x)
    view = a[1:3]
    y = ow.exp(view)
    plan = split(y, first, second, pins={a: second, y: first})
    assert plan.device_of(view) is second
    assert plan.cause_of(view) == "view"
    assert [c.tensor for c in plan.copies] == [view], "only the viewed bytes cross"
    assert plan.copies[0].nbytes == 2 * 4 * 4


def test_inputs_enter_where_their_readers_agree_else_on_the_last_device(x):
    first, last = Separate("first"), Separate("last")
    a = ow.exp(x)
    assert split(a, first, last).device_of(x) is first
    b = ow.neg(x)
    assert split([a, b], first, last, pins={a: first, b: last}).device_of(x) is last


def test_host_runs_what_no_other_device_knows(x):
    y = ow.custom(lambda a: a * 3, x, like=x)
    plan = split(y, Separate("first"), HostDevice())
    assert plan.cause_of(y) == "host"


def test_a_device_is_named_once():
    device = Plain("cpu")
    with pytest.raises(ow.SchedulerError, match="named twice"):
        ow.Scheduler([device, device])
    with pytest.raises(ow.SchedulerError, match="at least one"):
        ow.Scheduler([])


def test_equal_streams_of_one_device_are_two_targets(x):
    device = Plain("cpu")
    with device.open() as a, device.open() as b:
        plan = ow.Scheduler([a, b]).partition(ow.exp(ow.neg(x)), {ow.neg(x): b, ow.exp(ow.neg(x)): a})
        assert len(plan.splits) == 2
        assert plan.n_copies == 0
