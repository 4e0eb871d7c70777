"""Plan updates: a graph of known structure and new sizes gets the very plan that it would get without the known one.

Random graphs are built in several sizes by two schedulers over equal devices, of which one compares graphs with those
that it has built before and the other one does not. Devices, causes, splits, copies, operands, kernels, bytes, offsets
and results are the same. Devices refuse operations, or change kernels and scratch memory, by the number of rows.
``OPWEAVE_RANDOM_CASES=10000`` runs so many instead of those that every test run makes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

import opweave as ow
from benchmarks.memory_verifier import judge
from benchmarks.order_verifier import races
from opweave.contract import Step
from opweave.contract.kernels import KernelTable
from opweave.host.device import HostDevice
from tests.support.devices import Plain, Separate, reference_kernel

CASES = int(os.environ.get("OPWEAVE_RANDOM_CASES", "120"))
BLOCKS = 8
OPS = ("add", "mul", "sub", "relu", "tanh", "matmul", "linear", "softmax", "concat", "index_copy", "assign", "sum")
COLUMNS, ROWS = 6, 16
NAMES = count()


NODES: list[Callable[[ow.Tensor, ow.Tensor, ow.Tensor, ow.Tensor], ow.Tensor]] = [
    lambda t, u, w, cache: t + u,
    lambda t, u, w, cache: ow.relu(t) * 0.5,
    lambda t, u, w, cache: ow.tanh(t - u),
    lambda t, u, w, cache: ow.linear(t, w),
    lambda t, u, w, cache: ow.clamp(t, -2, 2) @ w.T,
    lambda t, u, w, cache: ow.softmax(t @ u.T) @ t,
    lambda t, u, w, cache: (t.T + u.T).T,
    lambda t, u, w, cache: ow.concat([t[:1], u[1:]], axis=0),
    lambda t, u, w, cache: ow.concat([t[:, 2:], t[:, :2]], axis=1),
    lambda t, u, w, cache: t.reshape(-1, 3).reshape(*t.shape) + ow.sum(u, axis=0, keepdims=True),
    lambda t, u, w, cache: t.reshape(-1, 2, 3).transpose(1, 0, 2).contiguous().reshape(*t.shape),
    lambda t, u, w, cache: t + t[0:1].broadcast_to(t.shape),
    lambda t, u, w, cache: cache[: t.shape[0]] + t,
]


class Growing:
    """A random graph over ``n`` rows, with weights, states and devices that are the same in every size."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.devices = [device(rng, i) for i in range(rng.randint(1, 3))] + [HostDevice()]
        self.placed = rng.choice([None, None, *self.devices])
        self.number = next(NAMES)
        self.values = np.random.default_rng(seed)
        arrays = {name: self.values.integers(-2, 3, (COLUMNS, COLUMNS)).astype(np.float32) for name in "abc"}
        self.weights = ow.weights(arrays, device=self.placed)
        self.state = ow.state(f"update-cache-{self.number}", (ROWS, COLUMNS), fill=1)
        self.parallel = rng.choice([False, False, 2])

    def outputs(self, n: int) -> list[ow.Tensor]:
        rng = random.Random(self.seed)
        x = ow.input(f"update-x-{self.number}", (n, COLUMNS))
        ids = ow.constant(np.arange(n))  # new in each size
        pool, cache = [x, x * 2.0], self.state
        for _ in range(rng.randint(3, 14)):
            t, u = rng.choice(pool), rng.choice(pool)
            pool.append(rng.choice(NODES)(t, u, self.weights[rng.choice("abc")], cache))
            if rng.random() < 0.15:
                cache = ow.index_copy(cache, ids, ow.clamp(rng.choice(pool), -3, 3))
                pool = [p for p in pool if p.memory is not self.state]
        outputs = [rng.choice(pool), pool[-1]]
        return [t + 1.0 if t.memory is self.state else t for t in outputs]


def other_kernel(stream: Any, op: str, out: Any, *srcs: Any, tiles: Any = None, **attrs: Any) -> Any:
    """The same as `reference_kernel`, perhaps with scratch memory, which it fills."""
    call = reference_kernel(stream, op, out, *srcs, **attrs)

    def run() -> None:
        if tiles is not None:
            tiles.view.fill(np.nan)
        call()

    return run


