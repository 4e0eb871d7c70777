"""Devices that are not there: what they run, what they are predicted to take, and clusters of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave_cost.cluster import read_cluster
from opweave_cost.divide import Load, divide, what_if
from tests.support.devices import Plain, Separate


@pytest.fixture(autouse=True)
def profiles(monkeypatch, tmp_path):
    """Nothing is written to the user's cache."""
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (64, 256))


class TestSimulate:
    def test_a_step_takes_its_launch_and_the_larger_of_bytes_and_operations(self, x):
        device = opweave_cost.simulate("gpu", flops=1e9, bandwidth=1e8, launch=1e-3, link=(0.5, 1e6))
        w = ow.weights({"w": ow.Spec((32, 256))})["w"]
        e, y = ow.exp(x), ow.linear(x, w)
        predicted = ow.Scheduler(device).partition([e, y]).predicted
        assert predicted.nodes[e] == pytest.approx(1e-3 + 2 * 64 * 256 * 4 / 1e8), "bytes decide"
        assert predicted.nodes[y] == pytest.approx(
            1e-3 + max(2 * 64 * 32 * 256 / 1e9, 4 * (64 * 256 + 32 * 256 + 64 * 32) / 1e8)
        )
        transfers = 3 * 0.5 + (e.nbytes + y.nbytes + x.nbytes) / 1e6
        assert predicted.copies == pytest.approx(transfers)
        assert predicted.seconds == pytest.approx(transfers + sum(predicted.nodes.values()))

    def test_parts_of_weights_are_computed_at_once(self, x):
        fast, slow = (opweave_cost.simulate(n, flops=f, bandwidth=1e18, launch=1e-9, link=(1e-9, 1e18)) for n, f in
                      (("fast", 2e9), ("slow", 1e9)))  # fmt: skip
        up, down = ow.Spec((1024, 256)), ow.Spec((256, 1024))

        def predicted(shares):
            w = ow.weights({"up": up, "down": down},
                           device={"up": ow.Sharded(shares), "down": ow.Sharded(shares, axis=1)})  # fmt: skip
            y = ow.linear(ow.linear(x, w["up"]), w["down"])
            return ow.Scheduler([fast, slow]).partition(y).predicted

        whole = 2 * 2 * 64 * 256 * 1024  # operations
        half, fair = predicted({fast: 1, slow: 1}), predicted({fast: 2, slow: 1})
        assert half.seconds == pytest.approx(whole / 2 / 1e9, rel=1e-2), "the slowest decides"
        assert 1 / 3 < fair.busy["slow"] * 1e9 / whole < 0.36
        assert fair.seconds == pytest.approx(max(fair.busy.values()), rel=2e-2)
        slow_link = opweave_cost.simulate("far", flops=1e9, bandwidth=1e18, launch=1e-9, link=(0.5, 1e18))
        w = ow.weights({"w": down}, device=ow.Sharded([fast, slow_link], axis=1))["w"]
        y = ow.linear(ow.input("wide", (64, 1024)), w)
        far = ow.Scheduler([fast, slow_link]).partition(y).predicted
        assert far.seconds >= 1.0, "the piece of the input, and the partial sum back"

    def test_throughput_may_depend_on_the_dtype(self):
        device = opweave_cost.simulate("gpu", flops={"f32": 1e9, "f16": 4e9}, bandwidth=1e15)
        seconds = {}
        for dtype in ("f32", "f16", "f64"):
            a = ow.input(f"a {dtype}", (256, 256), dtype)
            y = a @ a
            seconds[dtype] = ow.Scheduler(device).partition(y).predicted.nodes[y]
        assert seconds["f32"] == pytest.approx(4 * seconds["f16"], rel=1e-3)
        assert seconds["f64"] == pytest.approx(seconds["f32"], rel=1e-3), "as f32 where nothing else was said"

    def test_it_runs_what_the_device_runs_that_it_is_like(self, x):
        real = Separate("real", ["exp"])
        device = opweave_cost.simulate("gpu", like=real, flops=1e12, bandwidth=1e12, launch=1e-6, link=1e10)
        plan = ow.Scheduler([device, Plain()]).partition(ow.neg(ow.exp(x)))
        assert plan.device_of(ow.exp(x)) is device
        assert "not on gpu: no kernel for neg" in plan.explain()

    def test_ops_narrow_what_it_runs(self, x):
        device = opweave_cost.simulate("npu", flops=1e12, bandwidth=1e12, ops=["linear"])
        with pytest.raises(ow.UnsupportedOpError, match="no device runs exp") as caught:
            ow.Scheduler(device).partition(ow.exp(x))
        assert caught.value.reasons == {"npu": "no kernel for exp"}
        with pytest.raises(ow.UnknownNameError, match=r"operation named 'linaer'; did you mean .*'linear'"):
            opweave_cost.simulate("npu", flops=1, bandwidth=1, ops=["linaer"])

    def test_figures_that_are_not_given_are_those_of_the_device_that_it_is_like(self):
        real = Separate("real", ["exp", "add", "linear"])
        measured = opweave_cost.profile(real)
        same = opweave_cost.profile(opweave_cost.simulate("same", like=real))
        assert same.costs == measured.costs
        wider = opweave_cost.profile(opweave_cost.simulate("wider", like=real, bandwidth=2 * measured.bandwidth))
        assert wider.bandwidth == pytest.approx(2 * measured.bandwidth)
        assert wider.launch == pytest.approx(measured.launch)
        assert wider.flops("f32") == pytest.approx(measured.flops("f32"), rel=1e-6)

    def test_it_plans_and_does_not_run(self, x):
        device = opweave_cost.simulate("gpu", flops=1e12, bandwidth=1e12)
        with ow.Scheduler([device, Plain()]) as scheduler:
            assert scheduler.partition(ow.exp(x)).predicted.seconds > 0
            with pytest.raises(ow.SchedulerError, match=r"gpu is simulated: Scheduler.partition plans"):
                scheduler.build(ow.exp(x))
        with pytest.raises(ow.SchedulerError, match="gpu is simulated"):
            ow.weights({"w": np.zeros(4)}, device=device)
        with pytest.raises(ow.SchedulerError, match="gpu is simulated"):
            ow.state("s", (4,), device=device)

    def test_direct_links_between_devices(self, x):
        far = {"host": (1.0, 1e12)}
        a = opweave_cost.simulate("a", flops=1e12, bandwidth=1e12, link=far, ops=["exp"])
        b = opweave_cost.simulate("b", flops=1e12, bandwidth=1e12, link={**far, "a": (0.25, 1e12)}, ops=["neg"])
        c = opweave_cost.simulate("c", flops=1e12, bandwidth=1e12, link=far, ops=["neg"])
        y = ow.neg(ow.exp(x))
        assert ow.Scheduler([a, b]).partition(y).predicted.copies == pytest.approx(2.25, rel=1e-3)
        assert ow.Scheduler([a, c]).partition(y).predicted.copies == pytest.approx(4, rel=1e-3), "by way of the host"

    @pytest.mark.parametrize(
        ("figures", "message"),
        [
            ({}, "needs like=, or flops= and bandwidth="),
            ({"flops": 1e9}, "needs like=, or flops= and bandwidth="),
            ({"flops": 0, "bandwidth": 1}, "flops of .* is 0"),
            ({"flops": 1, "bandwidth": -1}, "bandwidth is -1"),
            ({"flops": 1, "bandwidth": 1, "launch": -1}, "not negative"),
            ({"flops": 1, "bandwidth": 1, "launch": float("nan")}, "launch is nan"),
            ({"flops": 1, "bandwidth": 1, "memory": float("inf")}, "memory is inf"),
            ({"flops": 1, "bandwidth": 1, "memory": "1 GiB"}, "memory is '1 GiB'"),
            ({"flops": "fast", "bandwidth": 1}, "flops of .* is 'fast'"),
            ({"flops": {}, "bandwidth": 1}, "flops names no dtype"),
            ({"flops": 1, "bandwidth": True}, "bandwidth is True"),
            ({"flops": 1, "bandwidth": 1, "ops": "add"}, "ops is a list of names, not 'add'"),
            ({"like": 3}, "like is a device or its name, not int"),
            ({"flops": 1, "bandwidth": 1, "link": (float("nan"), 1)}, "bytes per second"),
            ({"flops": 1, "bandwidth": 1, "link": 0}, "bytes per second"),
            ({"flops": 1, "bandwidth": 1, "link": (1,)}, "bytes per second"),
            ({"flops": 1, "bandwidth": 1, "link": {"host": "16 GB"}}, "bytes per second"),
        ],
    )
    def test_figures_that_make_no_sense(self, figures, message):
        with pytest.raises(ow.SchedulerError, match=message):
            opweave_cost.simulate("gpu", **figures)

    def test_a_dtype_that_does_not_exist(self):
        with pytest.raises(ow.UnknownNameError, match="no dtype named 'f31'"):
            opweave_cost.simulate("gpu", flops={"f31": 1e9}, bandwidth=1e9)

    def test_memory_is_that_of_the_real_planner(self):
        rows = ow.input("rows", (64, 64))
        w = ow.weights({"w": np.eye(64, dtype=np.float32)})["w"]
        y = ow.relu(ow.linear(ow.exp(rows), w) + rows)
        with ow.Scheduler(Separate("real")) as real:
            planned = real.build(y).memory["real"]
        device = opweave_cost.simulate(
            "gpu", like=Separate("other"), flops=1e12, bandwidth=1e12, launch=1e-6, link=1e10
        )
        assert ow.Scheduler(device).partition(y).predicted.memory["gpu"] == planned


