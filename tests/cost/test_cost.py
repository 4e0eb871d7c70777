"""Placement by cost: the optimiser against brute force, predictions and choices against what is known by hand."""

from __future__ import annotations

import json
import random
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from opweave_cost.optimize import Problem, solve
from opweave_cost.store import cache_folder
from tests.support.devices import Plain, Separate


def table(rng: random.Random, targets: int, most: float) -> list[list[float]]:
    return [[0.0 if a == b else rng.uniform(0, most) for b in range(targets)] for a in range(targets)]


def problem(seed: int, sources: list[tuple[int, ...]], targets: int, refused: float = 0.2) -> Problem:
    """Random costs; some targets refuse some nodes."""
    rng = random.Random(seed)
    own = []
    for _ in sources:
        row = [rng.uniform(0, 1) if rng.random() > refused else inf for _ in range(targets)]
        row[rng.randrange(targets)] = rng.uniform(0, 1)
        own.append(row)
    return Problem(own, sources, [table(rng, targets, rng.choice([0.1, 1.0])) for _ in sources])


def least(p: Problem) -> float:
    return min(p.seconds(targets) for targets in product(range(len(p.own[0])), repeat=len(p.own)))


def chain(n: int, rng: random.Random) -> list[tuple[int, ...]]:
    return [(i - 1,) if i else () for i in range(n)]


def into_one(n: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Every value has one reader."""
    sources: list[tuple[int, ...]] = []
    for i in range(n):
        free = [j for j in range(i) if not any(j in s for s in sources)]
        rest = n - i
        take = rng.sample(free, min(len(free), rng.randint(0, 2))) if rest > 1 else free
        sources.append(tuple(take))
    return sources


def out_of_one(n: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Every node has one source."""
    return [(rng.randrange(i),) if i else () for i in range(n)]


def anything(n: int, rng: random.Random) -> list[tuple[int, ...]]:
    return [tuple(sorted(rng.sample(range(i), min(i, rng.randint(1, 3))))) if i else () for i in range(n)]


class TestOptimiser:
    @pytest.mark.parametrize("shape", [chain, into_one, out_of_one], ids=lambda f: f.__name__)
    @pytest.mark.parametrize("targets", [2, 3])
    def test_chains_and_trees_get_the_least_seconds_possible(self, shape, targets):
        for seed in range(60):
            p = problem(seed, shape(7, random.Random(seed)), targets)
            assert solve(p).seconds == pytest.approx(least(p), abs=1e-12), seed

    @pytest.mark.parametrize(("targets", "nodes"), [(2, 10), (3, 7)])
    def test_graphs_get_nearly_the_least(self, targets, nodes):
        over = []
        for seed in range(100):
            p = problem(seed, anything(nodes, random.Random(seed)), targets)
            over.append(solve(p).seconds / least(p) - 1)
        assert np.mean(over) <= 0.01
        assert sorted(over)[94] <= 0.05, "95 of 100 within five percent"

    def test_the_seconds_are_those_of_the_targets_and_every_node_runs(self):
        for seed in range(20):
            p = problem(seed, anything(30, random.Random(seed)), 4)
            found = solve(p)
            assert found.seconds == pytest.approx(p.seconds(found.targets))
            assert found.seconds < inf

    @pytest.mark.parametrize("shape", [chain, anything], ids=lambda f: f.__name__)
    def test_steps_grow_with_nodes_alone(self, shape):
        per_node = [solve(problem(1, shape(n, random.Random(1)), 3)).steps / n for n in (200, 2_000)]
        assert per_node[1] <= 1.5 * per_node[0]
        assert per_node[1] <= 1_000

    def test_twenty_thousand_nodes_in_bounded_steps(self):
        rng = random.Random(0)
        sources = [tuple({max(0, i - rng.randint(1, 4)) for _ in range(2)}) if i else () for i in range(20_000)]
        assert solve(problem(0, sources, 3)).steps <= 500 * 20_000

    def test_nothing_to_do(self):
        assert solve(Problem([], [], [])).targets == []


class TestCurves:
    def test_lines_between_points_and_beyond(self):
        curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 8.0)))
        assert [curve(w) for w in (0, 10, 15, 20, 30, 40, 50)] == pytest.approx([1, 1, 1.5, 2, 5, 8, 8 + 70 / 30])
        assert curve.rate == pytest.approx(30 / 7), "from the first to the last"

    def test_a_line_is_latency_and_rate(self):
        assert Curve.line(2.0, 4.0)(8.0) == pytest.approx(4.0)
        assert Curve.line(2.0, inf)(8.0) == 2.0

    def test_profiles_survive_json(self):
        made = Profile("d", 1e-6, Curve.line(1e-6, 1e9), Curve.line(1e-6, 1e9), {
            "add": {"f32": OpCost(Curve.line(1e-6, 1e9), Curve.line(1e-6, 1e12))}
        }, {"e": Curve.line(0, 1)})  # fmt: skip
        again = Profile.from_json(json.loads(json.dumps(made.to_json())))
        assert again == made
        assert again.launch == 1e-6
        assert again.bandwidth == pytest.approx(1e9)

    def test_the_larger_of_bytes_and_operations_counts(self):
        cost = OpCost(Curve.line(1.0, 10.0), Curve.line(1.0, 100.0))
        assert cost.seconds(100, 10) == pytest.approx(11.0)
        assert cost.seconds(10, 1000) == pytest.approx(11.0)

    def test_a_dtype_that_was_not_measured_takes_as_much_longer_as_additions_do(self):
        flat = {"add": {"f32": OpCost(Curve.line(1, inf)), "f16": OpCost(Curve.line(3, inf))}}
        made = Profile(
            "d", 0.0, Curve.line(0, 1), Curve.line(0, 1), {**flat, "exp": {"f32": OpCost(Curve.line(2, inf))}}
        )
        assert [made.step("exp", dtype, 100, 0) for dtype in ("f32", "f16", "f64")] == [2, 6, 2]


