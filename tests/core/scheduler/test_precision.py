"""`precision`: what a program allows, which kernel then runs, what it is given, and what reports say of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import opweave as ow
from opweave.graph.graph import rebuilt
from opweave.graph.precision import Precision
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.place.precision import converted_leaf
from tests.support.evaluate import evaluate
from tests.support.rounding import Rounding, named, nmse, to_bf16, to_int8

F = np.float32
Q8 = ow.as_dtype("q8_0")


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@pytest.fixture
def device() -> Rounding:
    return Rounding()


# --- what runs ------------------------------------------------------------------------------------------------------


def test_nothing_is_rounded_unless_it_is_allowed(device):
    x, w = values(4, 8), values(6, 8, seed=1)
    weight = ow.weights({"w": w})["w"]
    f = ow.compile(lambda x: ow.linear(x, weight), devices=[device])
    np.testing.assert_allclose(f(x), x.astype(np.float64) @ w.T, rtol=1e-5, atol=1e-6)
    assert device.calls == []


def test_products_are_computed_in_bf16_where_that_is_allowed_and_the_rest_in_f32(device):
    x, w = values(4, 8), values(6, 8, seed=1)
    weight = ow.weights({"w": w})["w"]
    f = ow.compile(lambda x: ow.exp(ow.linear(x, weight)), devices=[device], precision="bf16")
    product = to_bf16(to_bf16(x) @ to_bf16(w).T)
    np.testing.assert_allclose(f(x), np.exp(product), rtol=1e-6)


@pytest.mark.parametrize(("stored", "rounds"), [("f32", False), ("f16", False), ("bf16", True)])
def test_int8_rounds_operands_beside_weights_that_are_stored_rounded_and_no_others(device, stored, rounds):
    x, w = values(4, 8), values(6, 8, seed=1).astype(ow.as_dtype(stored).numpy)
    weight = ow.weights({"w": w})["w"]

    def step(x):
        return ow.linear(x, weight if stored == "f32" else weight.astype("f32"))

    f = ow.compile(step, devices=[device, HostDevice()], precision="int8")
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    found = f(x)
    if rounds:
        np.testing.assert_allclose(found, to_bf16(to_bf16(x) @ w.astype(F).T), rtol=1e-6)
        assert np.abs(found - exact).max() > 1e-3
    else:
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_the_roughest_kernel_that_is_allowed_runs(device):
    x, w = values(4, 64), ow.quantize(values(6, 64, seed=1), "q8_0")
    weight, exact = ow.weights({"w": w})["w"], ow.dequantize(w).astype(np.float64)
    want: dict[Precision, np.ndarray] = {"exact": x @ exact.T, "bf16": x @ exact.T, "int8": to_int8(x) @ exact.T}
    for allowed, result in want.items():
        f = ow.compile(lambda x: ow.linear(x, weight), devices=[device], precision=allowed)
        np.testing.assert_allclose(f(x), result, rtol=1e-5, atol=1e-5)
        assert device.calls[-1][0] == ("int8" if allowed == "int8" else "exact")
    assert 1e-6 < nmse(want["int8"], want["exact"]) < 1e-4


def test_a_device_with_rough_kernels_only_says_what_has_to_be_allowed():
    device = Rounding(exact=False)
    weight = ow.weights({"w": ow.quantize(values(6, 64), "q8_0")})["w"]
    output = ow.linear(ow.input("x", (4, 64)), weight)
    with ow.Scheduler([device]) as scheduler:
        with pytest.raises(ow.UnsupportedOpError, match="computes in int8, and exact is asked for"):
            scheduler.build(output)
        with pytest.raises(ow.UnsupportedOpError, match="computes in int8, and bf16 is asked for"):
            scheduler.build(output, precision="bf16")
        assert scheduler.build(output, precision="int8").run(x=values(4, 64)).shape == (4, 6)


@pytest.mark.parametrize("dtype", ["f64", "i32"])
def test_results_in_f64_and_integers_are_always_exact(device, dtype):
    output = ow.matmul(ow.input("a", (4, 4), dtype), ow.input("b", (4, 4), dtype))
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(output, precision="int8")
        a = np.arange(16).reshape(4, 4).astype(ow.as_dtype(dtype).numpy)
        np.testing.assert_array_equal(program.run(a=a, b=a), a @ a)
        assert [row.precision for row in program.explain().nodes] == ["exact"]


# --- whose precision it is ------------------------------------------------------------------------------------------


def layers() -> ow.Tensor:
    x = ow.input("x", (4, 8))
    for i in range(3):
        with ow.scope(f"layer{i}"):
            x = ow.relu(ow.matmul(x, ow.input(f"w{i}", (8, 8)))).named("out")
    return x


def test_by_pattern_of_node_names_the_first_that_matches(device):
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(layers(), precision={"layer1/*": "exact", "layer[12]/*": "bf16"})
        assert named(program.explain().nodes) == {
            "layer0/matmul": "exact", "layer0/out": "exact", "layer1/matmul": "exact", "layer1/out": "exact",
            "layer2/matmul": "bf16", "layer2/out": "exact",
        }  # fmt: skip


def test_the_scheduler_has_a_default_and_builds_have_their_own(device):
    output = layers()
    with ow.Scheduler([device], precision="bf16") as scheduler:
        rough, exact = scheduler.build(output), scheduler.build(output, precision="exact")
        assert rough is not exact
        assert scheduler.build(output, precision="bf16") is rough
        assert scheduler.build(output, precision={"*": "bf16"}) is rough
        assert set(named(rough.explain().nodes).values()) == {"exact", "bf16"}
        assert set(named(exact.explain().nodes).values()) == {"exact"}
        planned = scheduler.partition(output)
        assert named(planned.explain().nodes) == named(rough.explain().nodes)
        shared = ow.compile(output, devices=scheduler)
        assert shared.program(*[values(4, 8)] * 4) is rough


def test_a_scheduler_without_a_lost_device_allows_the_same(device):
    other = Rounding("other")
    with ow.Scheduler([device, other], precision={"layer0/*": "bf16"}).without(device) as rest:
        assert named(rest.build(layers()).explain().nodes)["layer0/matmul"] == "bf16"


def test_programs_placed_by_cost_allow_it_too(device):
    with ow.Scheduler([device, HostDevice()], placement="cost", precision="bf16") as scheduler:
        program = scheduler.build(layers(), pins=dict.fromkeys(ow.Graph(layers()).nodes, device))
        assert "bf16" in named(program.explain().nodes).values()


def test_observing_nodes_changes_no_precision(device):
    output, seen = layers(), {}
    feeds = {"x": values(4, 8)} | {f"w{i}": values(8, 8, seed=i) for i in range(3)}
    with ow.Scheduler([device], precision="bf16") as scheduler:
        program = scheduler.build(output)
        want = program.run(feeds)
        with program.observe(lambda node, value: seen.update({node: copy.copy(value)})):
            program.run(feeds)
    np.testing.assert_array_equal(seen[output], want)


@pytest.mark.parametrize(
    ("precision", "error", "message"),
    [
        ("f16", ow.UnknownNameError, "no precision named 'f16'"),
        ("int4", ow.UnknownNameError, "did you mean 'int8'"),
        ({"*": "half"}, ow.UnknownNameError, "no precision named 'half'"),
        ({"layer7/*": "bf16"}, ow.UnknownNameError, "pattern of precision=, and matches none"),
        ({"*/out": "bf16"}, ow.UnknownNameError, "pattern of precision=, and matches none"),
        (8, ow.SchedulerError, "precision is one of exact, bf16, int8, or a mapping"),
        ({8: "bf16"}, ow.SchedulerError, "precision maps names of nodes"),
    ],
)
def test_what_is_no_precision_is_refused(device, precision, error, message):
    with ow.Scheduler([device]) as scheduler, pytest.raises(error, match=message):
        scheduler.build(layers(), precision=precision)
    with pytest.raises(error, match=message):
        ow.compile(layers(), devices=[device], precision=precision).program(*[values(4, 8)] * 4)


def test_explain_shows_it_in_text_rows_and_page(device):
    with ow.Scheduler([device]) as scheduler:
        found = scheduler.build(layers(), precision={"layer0/*": "bf16"}).explain()
    (line,) = [line for line in str(found).splitlines() if "layer0/matmul" in line]
    assert line.endswith("in bf16")
    assert str(found).count("in bf16") == 1
    assert found.html().count("in bf16") == 1


# --- weights --------------------------------------------------------------------------------------------------------


def test_weights_are_rounded_once_for_all_programs_also_through_views(device):
    weight, bias = ow.weights({"w": values(8, 8), "b": values(8)}).values()
    x = ow.input("x", (4, 8))
    outputs = [x @ weight, ow.linear(x, weight, bias), x @ weight[:, :4].T.T]
    fed = values(4, 8, seed=2)
    with ow.Scheduler([device], precision="bf16") as scheduler:
        for output in outputs:
            program = scheduler.build(output)
            leaves = {leaf.name: leaf for leaf in program.partition.leaves if leaf.dtype.name == "bf16"}
            assert leaves["w"] is converted_leaf(weight, ow.as_dtype("bf16"))
            got = program.run(x=fed)
            with ow.Scheduler(HostDevice()) as host:
                assert nmse(got, host.build(output).run(x=fed)) < 3e-5
    assert [types for _, types in device.calls] == [("f32", "bf16"), ("f32", "bf16", "bf16"), ("f32", "bf16")]


def test_weights_of_another_device_are_rounded_there():
    first, second = Rounding("first"), Rounding("second")
    weight = ow.weights({"w": values(8, 8)}, device=second)["w"]
    with ow.Scheduler([first, second], precision="bf16") as scheduler:
        program = scheduler.build(ow.input("x", (4, 8)) @ weight)
        program.run(x=values(4, 8))
        assert second.calls == [("bf16", ("f32", "bf16"))]
        (rounded,) = [leaf for leaf in program.partition.leaves if leaf.dtype.name == "bf16"]
        assert rounded.leaf is not None
        assert rounded.leaf.placement is not None
        assert rounded.leaf.placement.buffer.device is second


def test_rounded_weights_of_a_lost_device_are_made_anew():
    first, second = Rounding("first"), Rounding("second")
    weight = ow.weights({"w": values(8, 8)}, device=first)["w"]
    output, fed = ow.input("x", (4, 8)) @ weight, values(4, 8)
    scheduler = ow.Scheduler([first, second], precision="bf16")
    want = scheduler.build(output).run(x=fed)
    with scheduler.without(first) as rest:
        program = rest.build(output)
        np.testing.assert_array_equal(program.run(x=fed), want)
        assert program.device_of(output) is second
        assert not any(leaf.leaf.placement and leaf.leaf.placement.buffer.device is first
                       for leaf in program.partition.leaves if leaf.leaf)  # fmt: skip


def test_rounded_weights_of_one_mapping_share_a_buffer(device):
    weights = ow.weights({f"w{i}": values(8, 8, seed=i) for i in range(3)})
    with ow.Scheduler([device], precision="bf16") as scheduler:
        program = scheduler.build([ow.input("x", (4, 8)) @ w for w in weights.values()])
        program.run(x=values(4, 8))
        copies = [t.leaf.copies for t in program.partition.leaves if t.dtype.name == "bf16" and t.leaf is not None]
        assert len(copies) == 3
        assert len({id(location.buffer) for leaf in copies for location in leaf.values()}) == 1


def test_other_operands_are_rounded_in_each_run(device):
    state, x = ow.state("s", (8, 8)), ow.input("x", (4, 8))
    with ow.Scheduler([device], precision="bf16") as scheduler:
        scheduler.build(x @ state).run(x=values(4, 8))
    assert device.calls == [("bf16", ("f32", "f32"))]


def test_planning_needs_no_bytes(device):
    weight = ow.weights({"w": ow.Spec((8, 8))})["w"]
    with ow.Scheduler([device], precision="bf16") as scheduler:
        planned = scheduler.partition(ow.input("x", (4, 8)) @ weight)
    assert [row.precision for row in planned.explain().nodes] == ["bf16"]


def test_rebuilding_keeps_views_and_states_apart():
    x, y = ow.input("x", (4, 6)), ow.input("y", (4, 6))
    out = ow.exp(x.T[1:3]) + x[:, 2]
    (again,) = rebuilt((out,), {x: y})
    fed = values(4, 6)
    np.testing.assert_array_equal(evaluate(again, {y: fed}), evaluate(out, {x: fed}))
    assert [leaf.name for leaf in ow.Graph((again,)).leaves] == ["y"]
