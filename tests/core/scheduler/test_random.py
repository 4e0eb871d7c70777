"""Random graphs over random devices with separate memories: results are bit-equal to the references in order.

Graphs mix nodes of all families, views, several outputs, shared sources, states written and read in every legal order,
and leaves over the same array; devices refuse random ops, need dense operands, have small buffers; nodes are pinned at
random. Some run one after the other, some overlap in one to three slots on streams that dawdle. Each memory plan and
each order between queues is judged too. A failure prints the seed that repeats it.

``OPWEAVE_RANDOM_CASES=100000`` runs so many instead of those that every test run makes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import opweave as ow
from benchmarks.memory_verifier import judge
from benchmarks.order_verifier import races
from opweave.contract import Stream
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Plain, Separate
from tests.support.evaluate import evaluate
from tests.support.random_graphs import ALL_OPS, Case, N

BLOCKS = 20
CASES = int(os.environ.get("OPWEAVE_RANDOM_CASES", "2000"))
IN_TURN, OVERLAPPING = CASES // 2, CASES // 2


def random_devices(rng: random.Random) -> list[ow.Device]:
    devices: list[ow.Device] = []
    for i in range(rng.randint(1, 3)):
        ops = [op for op in ALL_OPS if rng.random() < 0.8]
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
        for node in [n.root for n in case.nodes if n.root.op is not None]:
            device = rng.choice(devices)
            target = scheduler._targets[devices.index(device)]
            if node in reachable and rng.random() < 0.3:
                assert node.signature is not None
                if target.support(node.signature).reason is None:
                    pins[node] = device
        program = scheduler.build(case.outputs, pins)
        for slot in range(program.slots):
            assert judge(program.partition, program.memory_map(slot)).faults == [], f"seed {seed}"
        if parallel:
            assert races(program) == [], f"seed {seed}"
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


def seeds(block: int, cases: int) -> range:
    return range(block * cases // BLOCKS, (block + 1) * cases // BLOCKS)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_graphs_over_random_devices_equal_the_references(block):
    seen = [run_case(seed) for seed in seeds(block, IN_TURN)]
    assert seen.count("checked") >= len(seen) // 2, "most random graphs must be legal for the test to mean something"


class Dawdling(Stream):
    """Takes its time before every plan, another one each time."""

    def _run(self, calls: Iterator[Any]) -> None:
        device: Any = self.device
        time.sleep(device.rng.choice((0.0, 0.0, 0.0, 0.001)))
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
        ops = [op for op in ALL_OPS if rng.random() < 0.8]
        if rng.random() < 0.7:
            devices.append(Slow(f"d{i}", ops, layout=rng.choice(["strided", "dense", "rows"])))
        else:
            devices.append(SlowPlain(f"d{i}", ops))
        devices[-1].rng = random.Random(rng.random())
    return [*devices, HostDevice()]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_runs_that_overlap_give_what_they_give_one_after_the_other(block):
    seen = [
        run_case(10_000_000 + seed, slow_devices, parallel=random.Random(seed).choice([1, 2, 3]), runs=5)
        for seed in seeds(block, OVERLAPPING)
    ]
    assert seen.count("checked") >= len(seen) // 2