def with_profile(device: ow.Device, seconds: dict[str, float], link: float, switch: float = 0.0) -> ow.Device:
    """A device on which operations take so many seconds, whatever their size, and transfers so many."""
    costs = {op: {ANY: OpCost(Curve.line(s, inf))} for op, s in {ANY: 1.0, **seconds}.items()}
    made = Profile(device.name, switch, Curve.line(link, inf), Curve.line(link, inf), costs)
    device.declared = lambda: made  # type: ignore[attr-defined]
    return device


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (4, 4))


class TestPlacement:
    def test_each_node_goes_where_it_is_faster_if_the_way_is_worth_it(self, x):
        a = with_profile(Separate("a"), {"exp": 1.0, "matmul": 50.0}, 2.0)
        b = with_profile(Separate("b"), {"exp": 30.0, "matmul": 1.0}, 2.0)
        e = ow.exp(x)
        y = ow.matmul(e, e)
        plan = ow.Scheduler([a, b], placement="cost").partition(y)
        assert [plan.device_of(t).name for t in (e, y)] == ["a", "b"]
        assert plan.cause_of(y) == "cost"
        # Feeding, two steps, a copy by way of the host, fetching.
        assert plan.predicted.seconds == pytest.approx(2 + 1 + (2 + 2) + 1 + 2)
        assert plan.predicted.busy == {"a": 1.0, "b": 1.0}
        assert plan.predicted.copies == pytest.approx(8.0)
        far_a, far_b = (with_profile(Separate(n), c, 40.0) for n, c in
                        (("a", {"exp": 1.0, "matmul": 50.0}), ("b", {"exp": 30.0, "matmul": 1.0})))  # fmt: skip
        plan = ow.Scheduler([far_a, far_b], placement="cost").partition(y)
        assert {plan.device_of(t).name for t in (e, y)} == {"b"}, "30 + 1 and no copy"

    def test_a_copy_is_counted_once_for_all_readers_on_a_device(self, x):
        # Three readers save 1 second each; the copy takes 2.
        a = with_profile(Separate("a", ["exp", "relu", "neg", "scale"]), {"exp": 0.0, ANY: 2.0}, 1.0)
        b = with_profile(Separate("b", ["relu", "neg", "scale"]), {ANY: 1.0}, 1.0)
        e = ow.exp(x)
        outputs = [ow.relu(e), ow.neg(e), ow.scale(e, 2.0)]
        plan = ow.Scheduler([a, b], placement="cost").partition(outputs)
        assert {plan.device_of(t).name for t in outputs} == {"b"}
        assert plan.n_copies == 1
        two = ow.Scheduler([a, b], placement="cost").partition(outputs[:1])
        assert two.device_of(outputs[0]).name == "a", "for one reader it is not worth it"

    def test_devices_that_share_memory_copy_nothing(self, x):
        a = with_profile(Plain("a"), {"exp": 1.0, "matmul": 9.0}, 100.0)
        b = with_profile(Plain("b"), {"exp": 9.0, "matmul": 1.0}, 100.0)
        e = ow.exp(x)
        y = ow.matmul(e, e)
        plan = ow.Scheduler([a, b], placement="cost").partition(y)
        assert [plan.device_of(t).name for t in (e, y)] == ["a", "b"]
        assert plan.n_copies == 0

    def test_pins_and_states_are_decided_beforehand(self, x):
        a = with_profile(Separate("a"), {}, 0.1)
        b = with_profile(Separate("b"), {ANY: 50.0}, 0.1)
        cache = ow.state("cache", (4, 4), device=b)
        pinned = ow.exp(x)
        written = ow.assign(cache, pinned)
        plan = ow.Scheduler([a, b], placement="cost").partition([written, ow.neg(pinned)], pins={pinned: "b"})
        assert (plan.device_of(pinned).name, plan.cause_of(pinned)) == ("b", "pinned")
        assert (plan.device_of(written).name, plan.cause_of(written)) == ("b", "storage")
        assert plan.device_of(ow.neg(pinned)).name == "a"

    @pytest.mark.parametrize(("link", "where"), [(1.0, "b"), (20.0, "a")])
    def test_placed_weights_are_a_cost_and_not_a_command(self, x, link, where):
        a = with_profile(Separate("a"), {"linear": 12.0}, link)
        b = with_profile(Separate("b"), {"linear": 1.0}, link)
        w = ow.weights({"w": np.eye(4, dtype="f")}, device=a)["w"]
        y = ow.linear(x, w)
        plan = ow.Scheduler([a, b], placement="cost").partition(y)
        assert plan.device_of(y).name == where
        assert ow.Scheduler([a, b]).partition(y).device_of(y).name == "a", "by priority they decide"

    def test_what_no_device_runs_is_an_error(self, x):
        a, b = (with_profile(Separate(n, ["add"]), {}, 1.0) for n in "ab")
        with pytest.raises(ow.UnsupportedOpError, match="no device runs exp"):
            ow.Scheduler([a, b], placement="cost").partition(ow.exp(x))
        with pytest.raises(ow.SchedulerError, match="'priority' or 'cost'"):
            ow.Scheduler(a, placement="fastest")

    def test_never_predicted_worse_than_the_rules_or_any_device_alone(self):
        for seed in range(40):
            rng = random.Random(seed)
            devices = [
                with_profile(
                    Separate(f"d{i}"), {op: rng.uniform(0, 3) for op in ("exp", "neg", "add", "mul")},
                    rng.choice([0.1, 1.0]), switch=rng.uniform(0, 0.5),
                )
                for i in range(3)
            ]  # fmt: skip
            values: list[ow.Tensor] = [ow.input("x", (4, 4))]
            for _ in range(12):
                a, b = rng.choice(values), rng.choice(values)
                values.append(
                    rng.choice([ow.exp, ow.neg])(a) if rng.random() < 0.5 else rng.choice([ow.add, ow.mul])(a, b)
                )
            chosen = ow.Scheduler(devices, placement="cost").partition(values[-1]).predicted.seconds
            others = [
                ow.Scheduler(which).partition(values[-1]).predicted.seconds
                for which in (devices, *([d] for d in devices))
            ]
            assert chosen <= min(others) + 1e-9, seed

    def test_programs_compute_the_same_and_know_their_prediction(self, x):
        a = with_profile(Separate("a"), {"exp": 1.0, "matmul": 50.0}, 2.0)
        b = with_profile(Separate("b"), {"exp": 30.0, "matmul": 1.0}, 2.0)
        e = ow.exp(x)
        y = ow.matmul(e, e)
        program = ow.Scheduler([a, b], placement="cost").build(y)
        values = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
        np.testing.assert_allclose(program.run(x=values), np.exp(values) @ np.exp(values), rtol=1e-5)
        assert program.predicted.memory == program.memory, "planned by the same planner"
        rows = {row.op: row for row in program.explain().nodes}
        assert (rows["exp"].seconds, rows["exp"].cause) == (1.0, "cost")
        assert "predicted" in program.explain()
        plain = ow.Scheduler([a, b]).build(y)
        assert "predicted" not in plain.explain(), "nobody asked"
        assert plain.predicted.seconds >= program.predicted.seconds

    def test_looking_on_moves_nothing(self, x):
        # A split more at every observed node would make the second device too dear.
        a = with_profile(Plain("a"), {ANY: 10.0}, 0.0, switch=0.0)
        b = with_profile(Plain("b"), {ANY: 1.0}, 0.0, switch=20.0)
        y = ow.neg(ow.relu(ow.exp(x)))
        program = ow.Scheduler([a, b], placement="cost").build(y)
        assert {split.target.name for split in program.splits} == {"b"}
        with program.observe(lambda node, value: None):
            program.run(x=np.ones((4, 4), np.float32))
            observed = program.internals.observed
            assert observed is not None
            assert {split.target.name for split in observed.partition.splits} == {"b"}

    def test_memory_that_does_not_suffice_is_avoided_or_said(self, x):
        quick = opweave_cost.simulate("quick", flops=1e12, bandwidth=1e12, memory=1000)
        roomy = opweave_cost.simulate("roomy", flops=1e9, bandwidth=1e9, memory=1 << 20)
        big = ow.exp(ow.input("big", (64, 64)))
        plan = ow.Scheduler([quick, roomy], placement="cost").partition(big)
        assert plan.device_of(big).name == "roomy"
        assert not plan.predicted.short
        alone = ow.Scheduler([quick], placement="cost").partition(big)
        assert set(alone.predicted.short) == {"quick"}
        assert "quick lacks" in alone.explain()