CLUSTER = """
[[group]]
name = "gpu"
count = {count}
flops = {{ f32 = 2e13, f16 = 2e14 }}
bandwidth = 2e12
launch = 4e-6
memory = "{memory}"
host = {{ latency = 1e-5, bandwidth = 2.5e10 }}
link = {{ latency = 2e-6, bandwidth = 2e11 }}
{more}
"""


def cluster(tmp_path: Path, count: int = 1000, memory: str = "1 GiB", more: str = "") -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(count=count, memory=memory, more=more))
    return path


def layers(n: int, width: int = 1024) -> ow.Tensor:
    w = ow.weights({str(i): ow.Spec((width, width)) for i in range(n)})
    h = ow.input("x", (16, width))
    for i in range(n):
        h = ow.relu(ow.linear(h, w[str(i)]))
    return h


class TestCluster:
    def test_one_device_is_enough_where_memory_is(self, tmp_path):
        plan = what_if(layers(8), read_cluster(cluster(tmp_path)))
        assert list(plan.predicted.busy) == ["gpu:0"]
        assert plan.n_copies == 0

    def test_what_does_not_fit_is_cut_into_consecutive_parts_that_do(self, tmp_path):
        plan = what_if(layers(40), read_cluster(cluster(tmp_path, memory="50 MiB")))
        predicted = plan.predicted
        assert len(predicted.busy) == 4, "160 MiB of weights on devices of 50 MiB"
        assert not predicted.short
        assert all(sum(use) <= 50 << 20 for use in predicted.memory.values())
        assert plan.n_copies == 3
        assert [s.target.name for s in plan.splits] == [f"gpu:{i}" for i in range(4)]
        assert plan.cause_of(plan.splits[0].nodes[0]) == "cost"
        # Two between the host and the devices, three from one to the next.
        value = 16 * 1024 * 4
        assert predicted.copies == pytest.approx(2 * (1e-5 + value / 2.5e10) + 3 * (2e-6 + value / 2e11))

    def test_a_combined_group_splits_every_weight(self, tmp_path):
        y = layers(4, 8192)
        alone = what_if(y, read_cluster(cluster(tmp_path, count=1, memory="80 GiB"))).predicted
        plan = what_if(y, read_cluster(cluster(tmp_path, count=4, memory="80 GiB", more="combined = true")))
        predicted = plan.predicted
        whole = 4 * 8192 * 8192 * 4
        assert [use.weights for use in predicted.memory.values()] == [whole // 4] * 4
        # Reading the weights is nearly all of a step: a quarter of it, more launches, and the exchanges.
        assert alone.busy["gpu"] / 4 < max(predicted.busy.values()) < alone.busy["gpu"] / 2.8
        assert alone.seconds / 4 < predicted.seconds < alone.seconds / 2
        assert max(predicted.busy.values()) < 1.2 * min(predicted.busy.values())
        assert predicted.copies > 0
        assert (
            len([node for node in plan.partition.graph.nodes if node.op is not None and node.op.name == "linear"])
            == 4 * 4
        )
        again = what_if(y, read_cluster(cluster(tmp_path, count=1, memory="80 GiB"))).predicted
        assert again.seconds == alone.seconds, "the weights are whole again"

    def test_spread_for_runs_that_overlap(self, tmp_path):
        described = read_cluster(cluster(tmp_path, count=4))
        one, many = what_if(layers(40), described), what_if(layers(40), described, pipeline=True)
        assert len(many.predicted.busy) == 4
        assert many.predicted.interval == pytest.approx(one.predicted.interval / 4, rel=0.05)
        assert many.predicted.seconds > one.predicted.seconds, "a single run gains nothing"

    def test_too_little_memory_in_all_is_said(self, tmp_path):
        predicted = what_if(layers(40), read_cluster(cluster(tmp_path, count=2, memory="50 MiB"))).predicted
        assert set(predicted.short) == {"gpu:1"}
        assert predicted.short["gpu:1"] >= (160 - 2 * 50) << 20

    def test_groups_are_chosen_by_cost_and_by_what_they_run(self, tmp_path):
        more = """
[[group]]
name = "slow"
flops = 1e9
bandwidth = 1e9
"""
        path = cluster(tmp_path, more='ops = ["linear"]\n' + more)
        y = layers(2)
        plan = what_if(y, read_cluster(path))
        assert plan.device_of(y).name == "slow"
        assert plan.device_of(y.srcs[0]).name == "gpu:0"

    def test_links_between_groups(self, tmp_path):
        other = (
            '[[group]]\nname = "npu"\nflops = 1e13\nbandwidth = 1e13\nops = ["relu"]\n'
            "host = {latency = 1, bandwidth = 1e12}\n"
        )
        link = '[[link]]\nbetween = ["npu", "gpu"]\nlatency = 0.5\nbandwidth = 1e12\n'
        y = layers(1)
        gpu = 'ops = ["linear"]\n'
        without = what_if(y, read_cluster(cluster(tmp_path, more=gpu + other))).predicted.copies
        linked = what_if(y, read_cluster(cluster(tmp_path, more=gpu + other + link))).predicted.copies
        assert without == pytest.approx(2, rel=1e-2)
        assert linked == pytest.approx(1.5, rel=1e-2)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "it describes no devices"),
            ("[[group", "cluster.toml"),
            ('[[group]]\nname = "a"\nlike = "host"\ncombined = 1', "combined is true or false"),
            ("group = 3", "group has to be a list of tables"),
            ("[[group]]\ncount = 2", "group 1: a group needs a name"),
            ('[[group]]\nname = "a"\nflop = 1', "no key 'flop'; there are bandwidth, combined, count"),
            ('[[group]]\nname = "a"\ncount = 0', "count is a positive whole number, not 0"),
            ('[[group]]\nname = "a"\nflops = "1"\nbandwidth = 1', "flops is a number, not '1'"),
            ('[[group]]\nname = "a"\nflops = 1\nbandwidth = 1\nmemory = "80 gigs"', "memory is a number of bytes"),
            ('[[group]]\nname = "a"\nflops = 1\nbandwidth = 1\nlink = "fast"', "a link is bytes per second"),
            (
                '[[group]]\nname = "a"\nflops = 1\nbandwidth = 1\n[[link]]\nbetween = ["a", "b"]',
                "names two groups of a",
            ),
            ('[[group]]\nname = "a"', "needs like=, or flops= and bandwidth="),
            ('[[group]]\nname = "a"\nlike = 3', "like is the name of a device"),
        ],
    )
    def test_files_that_make_no_sense(self, tmp_path, text, message):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        with pytest.raises(ow.SchedulerError, match=message):
            read_cluster(path)

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(ow.SchedulerError, match="cannot read the cluster file"):
            read_cluster(tmp_path / "none.toml")


