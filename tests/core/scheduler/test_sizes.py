"""One graph in several sizes: what a scheduler has built before changes nothing of what it builds.

Random graphs and models are built in several sizes by one scheduler, and by one that looks at nothing that it has built
before: steps, kernels, devices, bytes and results are the same.
"""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import numpy as np
import pytest

import opweave as ow
from benchmarks.sized_graphs import decoder, encoder, stack
from opweave.contract.kernels import KernelTable
from opweave.runtime.host.device import HostDevice
from tests.core.scheduler.test_reuse import COLUMNS, NODES, OPS, ROWS, names, other_kernel
from tests.support.devices import Plain, Separate, reference_kernel

__all__ = ["names"]

NUMBERS = count()
F = np.float32


def shown(program: ow.Program) -> list[Any]:
    """All that a program decides, without addresses: steps with their operands, kernels and devices, groups, bytes."""
    parts = program.partition
    steps = [
        (split.target.name, item.op, item.out, item.srcs, item.support)
        for split in parts.splits for item in split.steps
    ]  # fmt: skip
    causes = [parts.assignment.causes.get(node) for node in parts.graph.nodes]
    return [
        [node.name for node in parts.graph.nodes], causes, steps, parts.sizes, parts.arena_of, program.memory,
        program.memory_map().groups, [*program.inputs], str(program.explain()),
    ]  # fmt: skip


def planning_anew(devices: Any, parallel: bool | int = False) -> ow.Scheduler:
    """A scheduler that looks at nothing which it has built before."""
    scheduler = ow.Scheduler(devices, parallel=parallel)
    scheduler._earlier = lambda *_: iter(())  # type: ignore[method-assign]
    return scheduler


def random_feeds(program: ow.Program, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    feeds = {}
    for name, tensor in program.inputs.items():
        values = rng.standard_normal(tensor.shape) if tensor.dtype.is_float else np.zeros(tensor.shape)
        feeds[name] = values.astype(tensor.dtype.numpy)
    return feeds


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [encoder, decoder, stack])
def test_models_in_other_sizes_are_those_that_a_first_build_makes(graph, names):
    made = graph(3)
    if graph is decoder:
        with ow.Scheduler(names) as scheduler:
            scheduler.build(made.at(1))  # gives states their memory
    with ow.Scheduler(names) as scheduler, planning_anew(names) as other:
        for size in (*made.sizes, made.sizes[0] + 7):
            program, first = scheduler.build(made.at(size)), other.build(made.at(size))
            assert shown(program) == shown(first)
            feeds = random_feeds(program, size)
            assert program.run(feeds).tobytes() == first.run(feeds).tobytes()


# --- random graphs ----------------------------------------------------------------------------------------------------


