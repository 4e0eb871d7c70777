"""Random graphs over random devices with separate memories: results are bit-equal to the references in order.

Graphs mix computed nodes, views, several outputs, shared sources, states written and read in every legal order, and
leaves over the same array; devices refuse random ops, need dense operands, have small buffers; nodes are pinned at
random. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Stream
from opweave.host import HostDevice
from tests.core.devices import BASIC, Plain, Separate
from tests.core.evaluate import evaluate

N = 6
CASES = 300


def random_view(rng: random.Random, t: ow.Tensor) -> ow.Tensor:
    choice = rng.randrange(4)
    if choice == 0:
        return t.T
    if choice == 1:
        return t.reshape(N * N).reshape(N, N)
    if choice == 2:
        half = t[: N // 2]
        return ow.concat([half, t[N // 2 :]], axis=0)
    return t[0:1].broadcast_to((N, N))


def random_node(rng: random.Random, t: ow.Tensor, u: ow.Tensor) -> ow.Tensor:
    choice = rng.randrange(8)
    if choice == 0:
        return ow.neg(t)
    if choice == 1:
        return ow.relu(t)
    if choice == 2:
        return ow.scale(t, rng.choice([0.5, -1.0, 0.25]), 1.0)
    if choice == 3:
        return t - u
    if choice == 4:
        return ow.custom(np.abs, t, like=t)
    if choice == 5:
        return t + u[:, 0:1]
    return t + u


class Case:
    """A random graph with its leaves' values."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        values = np.random.default_rng(rng.randrange(1 << 30))
        self.leaves: dict[ow.Tensor, np.ndarray] = {}
        self.feeds: dict[str, np.ndarray] = {}
        pool: list[ow.Tensor] = []
        for i in range(rng.randint(1, 3)):
            x = ow.input(f"x{i}", (N, N))
            self.feeds[x.name] = self.leaves[x] = values.integers(-4, 5, (N, N)).astype(np.float32)
            pool.append(x)
        shared = values.integers(-4, 5, (2 * N, N)).astype(np.float32)
        weights = ow.weights({"a": shared[:N], "b": shared[N:], "all": shared})
        pool += [weights["a"], weights["b"], weights["all"][3 : 3 + N]]
        self.states: list[ow.Tensor] = []
        self.latest: list[ow.Tensor] = []
        for i in range(rng.randrange(3)):
            state = ow.state(f"s{i}", (N, N), fill=i + 1)
            self.leaves[state] = np.full((N, N), i + 1, np.float32)
            self.states.append(state)
            self.latest.append(state)
            pool.append(state)
        self.nodes: list[ow.Tensor] = []
        for _ in range(rng.randint(3, 25)):
            t, u = rng.choice(pool), rng.choice(pool)
            if rng.random() < 0.25:
                t = random_view(rng, t)
            if self.latest and rng.random() < 0.15:
                self.write(t, pool)
                continue
            node = random_node(rng, t, u)
            self.nodes.append(node)
            pool.append(node)
        computed = [t for t in pool if t.op is not None and t.memory is t.root]
        count = min(len(computed), rng.randint(1, 3))
        self.outputs = [*rng.sample(computed, count), *[v for v in self.latest if v.op is not None]]

    def write(self, value: ow.Tensor, pool: list[ow.Tensor]) -> None:
        i = self.rng.randrange(len(self.latest))
        old = self.latest[i]
        rows = self.rng.choice([slice(0, N), slice(1, 3), slice(N - 2, N)])
        if value.memory is old.memory:
            value = ow.neg(value)
        new = ow.assign(old[rows], value[rows])
        self.latest[i] = new
        self.nodes.append(new)
        # Old versions stay in the pool: their readers must come before the writer, or the graph is refused.
        if self.rng.random() < 0.8:
            pool[:] = [t for t in pool if t.root is not old]
        pool.append(new)


def random_devices(rng: random.Random) -> list[ow.Device]:
    devices: list[ow.Device] = []
    for i in range(rng.randint(1, 3)):
        ops = [op for op in BASIC if rng.random() < 0.8]
        devices.append(
            Separate(f"d{i}", ops, layout=rng.choice(["strided", "dense", "rows"]), pack=rng.random() < 0.5)
        ) if rng.random() < 0.8 else devices.append(Plain(f"d{i}", ops))
    return [*devices, HostDevice()]


