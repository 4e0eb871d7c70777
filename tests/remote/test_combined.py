"""Devices in processes of their own as members of a combination, and as devices that weights are split over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from opweave.combined.device import CombinedDevice

F = np.float32
UP = np.random.default_rng(0).integers(-3, 4, (96, 48)).astype(F)
DOWN = np.random.default_rng(1).integers(-3, 4, (48, 96)).astype(F)
VALUE = np.random.default_rng(2).integers(-3, 4, (5, 48)).astype(F)
WANT = np.maximum(VALUE @ UP.T, 0) @ DOWN.T


@pytest.fixture
def far():
    device = opweave_remote.isolated("cpu")
    yield device
    device.connection.close()


def mlp(name: str, device: Any) -> ow.Tensor:
    w = ow.weights({"up": UP, "down": DOWN}, device=device)
    return ow.linear(ow.relu(ow.linear(ow.input(name, (5, 48)), w["up"])), w["down"])


def test_a_combination_computes_with_a_member_elsewhere_and_says_when_it_is_lost(far):
    both = CombinedDevice([far, ow.device("cpu")])
    out = mlp("x_far_combined", both)
    scheduler = ow.Scheduler([both, "host"])
    program = scheduler.build(out)
    for _ in range(2):
        assert np.array_equal(program.run(x_far_combined=VALUE), WANT)
    far.connection.close()
    with pytest.raises(ow.ExecutionError, match="lost a member") as caught:
        program.run(x_far_combined=VALUE)
    assert isinstance(caught.value.__cause__, ow.DeviceLostError)
    with pytest.raises(ow.DeviceLostError, match="lost a member"):
        both.alloc(100)
    with scheduler.without(caught.value.device) as rest:
        assert np.array_equal(rest.build(out).run(x_far_combined=VALUE), WANT)


def test_shards_on_a_device_elsewhere_come_from_the_host_when_it_is_lost(far):
    pair = [far, ow.device("cpu")]
    out = mlp("x_far_shards", {"up": ow.Sharded(pair), "down": ow.Sharded(pair, axis=1)})
    scheduler = ow.Scheduler(pair)
    program = scheduler.build(out)
    assert np.array_equal(program.run(x_far_shards=VALUE), WANT)
    far.connection.close()
    with pytest.raises((ow.ExecutionError, ow.DeviceLostError)):
        program.run(x_far_shards=VALUE)
    with scheduler.without(far) as rest:
        assert np.array_equal(rest.build(out).run(x_far_shards=VALUE), WANT)
