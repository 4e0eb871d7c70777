"""The memory of a graph is known without allocating: as a program takes it, on the shipped backends."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import random

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate
from tests.support.random_graphs import Case
from tests.support.real_devices import real_device

device = real_device


def outputs():
    x = ow.input("x", (64, 32))
    w = ow.weights({f"w{i}": np.ones((32, 32), np.float32) for i in range(3)})
    total = ow.state("total", (64, 32))
    h = x
    for weight in w.values():
        h = ow.relu(ow.linear(h, weight)) + h
    return [ow.softmax(h), ow.assign(total, total + h)]


@pytest.mark.parametrize("parallel", [False, True])
def test_a_plan_says_what_its_program_takes(device, parallel):
    wanted = outputs()
    with ow.Scheduler([device, HostDevice()], parallel=parallel) as scheduler:
        before = len(device.live_buffers)
        planned = scheduler.partition(wanted)
        memory = planned.memory
        assert len(device.live_buffers) == before
        assert memory[device.name].temporaries > 0
        program = scheduler.build(wanted)
        assert memory == {name: use._replace(library=0) for name, use in program.memory.items()}
        assert memory[device.name].temporaries == scheduler.buffer_size(device)
        assert (memory[device.name].weights, memory[device.name].states) == (3 * 32 * 32 * 4, 64 * 32 * 4)
        assert memory[HostDevice().name].temporaries == 0


def test_without_bytes_and_more_than_there_is():
    big = ow.weights({"w": ow.Spec((1 << 20, 1 << 20))})["w"]
    with ow.Scheduler(HostDevice()) as scheduler:
        memory = scheduler.partition(ow.linear(ow.input("x", (2, 1 << 20)), big)).memory
        (use,) = memory.values()
        assert use.weights == 1 << 42
        assert use.temporaries >= 2 * (2 << 20) * 4


def test_pins_move_the_bytes():
    x = ow.input("x", (64, 64))
    y = ow.neg(x)
    devices = [Separate("a"), Separate("b")]
    with ow.Scheduler(devices) as scheduler:
        for where in "ab":
            memory = scheduler.partition(y, {y: where}).memory
            assert {name for name, use in memory.items() if use.temporaries} == {where}


def test_of_random_graphs_on_several_devices():
    compared = 0
    for seed in range(25):
        case = Case(random.Random(seed))
        with ow.Scheduler([Separate("a"), Separate("b"), HostDevice()]) as scheduler:
            try:
                memory = scheduler.partition(case.outputs).memory
            except ow.HazardError:  # some have no order
                continue
            assert scheduler.build(case.outputs).memory == memory, f"seed {seed}"
            compared += 1
    assert compared > 15