def run_case(
    seed: int,
    make_devices: Callable[[random.Random], list[ow.Device]] = random_devices,
    *,
    parallel: bool | int = False,
    runs: int = 2,
) -> str:
    """Build one random program and compare runs of it, one after the other or submitted all at once."""
    rng = random.Random(seed)
    case = Case(rng)
    devices = make_devices(rng)
    if not case.outputs:
        return "empty"
    reachable = set(ow.Graph(case.outputs).nodes) if not _hazard(case.outputs) else set()
    if not reachable:
        return "hazard"
    with ow.Scheduler(devices, parallel=parallel) as scheduler:
        pins = {}
        for node in case.nodes:
            device = rng.choice(devices)
            lane = scheduler._lanes[devices.index(device)]
            if node in reachable and rng.random() < 0.3:
                assert node.signature is not None
                if lane.verdict(node.signature).reason is None:
                    pins[node] = device
        program = scheduler.build(case.outputs, pins)
        values = np.random.default_rng(seed)
        expected = []
        under_way = []
        for _ in range(runs):
            feeds = {name: values.integers(-4, 5, (N, N)).astype(np.float32) for name in case.feeds}
            case.leaves.update({x: feeds[x.name] for x in case.leaves if x.name in feeds})
            known: dict[ow.Tensor, np.ndarray] = {}
            expected.append([evaluate(t, case.leaves, known) for t in case.outputs])
            given = {name: feeds[name].copy() for name in program.inputs}
            if parallel:
                under_way.append(program.submit(given))
                for array in given.values():
                    array.fill(np.nan)  # the caller may reuse what it has fed
            else:
                _compare(case, program.run(given), expected[-1], f"seed {seed}", program)
            # The next run begins with what this one leaves in the states.
            for state in case.states:
                versions = [t for t in case.outputs if t.memory is state]
                if versions:
                    case.leaves[state] = known[versions[-1]]
                    if not parallel:
                        np.testing.assert_array_equal(ow.read(state), known[versions[-1]], err_msg=f"seed {seed}")
        for number, (future, wanted) in enumerate(zip(under_way, expected, strict=False)):
            _compare(case, future.result(30), wanted, f"seed {seed}, run {number}", program)
        for state in case.states:
            if any(t.memory is state for t in case.outputs):
                np.testing.assert_array_equal(program.read(state), case.leaves[state], err_msg=f"seed {seed}")
    return "checked"


def _compare(case: Case, results: Any, expected: list[np.ndarray], what: str, program: ow.Program) -> None:
    for tensor, got, want in zip(case.outputs, results, expected, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=f"{what}: {tensor.describe()}\n{program.explain()}")


def _hazard(outputs: list[ow.Tensor]) -> bool:
    try:
        ow.Graph(outputs)
    except ow.HazardError:
        return True
    return False


@pytest.mark.parametrize("block", range(10))
def test_random_graphs_over_random_devices_equal_the_references(block):
    seen = [run_case(block * (CASES // 10) + i) for i in range(CASES // 10)]
    assert seen.count("checked") >= len(seen) // 2, "most random graphs must be legal for the test to mean something"


class Dawdling(Stream):
    """Takes its time before every plan, another one each time."""

    def _run(self, calls: Iterator[Any]) -> None:
        device: Any = self.device
        time.sleep(device.rng.choice((0.0, 0.0, 0.0005, 0.002)))
        super()._run(calls)


class Slow(Separate):
    stream_class = Dawdling
    rng: random.Random


class SlowPlain(Plain):
    stream_class = Dawdling
    rng: random.Random


def slow_devices(rng: random.Random) -> list[ow.Device]:
    devices: list[Any] = []
    for i in range(rng.randint(1, 3)):
        ops = [op for op in BASIC if rng.random() < 0.8]
        if rng.random() < 0.7:
            devices.append(Slow(f"d{i}", ops, layout=rng.choice(["strided", "dense", "rows"])))
        else:
            devices.append(SlowPlain(f"d{i}", ops))
        devices[-1].rng = random.Random(rng.random())
    return [*devices, HostDevice()]


@pytest.mark.parametrize("block", range(10))
def test_runs_that_overlap_give_what_they_give_one_after_the_other(block):
    seen = [
        run_case(700_000 + block * 10 + i, slow_devices, parallel=random.Random(block + i).choice([1, 2, 3]), runs=6)
        for i in range(10)
    ]
    assert seen.count("checked") >= len(seen) // 2
