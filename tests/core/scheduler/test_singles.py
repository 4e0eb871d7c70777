"""Streams that say of a step by itself whether it may share a group, and builds that ask nothing twice."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.contract import Call, Group, Single, Step, Stream, pointwise_groups
from opweave.contract.kernels import Kernel, KernelTable
from opweave.contract.step import Choice
from opweave.contract.workspace import Scratch
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.plan.chunks import FILLED_LIMIT
from tests.support.devices import BASIC, Separate

F = np.float32


class AskedForAll(Stream):
    """Fuses pointwise steps; remembers what it was asked to fuse."""

    asked: list[list[str]]

    @property
    def lists_operands(self) -> bool:
        return False

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        self.asked = [*getattr(self, "asked", []), [step.op for step in steps]]
        runs = pointwise_groups(steps, lambda step: OPS[step.op].pointwise)
        return [Group(tuple(run), self.device._workspace(run[0]) if len(run) == 1 else 0) for run in runs]

    def _bind(self, group: Group) -> Call:
        if len(group.steps) == 1:
            return super()._bind(group)

        def call() -> None:
            values: dict[int, np.ndarray] = {}
            for step in group.steps:
                srcs = [values.get(s.value) if s.value in values else s.view for s in step.srcs]
                values[step.out.value] = OPS[step.op].reference(*srcs, **step.attrs).astype(F)
                if step.out.buffer is not None:
                    step.out.view[...] = values[step.out.value]

        return call


class AskedForRuns(AskedForAll):
    """The same, of which each kind of steps is asked about first."""

    singles: list[str]

    def _single(self, step: Step) -> Single:
        self.singles = [*getattr(self, "singles", []), step.op]
        assert step.choice is not None
        return Single(step.choice.kernel, self.device._workspace(step), OPS[step.op].pointwise)


class AskedBehindTanh(AskedForAll):
    """Fuses no steps but those that find a ``tanh`` before them."""

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        super()._fuse(steps)
        return [Group((step,), self.device._workspace(step)) for step in steps]

    def _single(self, step: Step) -> Single:
        assert step.choice is not None
        follows = frozenset({"tanh"} if step.op == "linear" else ())
        return Single(step.choice.kernel, self.device._workspace(step), step.op == "tanh", follows)


class Fusing(Separate):
    def __init__(self, name: str, kind: type[Stream]) -> None:
        super().__init__(name, (*BASIC, "tanh", "softmax"))
        self.stream_class = kind

    def _open(self, **params: object) -> Stream:
        return self.stream_class(self)


WEIGHT = ow.constant(np.linspace(-1, 1, 64, dtype=F).reshape(8, 8))
OPERATIONS: Sequence[Callable[[ow.Tensor, ow.Tensor], ow.Tensor]] = (
    lambda a, b: a + b,
    lambda a, b: ow.tanh(a),
    lambda a, b: a * b,
    lambda a, b: ow.softmax(a),
    lambda a, b: ow.linear(a, WEIGHT),
    lambda a, b: ow.relu(ow.concat([a, b], axis=1)[:, 4:12]),
)


def random_graph(
    picks: Sequence[tuple[int, int, int]], rows: int, name: str
) -> tuple[ow.Tensor, dict[str, np.ndarray]]:
    """A graph of pointwise steps and others, and its feeds; each pick is an operation and two of the values before."""
    x = ow.input(f"{name}{rows}", (rows, 8))
    values = [x]
    for op, i, j in picks:
        values.append(OPERATIONS[op](values[i % len(values)], values[j % len(values)]))
    return values[-1] + values[len(values) // 2], {x.name: np.random.default_rng(rows).random((rows, 8), F)}


PICKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None)
@given(PICKS)
def test_groups_are_those_of_a_stream_that_is_asked_for_all_steps(picks):
    output, feeds = random_graph(picks, 5, "single")
    groups: list[object] = []
    results: list[np.ndarray] = []
    for kind in (AskedForAll, AskedForRuns):
        scheduler = ow.Scheduler([Fusing("f", kind), HostDevice()])
        program = scheduler.build(output)
        groups.append([[group.indices for group in found] for found in program.earlier.groups.of_split])
        results.append(program.run(feeds))
    assert all(len(run) > 1 for run in scheduler.streams[0].__dict__.get("asked", []))
    assert groups[0] == groups[1]
    np.testing.assert_array_equal(results[0], results[1])
    host = ow.Scheduler([HostDevice()]).build(output).run(feeds)
    np.testing.assert_allclose(results[1], host, rtol=1e-5, atol=1e-6)


def test_a_stream_is_asked_once_for_each_kind_of_steps():
    x = ow.input("asked_once", (3, 7))
    y = x
    for _ in range(5):
        y = ow.tanh(ow.softmax(y))
    scheduler = ow.Scheduler([Fusing("once", AskedForRuns), HostDevice()])
    scheduler.build(y)
    stream = scheduler.streams[0]
    assert isinstance(stream, AskedForRuns)
    assert sorted(stream.singles) == ["softmax", "tanh"]
    assert "asked" not in vars(stream), "no two pointwise steps follow each other"


def test_a_step_that_follows_another_one_is_in_a_run_only_behind_it():
    x = ow.input("behind", (3, 8))
    plain = ow.linear(ow.softmax(ow.linear(x, WEIGHT)), WEIGHT)
    scheduler = ow.Scheduler([Fusing("behind", AskedBehindTanh), HostDevice()])
    scheduler.build(plain)
    stream = scheduler.streams[0]
    assert isinstance(stream, AskedBehindTanh)
    assert "asked" not in vars(stream), "no tanh, no run"
    value = np.random.default_rng(3).random((3, 8), F)
    result = scheduler.build(ow.linear(ow.linear(ow.tanh(plain), WEIGHT), WEIGHT)).run(behind=value)
    assert stream.asked == [["tanh", "linear", "linear"]]
    weight = np.linspace(-1, 1, 64, dtype=F).reshape(8, 8)
    powers = np.exp(value @ weight.T)
    expected = np.tanh(powers / powers.sum(-1, keepdims=True) @ weight.T) @ weight.T @ weight.T
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Stream, AskedForAll, AskedForRuns])
def test_a_kernel_is_asked_once_for_the_workspace_of_equal_steps(kind):
    asked = []
    kernels = KernelTable(dtypes="f32")

    def workspace(step: Step) -> dict[str, tuple[str, tuple[int, ...]]]:
        asked.append(step.op)
        return {"copy": ("f32", step.out.shape)}

    @kernels("softmax", workspace=workspace)
    def softmax(stream, op, out, x, *, copy, **attrs):
        def call() -> None:
            copy.view[...] = x.view
            out.view[...] = OPS[op].reference(copy.view, **attrs)

        return call

    device = Fusing("counted", kind)
    device.kernels = kernels
    x = ow.input("counted", (4, 6))
    y = x
    for _ in range(6):
        y = ow.softmax(y)
    program = ow.Scheduler([device]).build(y)
    assert asked == ["softmax"]
    value = np.random.default_rng(0).random((4, 6), F)
    expected = value
    for _ in range(6):
        powers = np.exp(expected - expected.max(-1, keepdims=True))
        expected = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(program.run(counted=value), expected, rtol=1e-5)


def test_choices_stay_in_their_process():
    def factory(*args: object) -> Call:
        raise AssertionError

    kernel = Kernel(factory, frozenset(), frozenset(), "dense", False, None, None)
    assert pickle.loads(pickle.dumps([Choice(kernel, Scratch())])) == [None]


@settings(max_examples=25, deadline=None)
@given(PICKS, st.lists(st.integers(1, 40), min_size=2, max_size=3, unique=True))
def test_builds_in_other_sizes_are_as_first_ones(picks, sizes):
    device = Fusing("sized", AskedForRuns)

    def groups(program: ow.Program) -> list[list[tuple[int, ...]]]:
        return [[group.indices for group in found] for found in program.earlier.groups.of_split]

    with ow.Scheduler([device, HostDevice()]) as scheduler:
        for rows in sizes:
            output, feeds = random_graph(picks, rows, "sized")
            later = scheduler.build(output)
            with ow.Scheduler([device, HostDevice()]) as fresh:
                first = fresh.build(output)
                assert groups(later) == groups(first)
                np.testing.assert_array_equal(later.run(feeds), first.run(feeds))
                took, least = later.memory["sized"].temporaries, first.memory["sized"].temporaries
                assert took <= least * FILLED_LIMIT, "memory that the scheduler has is filled up to that limit"
