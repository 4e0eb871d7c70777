"""Streams that fuse: groups are one moment of the memory plan, and what lives only inside one gets no memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Call, Group, Step, Stream, pointwise_groups
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate

F = np.float32


class FusingStream(Stream):
    """Runs each group of pointwise steps as one call; values inside a group never touch memory."""

    groups: list[list[str]]
    live: list[list[bool]]

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        runs = pointwise_groups(steps, lambda s: OPS[s.op].pointwise)
        self.groups = [[s.op for s in run] for run in runs]
        self.live = [[s.live for s in run] for run in runs]
        return [Group(tuple(run), workspace=64 * len(run)) for run in runs]

    def _bind(self, group: Group) -> Call:
        assert group.scratch is not None
        assert group.scratch.size == group.workspace

        def call() -> None:
            values: dict[int, np.ndarray] = {}
            for step in group.steps:
                srcs = [values.get(s.value) if s.value in values else s.view for s in step.srcs]
                result = OPS[step.op].reference(*srcs, **step.attrs).astype(F)
                values[step.out.value] = result
                if step.out.buffer is not None:
                    step.out.view[...] = result

        return call


class Fusing(Separate):
    stream_class = FusingStream

    def _open(self, **params: object) -> Stream:
        return FusingStream(self)


@pytest.fixture
def device() -> Fusing:
    return Fusing("g")


def test_values_inside_a_group_get_no_memory(device):
    x = ow.input("x", (64, 64))
    t = x
    for _ in range(4):
        t = ow.neg(ow.exp(t))
    scheduler = ow.Scheduler([device, HostDevice()])
    program, stream = scheduler.build(t), scheduler.streams[0]
    assert isinstance(stream, FusingStream)
    assert stream.groups == [["exp", "neg"] * 4]
    assert stream.live == [[False] * 7 + [True]]
    assert program.memory["g"].temporaries == 2 * 64 * 64 * 4 + 64 * 8, "the input, the result, the workspace"
    v = np.random.default_rng(0).standard_normal((64, 64)).astype(F)
    expected = v
    for _ in range(4):
        expected = -np.exp(expected)
    np.testing.assert_allclose(program.run(x=v), expected, rtol=1e-5)


def test_values_that_others_need_are_written_although_they_are_in_a_group(device):
    x = ow.input("x", (8, 8))
    a = ow.exp(x)
    b = ow.neg(a)
    product = ow.matmul(a, b)
    program = ow.Scheduler([device, HostDevice()]).build([b, ow.relu(product), a])
    v = np.random.default_rng(0).standard_normal((8, 8)).astype(F)
    got_b, got, got_a = program.run(x=v)
    np.testing.assert_allclose(got_a, np.exp(v), rtol=1e-6)
    np.testing.assert_allclose(got_b, -np.exp(v), rtol=1e-6)
    np.testing.assert_allclose(got, np.maximum(got_a @ got_b, 0), rtol=1e-5)


def test_a_device_boundary_ends_a_group(device):
    x = ow.input("x", (4, 4))
    a = ow.exp(x)
    far = ow.custom(lambda m: m + 1, a, like=a)
    y = ow.neg(far) + a
    program = ow.Scheduler([device, HostDevice()]).build(y)
    v = np.ones((4, 4), F)
    np.testing.assert_allclose(program.run(x=v), -(np.exp(v) + 1) + np.exp(v), atol=1e-6)


def test_a_stream_that_loses_steps_is_refused(device):
    class Losing(FusingStream):
        def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
            return super()._fuse(steps[1:])

    stream = Losing(device)
    x = ow.input("x", (4, 4))
    with pytest.raises(ow.Broken, match="each of the 2 steps"):
        ow.Scheduler([stream, HostDevice()]).build(ow.neg(ow.matmul(x, x)))