class Growing:
    """A random graph over ``n`` rows on one device, which changes kernels and scratch memory by the number of rows."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed, self.number = seed, next(NUMBERS)
        self.device: Plain | Separate = rng.choice([Plain, Separate])(f"sizes{self.number}")
        self.device.kernels = table = KernelTable("f32", "strided")
        for op in (*OPS, "clamp", "contiguous", "scale", "copy"):
            if op in OPS and rng.random() < 0.4:
                limit = rng.randrange(ROWS)
                scratch = (lambda step: {"tiles": ("f32", step.out.shape)}) if rng.random() < 0.5 else None
                table(op, when=self.up_to(limit), workspace=scratch)(other_kernel)
            if rng.random() < 0.99:
                table(op, inplace=rng.random() < 0.8)(reference_kernel)
        arrays = {name: np.random.default_rng(seed).integers(-2, 3, (COLUMNS, COLUMNS)).astype(F) for name in "abc"}
        self.weights = ow.weights(arrays, device=rng.choice([None, self.device]))
        self.state = ow.state(f"sizes-cache-{self.number}", (ROWS, COLUMNS), fill=1, device=self.device)
        self.constants = rng.random() < 0.5

    @staticmethod
    def up_to(limit: int) -> Any:
        return lambda step: "too many rows" if step.out.shape and step.out.shape[0] > limit else None

    def outputs(self, n: int) -> list[ow.Tensor]:
        rng = random.Random(self.seed)
        ids = ow.constant(np.arange(n)) if self.constants else ow.input(f"sizes-ids-{self.number}", (n,), "i64")
        pool = [ow.input(f"sizes-x-{self.number}", (n, COLUMNS)), ow.constant(np.full((n, COLUMNS), 2, F))]
        cache = self.state
        for _ in range(rng.randint(2, 14)):
            t, u, w = rng.choice(pool), rng.choice(pool), self.weights[rng.choice("abc")]
            pool.append(rng.choice(NODES)(t, u, w, cache))
            if rng.random() < 0.2:
                cache = ow.index_copy(cache, ids, ow.clamp(rng.choice(pool), -3, 3))
                pool = [t for t in pool if t.memory is not self.state]
        return [ow.relu(rng.choice(pool)) + 1.0, ow.tanh(pool[-1])]


@pytest.mark.parametrize("block", range(4))
def test_random_graphs_in_other_sizes_are_those_that_a_first_build_makes(block):
    built = 0
    for seed in range(block * 40, block * 40 + 40):
        case = Growing(seed)
        sizes = [case.rng.choice([2, 3, 4, 5, 9, 16]) for _ in range(4)]
        devices = [case.device, HostDevice()]
        parallel = case.rng.choice([False, False, 2])
        with ow.Scheduler(devices, parallel=parallel) as scheduler, planning_anew(devices, parallel) as other:
            for n in sizes:
                try:
                    first = other.build(case.outputs(n))
                except ow.OpweaveError as error:
                    with pytest.raises(type(error)):
                        scheduler.build(case.outputs(n))
                    continue
                program = scheduler.build(case.outputs(n))
                built += 1
                assert shown(program) == shown(first), f"seed {seed}, {n} of {sizes}"
                feeds = {
                    name: np.random.default_rng(n).integers(-3, 4, t.shape).astype(t.dtype.numpy)
                    if t.dtype.is_float else np.arange(n)
                    for name, t in program.inputs.items()
                }  # fmt: skip
                results = []
                for one in (program, first):
                    ow.write(case.state, np.ones((ROWS, COLUMNS), F))
                    results.append([*[r.tobytes() for r in one.run(feeds)], ow.read(case.state).tobytes()])
                assert results[0] == results[1], f"seed {seed}, {n} of {sizes}"
    assert built > 80


# --- what differs between builds -------------------------------------------------------------------------------------


W = ow.constant(np.eye(8, dtype=F))


def grown(rows: int, name: str, **changed: Any) -> ow.Tensor:
    x = ow.input(name, (rows, 8), changed.get("dtype", "f32"))
    y = ow.softmax(ow.relu(x) @ changed.get("w", W), axis=changed.get("axis", -1))
    return changed.get("last", ow.tanh)(y) + changed.get("other", y)


def test_another_dtype_axis_or_constant_is_that_of_the_new_graph():
    rng = np.random.default_rng(0)
    changes: list[dict[str, Any]] = [
        {}, {"dtype": "f64", "w": ow.constant(np.eye(8))}, {"axis": 0}, {"w": ow.constant(rng.random((8, 8), F))}
    ]  # fmt: skip
    with ow.Scheduler("cpu") as scheduler:
        for rows, changed in enumerate(changes, 2):
            program = scheduler.build(grown(rows, "sizes-changed", **changed))
            x = rng.standard_normal((rows, 8)).astype(changed.get("dtype", "f32").replace("f", "float"))
            with ow.Scheduler([HostDevice()]) as host:
                want = host.build(grown(rows, "sizes-changed", **changed)).run({"sizes-changed": x})
            np.testing.assert_allclose(program.run({"sizes-changed": x}), want, rtol=1e-5, atol=1e-6)


def test_a_pin_and_a_precision_are_not_lost():
    rng = np.random.default_rng(0)
    w = ow.weights({"sizes-p": rng.standard_normal((64, 64)).astype(F)})["sizes-p"]

    def output(rows: int) -> ow.Tensor:
        return ow.relu(ow.linear(ow.input("sizes-pinned", (rows, 64)), w))

    host = HostDevice()
    with ow.Scheduler(["cpu", host]) as scheduler:
        scheduler.build(output(2))
        out = output(3)
        assert scheduler.build(out, pins={out: host}).device_of(out) is host
        rough = scheduler.build(output(4), precision="bf16")
        assert rough.partition.assignment.capabilities.precisions
        scheduler.build(output(5))
        pinned, free = output(6), output(7)
        program = scheduler.build(pinned, pins={pinned: host, pinned.srcs[0]: host})
        assert {split.target.device for split in program.splits} == {host}
        assert scheduler.build(free).device_of(free).name == "cpu"


def test_a_step_that_would_read_what_it_overwrites_is_refused_as_by_a_first_build():
    state = ow.state("sizes-overlap", (16, 4))

    def output(rows: int) -> ow.Tensor:
        return ow.relu(ow.assign(state[8 : 8 + rows], state[8 - rows : 8]))

    def overlapping(rows: int) -> ow.Tensor:
        return ow.relu(ow.assign(state[6 : 6 + rows], state[6 - rows + 1 : 7]))

    with ow.Scheduler("cpu") as scheduler:
        scheduler.build(output(2))
        scheduler.build(output(3))
        with pytest.raises(ow.HazardError, match="overwrites"):
            scheduler.build(overlapping(4))


def test_leaves_that_have_moved_are_read_where_they_are():
    weights = ow.weights({"sizes-moved": np.eye(4, dtype=F)})
    w = weights["sizes-moved"]

    def output(rows: int) -> ow.Tensor:
        return ow.relu(ow.linear(ow.input("sizes-m", (rows, 4)), w))

    with ow.Scheduler("cpu") as scheduler:
        scheduler.build(output(2))
        scheduler.build(output(3))
        w_values = np.arange(16, dtype=F).reshape(4, 4)
        weights.write({"sizes-moved": w_values})
        x = np.ones((5, 4), F)
        np.testing.assert_allclose(scheduler.build(output(5)).run({"sizes-m": x}), x @ w_values.T)
