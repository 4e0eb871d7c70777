"""Devices that work at once, and placements that mixing makes faster, by prescribed costs."""

from __future__ import annotations

import random
from itertools import product
from math import inf

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.runtime.host.cores import Cores
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from opweave_cost.optimize import Problem
from opweave_cost.place import list_schedule
from opweave_cost.predict import queues
from tests.support.devices import Separate


def device(name: str, kind: ow.Kind = ow.Kind.ACCEL, link: float = 0.0, room: int = 0, **seconds: float) -> Separate:
    """One whose operations take so many seconds each, others 1, and transfers ``link``."""
    made = Separate(name)
    made.kind = kind
    costs = {op: {ANY: OpCost(Curve.line(s, inf))} for op, s in {ANY: 1.0, **seconds}.items()}
    profile = Profile(name, 0.0, Curve.line(link, inf), Curve.line(link, inf), costs)
    made.declared = lambda: profile  # type: ignore[attr-defined]
    made.mem_info = lambda: (room, room)  # type: ignore[method-assign]
    return made


def branches(count: int) -> ow.Tensor:
    """Chains of two nodes from one input, which meet at the end."""
    x = ow.input("at_once", (4, 4))
    return ow.concat([ow.neg(ow.exp(x * float(i + 2))) for i in range(count)])


class TestPredictions:
    def test_devices_with_threads_work_while_others_do(self):
        out = branches(4)
        devices = [device("a"), device("b")]
        inner = [[b := n.srcs[0], b.srcs[0], b.srcs[0].srcs[0]] for n in [ow.neg(s) for s in out.srcs]]
        pins = {node: devices[i % 2] for i, nodes in enumerate(inner) for node in nodes} | {out: devices[0]}
        with ow.Scheduler(devices) as one_by_one, ow.Scheduler(devices, parallel=True) as at_once:
            assert one_by_one.partition(out, pins=pins).predicted.seconds == pytest.approx(12.0)
            predicted = at_once.partition(out, pins=pins).predicted
            assert predicted.seconds == pytest.approx(6.0), "six on each; the last node is copies"
            assert predicted.busy == {"a": pytest.approx(6.0), "b": pytest.approx(6.0)}
            values = {"at_once": np.full((4, 4), 0.25, np.float32)}
            program = at_once.build(out, pins=pins)
            expected = np.concatenate([-np.exp(values["at_once"] * (i + 2)) for i in range(4)])
            np.testing.assert_allclose(program.run(values), expected, rtol=1e-6)

    def test_what_shares_too_few_processors_does_not(self, monkeypatch):
        devices = [device("a", ow.Kind.CPU), device("b", ow.Kind.CPU), device("c", ow.Kind.GPU)]
        with ow.Scheduler(devices, parallel=True) as scheduler, ow.Scheduler(devices) as one_by_one:
            for processors, expected in ((2, 3), (1, 2)):
                cores = Cores(processors, processors, None)
                monkeypatch.setattr("opweave_cost.predict.usable_cores", lambda cores=cores: cores)
                found = queues(scheduler._targets)
                assert len(set(found)) == expected
                assert (found[0] == found[1]) == (processors == 1)
                assert found[2] not in found[:2]
            assert len(set(queues(one_by_one._targets))) == 1


def makespan(problem: Problem, at: tuple[int, ...], queue: list[int]) -> float:
    """When the last node ends."""
    free = dict.fromkeys(queue, 0.0)
    ends: list[float] = []
    for v, sources in enumerate(problem.sources):
        start = max([free[queue[at[v]]], *[ends[u] + problem.moves[u][at[u]][at[v]] for u in sources]])
        ends.append(start + problem.own[v][at[v]])
        free[queue[at[v]]] = ends[v]
    return max(ends)