class TestCut:
    def test_the_longest_part_is_as_short_as_possible(self):
        loads = [Load(s, 0, {}) for s in (5, 1, 1, 1, 1, 1, 5, 2)]

        def longest(ends: list[int]) -> float:
            return max(sum(load.seconds for load in loads[a:b]) for a, b in zip([0, *ends], ends, strict=False))

        for count in range(1, 9):
            best = min(longest([*ends, 8]) for ends in _ways(8, count))
            found = divide(loads, count, 0, pipeline=True)
            assert len(found) <= count
            assert longest(found) == pytest.approx(best)

    def test_a_leaf_that_several_nodes_read_lies_there_once(self):
        w = ow.weights({"w": ow.Spec((10, 10))})["w"]
        loads = [Load(1.0, 100, {w: 400})] * 5
        assert divide(loads, 5, 500, pipeline=False) == [5]
        assert divide(loads, 5, 499, pipeline=False) == [1, 2, 3, 4, 5]

    def test_nothing(self):
        assert divide([], 3, 0, pipeline=True) == []


def _ways(n: int, count: int) -> list[tuple[int, ...]]:
    from itertools import combinations

    return [ends for k in range(count) for ends in combinations(range(1, n), k)]


def test_a_thousand_devices_take_no_longer_than_the_nodes_make_it(tmp_path):
    # Support is queried for the devices that a node is placed on, not for all.
    asked = []
    described = read_cluster(cluster(tmp_path, count=1000))
    plain = type(described.groups[0].device)._why_not

    class Counting(type(described.groups[0].device)):  # type: ignore[misc]
        def _why_not(self, step):
            asked.append(step.op)
            return plain(self, step)

    groups = [replace(g, device=Counting("gpu", None, None, 1 << 30, g.device.declared)) for g in described.groups]
    plan = what_if(layers(400, 64), described._replace(groups=groups), pipeline=True)
    assert len(plan.predicted.busy) > 300
    assert len(asked) <= 3 * 800


def test_what_has_no_room_on_the_best_device_spills_over_to_the_next():
    matrices = ow.weights({f"w{i}": ow.Spec((1024, 1024), ow.as_dtype("f32")) for i in range(16)})
    y = ow.input("x", (8, 1024))
    for matrix in matrices.values():
        y = ow.relu(ow.linear(y, matrix))
    like: dict[str, Any] = {"flops": 1e12, "bandwidth": 1e11, "link": (1e-6, 1e10)}
    few = [opweave_cost.simulate(f"d{i}", memory=18 << 20, **like) for i in range(6)]
    plan = ow.Scheduler(few, placement="cost").partition(y)
    assert plan.predicted.short == {}
    assert [split.target.name for split in plan.splits] == ["d0", "d1", "d2", "d3"]
    assert {plan.partition.assignment.causes[n] for n in plan.partition.graph.nodes} == {"cost"}
    roomy = [opweave_cost.simulate(f"d{i}", memory=1 << 30, **like) for i in range(2)]
    assert len(ow.Scheduler(roomy, placement="cost").partition(y).splits) == 1
    scarce = ow.Scheduler(few[:2], placement="cost").partition(y, pins={y: "d1"})
    assert scarce.device_of(y).name == "d1"
    assert scarce.predicted.short
