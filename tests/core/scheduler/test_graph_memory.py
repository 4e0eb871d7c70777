"""Memory of whole graphs on the shipped backends: reserved for the largest, planned without allocating, given back."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.device import HostDevice
from tests.support.real_devices import make, real_device

device = real_device
W = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
WEIGHTS = ow.weights({"w": W})


def graph(rows):
    x = ow.input(f"x{rows}", (rows, 16))
    return ow.relu(ow.linear(x, WEIGHTS["w"])) + x


def check(program, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 16)).astype(np.float32)
    np.testing.assert_allclose(program.run({f"x{rows}": x}), np.maximum(x @ W.T, 0) + x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("built", [True, False])
def test_memory_that_is_reserved_for_the_largest_graph_serves_the_others(device, built):
    with ow.Scheduler([device]) as scheduler:
        size = scheduler.partition(graph(256)).memory[device.name].temporaries
        assert scheduler.buffer_size(device) == 0
        given = scheduler.reserve(graph(256)) if built else scheduler.reserve(sizes={device: size})
        assert given == {device.name: size}
        assert scheduler.reserve(sizes={device.name: size // 2}) == given  # it is there already
        with pytest.raises(ow.SchedulerError):
            scheduler.reserve(sizes={"nowhere": 1})
        assert scheduler.buffer_size(device) == size
        for rows in (256, 1, 100, 256):
            check(scheduler.build(graph(rows)), rows)
        assert scheduler.stats.allocated == scheduler.buffer_size(device) == size
        check(scheduler.build(graph(300)), 300)  # more than was reserved is allocated
        assert scheduler.buffer_size(device) > size
        scheduler.reset()
        assert scheduler.buffer_size(device) == 0


def test_several_devices_have_memory_of_their_own(device):
    devices = [device, make("torch" if device is make("cpu") else "cpu")]
    x = ow.input("x", (64, 16))
    first, second = ow.neg(x), ow.exp(ow.neg(x))
    with ow.Scheduler(devices) as scheduler:
        pins = {first: devices[0], second: devices[1]}
        planned = scheduler.partition(second, pins).memory
        program = scheduler.build(second, pins)
        for each in devices:
            assert scheduler.buffer_size(each) == planned[each.name].temporaries > 0
            assert scheduler.buffer_type(each) is each.default_buffer_type
        values = np.ones((64, 16), np.float32)
        np.testing.assert_allclose(program.run(x=values), np.exp(-values), rtol=1e-5)


def test_tensors_are_placed_one_behind_the_other_in_a_buffer(device):
    """By hand, at multiples of the alignment, as far as the buffer reaches."""
    kind = device.default_buffer_type
    states = [ow.state(f"s{i}", (5, 3), fill=i) for i in range(3)]
    step = -(-kind.alloc_size(states[0]) // kind.alignment) * kind.alignment
    buffer = kind.alloc(2 * step)
    buffer.clear()
    for i, state in enumerate(states[:2]):
        made = ow.place(state, buffer, i * step)
        assert (made.buffer, made.offset) == (buffer, i * step)
        ow.write(state, np.full((5, 3), i + 1))
    with pytest.raises(ow.BoundsError):
        ow.place(states[2], buffer, 2 * step)
    with pytest.raises(ow.SchedulerError, match="already lies"):
        ow.place(states[0], buffer, 0)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        assert (scheduler.build(states[0] + states[1]).run() == 3).all()


def test_weights_are_placed_together_in_a_kind_of_memory(device):
    kind = device.default_buffer_type
    arrays = {f"w{i}": np.full((7, 5), i, np.float32) for i in range(4)}
    planned = ow.weights({name: ow.Spec(a.shape) for name, a in arrays.items()})
    need = sum(-(-kind.alloc_size(t) // kind.alignment) * kind.alignment for t in planned.values())
    held = ow.weights(arrays, buffer_type=kind)
    parts = {t.placement.buffer for t in held.values()}
    if not kind.is_host:
        assert len(parts) == 1
        assert sum(part.size for part in parts) <= need
    assert {part.type for part in parts} == {kind}
    assert {part.usage for part in parts} == {ow.Usage.WEIGHTS}
    for name, values in arrays.items():
        assert np.array_equal(ow.read(held[name]), values)