class TestListSchedule:
    def test_near_the_optimum_of_all_placements(self):
        """Graham's bound for list scheduling on two equal processors without copies is 2; these are unlike."""
        over = []
        for seed in range(60):
            rng = random.Random(seed)
            sources: list[tuple[int, ...]] = [(), *[(0,)] * 3, (1,), (2,), (3,), (4, 5, 6)]
            own = [[rng.uniform(0.5, 1), rng.uniform(0.5, 1)] for _ in sources]
            problem = Problem(own, sources, [[[0, 0.1], [0.1, 0]]] * len(sources))
            best = min(makespan(problem, at, [0, 1]) for at in product((0, 1), repeat=len(sources)))
            over.append(makespan(problem, tuple(list_schedule(problem, [0, 1])), [0, 1]) / best)
        assert max(over) <= 1.5
        assert np.mean(over) <= 1.1

    def test_one_queue_is_one_processor(self):
        problem = Problem([[1.0, 2.0]] * 4, [()] * 4, [[[0, 0], [0, 0]]] * 4)
        assert list_schedule(problem, [0, 0]) == [0, 0, 0, 0]
        assert list_schedule(problem, [0, 1]) == [0, 0, 1, 0]


class TestMixingWins:
    def placed(self, devices: list[Separate], out: ow.Tensor, parallel: bool = False) -> ow.PlannedGraph:
        with ow.Scheduler(devices, placement="cost", parallel=parallel) as scheduler:
            return scheduler.partition(out)

    def test_branches_are_divided_where_devices_work_at_once(self):
        devices = [device("a", link=0.1), device("b", link=0.1)]
        plan = self.placed(devices, branches(6), parallel=True)
        alone = self.placed(devices[:1], branches(6)).predicted.seconds
        assert plan.predicted.seconds <= 0.6 * alone
        assert len({split.target.name for split in self.placed(devices, branches(6)).splits}) == 1

    def test_attention_on_one_and_experts_on_the_other(self):
        def network() -> ow.Tensor:
            w = ow.weights({"mix": ow.Spec((4, 16)), "router": ow.Spec((8, 4)), "up": ow.Spec((8, 4, 4))})
            h = ow.linear(ow.input("mixed_x", (4, 16)), w["mix"])
            ids = ow.argmax(ow.linear(h, w["router"]), axis=-1).reshape(4, 1)
            return ow.expert_linear(h, w["up"], ids)

        gpu, cpu = (
            opweave_cost.simulate(n, flops=f, bandwidth=f, launch=0.0, link=(0.1, 1e12), ops=ops)
            for n, f, ops in (("gpu", 1e6, ("linear", "argmax")), ("cpu", 1e3, None))
        )
        plan = ow.Scheduler([cpu, gpu], placement="cost").partition(network())
        assert {n.op.name: plan.device_of(n).name for s in plan.splits for n in s.nodes if n.op} == {
            "linear": "gpu", "argmax": "gpu", "expert_linear": "cpu",
        }  # fmt: skip
        assert plan.predicted.seconds < ow.Scheduler([cpu]).partition(network()).predicted.seconds

    @pytest.mark.parametrize("small", [1, 2])
    def test_a_model_larger_than_a_device(self, small):
        """The fast device holds half of the weights; the rest lies on a slow one, or on a second fast one."""
        w = ow.weights({str(i): ow.Spec((256, 256)) for i in range(8)})
        h = ow.input(f"large_x{small}", (4, 256))
        for i in range(8):
            h = ow.linear(h, w[str(i)])
        half = 4 * 256 * 256 * 4 + (1 << 15)
        fast = [
            opweave_cost.simulate(f"fast{i}", flops=1e9, bandwidth=1e9, launch=1e-6, memory=half) for i in range(small)
        ]
        slow = opweave_cost.simulate("slow", flops=1e7, bandwidth=1e7, launch=1e-6)
        plan = ow.Scheduler([slow, *fast], placement="cost").partition(h)
        assert not plan.predicted.short
        assert {split.target.name for split in plan.splits} == {
            *[d.name for d in fast], *(["slow"] if small == 1 else [])
        }  # fmt: skip
        assert plan.predicted.seconds < ow.Scheduler([slow]).partition(h).predicted.seconds
