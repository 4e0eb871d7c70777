"""Devices in processes of their own as members of a combination, and as devices that weights are split over."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from opweave_combined.device import CombinedDevice
from tests.support.integer_mlp import VALUE, WANT, mlp


@pytest.fixture
def far():
    device = opweave_remote.isolated("cpu")
    yield device
    device.connection.close()


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
