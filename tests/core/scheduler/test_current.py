"""Building the same outputs again gives the same program until a leaf is moved, then a new one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Usage
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Plain, Separate

F = np.float32


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (2, 4))


def placed_on(device: ow.Device, values: np.ndarray[Any, Any]) -> tuple[ow.Tensor, ow.Buffer]:
    (weight,) = ow.weights({"w": values}, device=device).values()
    assert weight.leaf is not None
    assert weight.leaf.placement is not None
    return weight, weight.leaf.placement.buffer


def test_another_usage_of_a_buffer_is_seen_by_the_next_build(x):
    first, last = Separate("first"), Separate("last")
    (weight, buffer), (bias, _) = placed_on(last, np.ones((4, 4), F)), placed_on(first, np.zeros(4, F))
    scheduler = ow.Scheduler([first, last, HostDevice()])
    y = ow.linear(x, weight, bias)
    before = scheduler.build(y)
    assert before.device_of(y) is last
    buffer.usage = Usage.ANY  # weights decide where they are read, other memory does not
    assert not before.is_current
    after = scheduler.build(y)
    assert after is not before
    assert after.device_of(y) is first
    assert scheduler.build(y) is after
    buffer.usage = Usage.WEIGHTS
    assert scheduler.build(y).device_of(y) is last
    assert before.run(x=np.ones((2, 4), F)).tolist() == [[4] * 4] * 2, "it runs as it was built"


def test_bytes_that_a_leaf_is_placed_over_are_seen_by_the_next_build(x):
    device = Separate("g")
    scheduler = ow.Scheduler([device, HostDevice()])
    (weight,) = ow.weights({"w": np.ones((4, 4), F)}).values()
    y = ow.linear(x, weight)
    v = np.ones((2, 4), F)
    assert scheduler.build(y).run(x=v).tolist() == [[4] * 4] * 2
    buffer = device.alloc(64)
    buffer.upload(0, np.full((4, 4), 2, F))
    ow.place(weight, buffer)
    assert scheduler.build(y).run(x=v).tolist() == [[8] * 4] * 2


def test_compiled_functions_see_it_too(x):
    device = Separate("g")
    (weight,) = ow.weights({"w": np.ones((4, 4), F)}).values()
    scheduler = ow.Scheduler([device, HostDevice()])
    function = ow.compile(lambda x: ow.linear(x, weight), devices=scheduler)
    outputs = ow.compile(ow.linear(x, weight), devices=scheduler)
    v = np.ones((2, 4), F)
    assert function(v).tolist() == outputs(v).tolist() == [[4] * 4] * 2
    buffer = device.alloc(64)
    buffer.upload(0, np.full((4, 4), 2, F))
    ow.place(weight, buffer)
    assert function(v).tolist() == outputs(v).tolist() == [[8] * 4] * 2


def test_what_happens_to_other_leaves_changes_nothing(x):
    device = Separate("g")
    weight, _ = placed_on(device, np.ones((4, 4), F))
    other, buffer = placed_on(device, np.ones((4, 4), F))
    scheduler = ow.Scheduler([device, HostDevice()])
    mine, theirs = scheduler.build(ow.linear(x, weight)), scheduler.build(ow.linear(x, other))
    buffer.usage = Usage.ANY
    ow.place(ow.state("s", (4,)), device.alloc(16))
    assert scheduler.build(ow.linear(x, weight)) is mine
    assert scheduler.build(ow.linear(x, other)) is not theirs


def test_states_that_programs_place_are_no_change(x):
    scheduler = ow.Scheduler([Separate("g"), HostDevice()])
    total = ow.state("total", (2, 4))
    y = ow.assign(total, total + x)
    program = scheduler.build(y)
    assert scheduler.build(y) is program
    scheduler.build(ow.assign(ow.state("other", (2, 4)), x))
    assert scheduler.build(y) is program


def test_a_program_whose_weights_were_freed_is_not_given_again(x):
    device = Separate("g")
    weight, buffer = placed_on(device, np.ones((4, 4), F))
    scheduler = ow.Scheduler([device, HostDevice()])
    y = ow.linear(x, weight)
    program = scheduler.build(y)
    buffer.free()
    assert not program.is_current
    with pytest.raises(ow.LifetimeError, match="was freed"):
        scheduler.build(y)


def test_a_leaf_that_left_a_device_is_built_anew(x):
    device = Separate("g")
    (weight,) = ow.weights({"w": np.ones((4, 4), F)}, device=device).values()
    other = ow.Scheduler([device, HostDevice()])
    y = ow.linear(x, weight)
    v = np.ones((2, 4), F)
    assert other.build(y).run(x=v).tolist() == [[4] * 4] * 2
    scheduler = ow.Scheduler([device, HostDevice()])
    scheduler.build(y)
    scheduler.without(device)
    assert other.build(y).run(x=v).tolist() == [[4] * 4] * 2


def test_a_function_drops_the_program_that_was_called_least_recently():
    traced: list[int] = []

    @ow.compile(devices=Plain())
    def function(x: Any) -> ow.Tensor:
        traced.append(x.shape[0])
        return ow.neg(x)

    for n in range(1, 65):
        function(np.zeros(n, F))
    function(np.zeros(1, F))
    function(np.zeros(65, F))  # 2 goes
    del traced[:]
    for n in (1, 3, 65, 2):
        function(np.zeros(n, F))
    assert traced == [2]