def device(rng: random.Random, i: int) -> ow.Device:
    """Runs some operations; some of them only up to a number of rows, and some with another kernel up to one."""
    made: Plain | Separate = Plain(f"d{i}") if rng.random() < 0.3 else Separate(f"d{i}")
    made.kernels = table = KernelTable(
        "f32", "strided" if type(made) is Plain else rng.choice(["strided", "dense", "rows"])
    )

    def rows_up_to(limit: int) -> Callable[[Step], str | None]:
        return lambda step: "too many rows" if step.out.shape and step.out.shape[0] > limit else None

    for op in OPS:
        if rng.random() < 0.3:
            space = rng.random() < 0.5
            scratch = (lambda step: {"tiles": ("f32", step.out.shape)}) if space else None
            table(op, when=rows_up_to(rng.randrange(ROWS)), workspace=scratch)(other_kernel)
        if rng.random() < 0.8:
            table(op, inplace=rng.random() < 0.8)(reference_kernel)
    if rng.random() < 0.5:
        table("contiguous", layout="strided")(reference_kernel)
    return made


def _kernel(support: Any) -> tuple[Any, ...]:
    return support.kernel and support.kernel.factory, support.workspace, support.inplace, support.packed


def described(program: ow.Program) -> Any:
    """All that was planned, in words that are the same for programs of two schedulers."""
    parts = program.partition
    tensors = (*parts.graph.leaves, *parts.graph.nodes)
    number = {tensor: i for i, tensor in enumerate(tensors)}
    assignment = parts.assignment
    steps = [
        (s.target.name, i.op, i.node is not None and number[i.node], i.out, i.srcs, *_kernel(i.support))
        for s in parts.splits
        for i in s.items
    ]
    copies = [(number.get(c.tensor, -1), *c[1:]) for c in parts.copies]
    places = [
        (storage, place.offset, place.size)
        for slot in range(program.slots)
        for storage, place in program.memory_map(slot).places.items()
        if parts.arenas[storage] >= 0
    ]
    return (
        [(assignment.target_of.get(t), assignment.causes.get(t)) for t in tensors],
        [(t.op.name if t.op else "", t.shape, t.strides, t.offset) for t in tensors],
        steps,
        copies,
        (list(parts.sizes), list(parts.arenas), [number.get(t, -1) for t in parts.names], parts.outputs),
        ({s: number.get(t, -1) for s, (t, _) in parts.owners.items()}, {number[t]: s for t, s in parts.inputs.items()}),
        places,
        program.memory,
        [len(run_list.calls.calls) for run_list in program._state.lists],
    )


def history(seed: int, sizes: list[int], *, update: bool) -> tuple[list[Any], int]:
    """Plans and results of one graph in several sizes, one after the other, and how many builds were updates."""
    case = Growing(seed)
    found: list[Any] = []
    with ow.Scheduler(case.devices, parallel=case.parallel) as scheduler:
        if not update:
            scheduler._similar = lambda *_: iter(())  # type: ignore[method-assign]
        for n in sizes:
            try:
                program = scheduler.build(case.outputs(n))
            except ow.OpweaveError as error:
                found.append((type(error),))
                continue
            for slot in range(program.slots):
                assert judge(program.partition, program.memory_map(slot)).faults == [], f"seed {seed}"
            if case.parallel:
                assert races(program) == [], f"seed {seed}"
            values = np.random.default_rng(n)
            feeds = {name: values.integers(-3, 4, (n, COLUMNS)).astype(np.float32) for name in program.inputs}
            results = [program.run(feeds) for _ in range(2)]
            found.append((described(program), [[r.tobytes() for r in run] for run in results]))
        return found, scheduler.stats.updated


@pytest.mark.parametrize("block", range(BLOCKS))
def test_an_updated_plan_is_the_plan_of_a_first_build(block):
    updates = builds = 0
    for seed in range(block * CASES // BLOCKS, (block + 1) * CASES // BLOCKS):
        sizes = random.Random(seed).choices(range(1, ROWS + 1), k=4)
        got, updated = history(seed, sizes, update=True)
        want, never = history(seed, sizes, update=False)
        assert never == 0
        for n, a, b in zip(sizes, got, want, strict=True):
            assert a == b, f"seed {seed}, {n} rows of {sizes}"
        updates, builds = updates + updated, builds + len(sizes)
    assert updates > builds // 5, "most builds after the first are to be updates for the test to mean something"