class TestProfile:
    @pytest.fixture
    def measured(self, monkeypatch, tmp_path):
        """How often something was measured; profiles are kept in a folder of the test's."""
        monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))
        made: list[str] = []

        def measure(device, progress=None):
            made.append(device.name)
            return Profile(
                device.name, 0.0, Curve.line(0, 1), Curve.line(0, 1), {"add": {"f32": OpCost(Curve.line(1, 1))}}
            )

        monkeypatch.setattr("opweave_cost.measure.measure", measure)
        return made

    def test_a_device_is_measured_once_and_its_profile_kept_in_a_file(self, measured, tmp_path):
        assert opweave_cost.profile(Separate("one")) == opweave_cost.profile(Separate("one")), (
            "of one name and description"
        )
        assert measured == ["one"]
        opweave_cost.profile(Separate("two"))
        opweave_cost.profile(Separate("one"), refresh=True)
        assert measured == ["one", "two", "one"]
        assert len(list((tmp_path / "profiles").iterdir())) == 2

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', "\x00", '{"key": {}, "profile": {}}'])
    def test_a_damaged_file_is_measured_anew(self, measured, damage):
        opweave_cost.profile(Separate("one"))
        (path,) = (cache_folder() or Path()).iterdir()
        sound = path.read_text()
        path.write_text(damage)
        assert opweave_cost.profile(Separate("one")).device == "one"
        assert measured == ["one", "one"]
        assert path.read_text() == sound

    def test_figures_that_make_no_sense_are_a_damaged_file_too(self, measured):
        opweave_cost.profile(Separate("one"))
        (path,) = (cache_folder() or Path()).iterdir()
        document = json.loads(path.read_text())
        document["profile"]["upload"] = [[[5, 1], [1, 2]]]
        path.write_text(json.dumps(document))
        opweave_cost.profile(Separate("one"))
        assert measured == ["one", "one"]

    def test_a_folder_that_cannot_be_written_only_costs_time(self, measured, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "file"))
        assert opweave_cost.profile(Separate("one")).device == "one"

    def test_without_a_folder_of_its_own_it_is_the_users_cache(self, monkeypatch, tmp_path):
        monkeypatch.delenv("OPWEAVE_PROFILE_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "opweave" / "profiles"

    def test_measuring_gives_figures_that_a_device_can_have(self):
        from opweave_cost.measure import measure

        seen: list[tuple[str, int, int]] = []
        made = measure(Separate("device", ["add", "linear"]), lambda *what: seen.append(what))
        assert set(made.costs) == {"add", "linear"}
        assert 0 < made.launch < 1e-2
        assert 1e6 < made.bandwidth < 1e13
        assert made.step("exp", "f32", 1000, 1000) == made.step("add", "f32", 1000, 1000), "what was not measured"
        assert made.step("linear", "f32", 1e6, 1e10) > made.step("linear", "f32", 1e6, 1e6)
        curves = [made.upload, made.download, made.costs["add"]["f32"].by_bytes, made.costs["linear"]["f32"].by_flops]
        for curve in curves:
            assert curve is not None
            assert len(curve.points) > 1
            assert [s for _, s in curve.points] == sorted(s for _, s in curve.points), "more work never takes less time"
            assert curve.rate < np.inf
        assert seen[0][1] == 0
        assert seen[-1][1] == seen[-1][2]
