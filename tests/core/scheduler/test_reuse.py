"""Operands and calls of a program serve again for the next one, where neither sizes nor memory have changed.

Random graphs are built in several sizes and variants by two schedulers over equal devices, of which one looks at what
it has built before and the other one does not: results and bytes are the same. Devices refuse operations, or change
kernels and scratch memory, by the number of rows. ``OPWEAVE_RANDOM_CASES=10000`` runs so many cases.
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
from benchmarks.order_verifier import races
from opweave.contract import Step
from opweave.contract.kernels import KernelTable
from opweave.leaf_memory import withdraw
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Plain, Separate, reference_kernel

CASES = int(os.environ.get("OPWEAVE_RANDOM_CASES", "120"))
BLOCKS = 8
OPS = ("add", "mul", "sub", "relu", "tanh", "matmul", "linear", "softmax", "concat", "index_copy", "assign", "sum")
COLUMNS, ROWS, F = 6, 16, np.float32
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
        self.state = ow.state(f"former-cache-{self.number}", (ROWS, COLUMNS), fill=1)
        self.parallel = rng.choice([False, False, 2])

    def outputs(self, n: int, variant: int) -> list[ow.Tensor]:
        """Of ``n`` rows, beside a part whose rows are always as many; ``variant`` changes the latter half of it."""
        rng = random.Random(self.seed)
        ids = ow.constant(np.arange(n))  # new in each size
        pools = [[ow.input(f"former-{k}-{self.number}", (rows, COLUMNS))] for k, rows in enumerate((n, 4, 4))]
        cache, nodes = self.state, rng.randint(4, 20)
        for i in range(nodes):
            if i == nodes // 2:
                rng.seed(self.seed + variant)
            pool = rng.choice(pools)
            t, u, w = rng.choice(pool), rng.choice(pool), self.weights[rng.choice("abc")]
            pool.append(rng.choice(NODES)(t, u, w, cache))
            if rng.random() < 0.15:
                cache = ow.index_copy(cache, ids, ow.clamp(rng.choice(pools[0]), -3, 3))
                pools = [[t for t in pool if t.memory is not self.state] for pool in pools]
        return [ow.relu(rng.choice(pool)) + 1.0 for pool in pools]


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


def calls_of(program: ow.Program) -> set[int]:
    return {id(call) for run_list in program.internals.lists for plan in run_list.plans for call in plan.calls}


def history(seed: int, builds: list[tuple[int, int]], *, reuse: bool) -> tuple[list[Any], int]:
    """Bytes and results of one graph in several sizes and variants, one after the other, and how many builds have calls
    of an earlier one."""
    case = Growing(seed)
    found: list[Any] = []
    programs: list[ow.Program] = []
    sharing = 0
    with ow.Scheduler(case.devices, parallel=case.parallel) as scheduler:
        if not reuse:
            scheduler._earlier = lambda *_: iter(())  # type: ignore[method-assign]
        for n, variant in builds:
            try:
                program = scheduler.build(case.outputs(n, variant))
            except ow.OpweaveError as error:
                found.append((type(error),))
                continue
            sharing += any(calls_of(program) & calls_of(known) for known in programs if known is not program)
            programs.append(program)
            if case.parallel:
                assert races(program) == [], f"seed {seed}"
            values = np.random.default_rng(n)
            feeds = {name: values.integers(-3, 4, tensor.shape).astype(F) for name, tensor in program.inputs.items()}
            results = [program.run(feeds) for _ in range(2)]
            found.append((program.memory, [[r.tobytes() for r in run] for run in results]))
        return found, sharing


@pytest.mark.parametrize("block", range(BLOCKS))
def test_programs_that_take_over_calls_compute_and_weigh_the_same(block):
    shared = 0
    cases = range(block * CASES // BLOCKS, (block + 1) * CASES // BLOCKS)
    for seed in cases:
        rng = random.Random(seed)
        builds = [(rng.choice([3, 4, 5, 9, 16]), rng.choice([0, 0, 1])) for _ in range(5)]
        got, sharing = history(seed, builds, reuse=True)
        want, never = history(seed, builds, reuse=False)
        assert never == 0
        for build, a, b in zip(builds, got, want, strict=True):
            assert a == b, f"seed {seed}, {build} of {builds}"
        shared += sharing
    assert shared > len(cases), "many builds are to share calls for the test to mean something"


def memory_of(program: ow.Program, leaf: ow.Tensor) -> tuple[object, int]:
    """The buffer in which a program reads a leaf, and where in it."""
    bindings = program.internals.lists[0].bindings
    assert bindings is not None
    storage = next(s for s, (tensor, _) in program.partition.owners.items() if tensor is leaf)
    return bindings.buffers[storage], bindings.offsets[storage]


@pytest.mark.parametrize("placed", [True, False])
def test_leaves_lie_where_they_lay_unless_their_memory_was_given_up(placed: bool) -> None:
    device, number = Separate("former-leaves"), next(NAMES)
    values = np.arange(12, dtype=F).reshape(3, 4)
    w = ow.weights({f"w{number}": values}, device=device if placed else None)[f"w{number}"]
    cache = ow.state(f"former-leaves-{number}", (8, 3), fill=2)

    def check(scheduler: ow.Scheduler, rows: int) -> ow.Program:
        x = ow.input(f"former-leaves-x{number}", (rows, 4))
        program = scheduler.build(ow.linear(x, w) + cache[:rows])
        fed = np.full((rows, 4), rows, F)
        np.testing.assert_array_equal(program.run({x: fed}), fed @ values.T + 2)
        return program

    with ow.Scheduler([device, HostDevice()]) as scheduler:
        first, second = check(scheduler, 3), check(scheduler, 5)
        for leaf in (w, cache):
            assert memory_of(second, leaf) == memory_of(first, leaf)
        withdraw(cache, device)
        if placed:
            withdraw(w, device)
        third = check(scheduler, 4)
        assert memory_of(third, cache) != memory_of(second, cache)
        assert (memory_of(third, w) == memory_of(second, w)) is not placed


# --- on devices that ship ---------------------------------------------------------------------------------------------

DEVICES = [["cpu"], ["torch:cpu"], ["opencl", "cpu"]]


class Decoder:
    """Two layers that attend to what the cache holds so far, one row more with each step."""

    def __init__(self, longest: int = 32, columns: int = 16) -> None:
        self.number, self.columns = next(NAMES), columns
        rng = np.random.default_rng(3)
        self.arrays = {f"{n}{i}": rng.standard_normal((columns, columns)).astype(F) / 4 for n in "qkvo" for i in "ab"}
        self.weights = ow.weights(self.arrays)
        self.caches = {n: ow.state(f"decoder-{n}-{self.number}", (longest, columns)) for n in ("ka", "va", "kb", "vb")}
        self.x = ow.input(f"decoder-x-{self.number}", (1, columns))
        self.at = ow.input(f"decoder-at-{self.number}", (1,), "i64")

    def output(self, filled: int) -> ow.Tensor:
        h = self.x
        for i in "ab":
            w = {n: self.weights[n + i] for n in "qkvo"}
            k, v = (ow.index_copy(self.caches[n + i], self.at, ow.linear(h, w[n]))[:filled] for n in "kv")
            h = h + ow.linear(ow.softmax(ow.linear(h, w["q"]) @ k.T) @ v, w["o"])
        return h

    def feeds(self, row: int) -> dict[str, Any]:
        x = np.random.default_rng(row).standard_normal((1, self.columns)).astype(F)
        return {self.x.name: x, self.at.name: np.array([row])}


@pytest.fixture(params=DEVICES, ids=lambda names: names[0])
def names(request: pytest.FixtureRequest) -> list[str]:
    if request.param[0] == "opencl":
        pytest.importorskip("pyopencl")
    if request.param[0] == "torch:cpu":
        pytest.importorskip("torch")
    try:
        ow.device(request.param[0])
    except ow.PluginError as error:
        pytest.skip(str(error))
    return list(request.param)


def test_each_token_of_a_decoder_takes_over_calls_of_the_one_before_it(names: list[str]) -> None:
    reusing, building = Decoder(), Decoder()
    with ow.Scheduler(names) as scheduler, ow.Scheduler(names) as other:
        other._earlier = lambda *_: iter(())  # type: ignore[method-assign]
        programs = []
        for row in range(24):
            programs.append(scheduler.build(reusing.output(row + 1)))
            got = programs[-1].run(reusing.feeds(row))
            want = other.build(building.output(row + 1)).run(building.feeds(row))
            assert got.tobytes() == want.tobytes(), f"row {row}"
        # One row more changes the structure once: what a single row holds lies dense however it is turned.
        for a, b in zip(reusing.caches.values(), building.caches.values(), strict=True):
            np.testing.assert_array_equal(ow.read(a), ow.read(b))
        # Programs of equal bytes share the calls that read no cache.
        assert calls_of(programs[-1]) & calls_of(programs[-2])
        programs[-2].close()
        assert programs[-1].run(reusing.feeds(23)).tobytes() == got.tobytes()


def test_an_index_out_of_bounds_is_that_of_the_program_which_was_run(names: list[str]) -> None:
    case = Decoder()
    with ow.Scheduler(names) as scheduler:
        for row in range(3):
            program = scheduler.build(case.output(row + 1))
            program.run(case.feeds(row))
        with pytest.raises(ow.ExecutionError, match="index_copy") as caught:
            program.run({**case.feeds(3), case.at.name: np.array([99])})
        assert "99" in str(caught.value)


def test_other_operations_and_other_windows_of_the_same_memory_are_bound_anew(names: list[str]) -> None:
    x = ow.input("former-windows", (6, 4))
    value = np.arange(24, dtype=F).reshape(6, 4)

    def output(made: Callable[[ow.Tensor], ow.Tensor], first: int) -> ow.Tensor:
        return ow.relu(made(ow.relu(x)[first : first + 3])) + 1.0

    with ow.Scheduler(names) as scheduler:
        first = scheduler.build(output(lambda t: t + t, 0))
        other = scheduler.build(output(lambda t: t * t, 0))
        later = scheduler.build(output(lambda t: t * t, 2))
        np.testing.assert_array_equal(first.run({x: value}), 2 * value[:3] + 1)
        np.testing.assert_array_equal(other.run({x: value}), value[:3] ** 2 + 1)
        np.testing.assert_array_equal(later.run({x: value}), value[2:5] ** 2 + 1)


def test_equal_steps_in_the_same_memory_share_one_call(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_CPU_JIT", "0")  # or the steps would be one chain
    x = ow.input("equal-steps", (3, 3))
    h = x
    for _ in range(10):
        h = h @ x
    values = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]], F)  # its twelfth power is the identity
    with ow.Scheduler(names) as scheduler:
        program = scheduler.build(h @ x)
        # The memory of two values takes turns. The last call of a plan may be made anew.
        assert len(calls_of(program)) <= 5
        np.testing.assert_array_equal(program.run({x: values}), np.eye(3, dtype=F))
