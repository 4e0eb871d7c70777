"""A graph again, with states of its own, for the same device or another one."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.runtime.host.device import HostDevice
from tests.support.real_devices import NAMES, make, real_device

device = real_device
F = np.float32


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def decoder(device):
    """Adds its product to a state, and returns both."""
    w = ow.weights({"w": array(6, 6)}, device=device)
    total = ow.state("total", (2, 6), device=device)
    x = ow.input("x", (2, 6))
    return total, ow.assign(total, total + ow.linear(x, w["w"]))


@pytest.mark.parametrize("other", NAMES)
def test_states_are_its_own_and_placed_weights_are_shared(device, other):
    """On the device itself nothing is copied; on another one the weights are, once, and no run copies them."""
    total, output = decoder(device)
    v, far = array(2, 6, seed=1), make(other)
    step = v @ array(6, 6).T
    with ow.Scheduler([device, HostDevice()]) as first, ow.Scheduler([far, HostDevice()]) as second:
        program = first.build(output)
        program.run(x=v)
        copied = opweave_cost.copy_graph(output, far)
        assert copied.states[total] is not total
        assert copied.states[total].placement.buffer.device is far
        again = second.build(copied.outputs)
        assert again.n_copies == 0
        for n in (2, 3):
            np.testing.assert_allclose(again.run(x=v), n * step, rtol=1e-4, atol=1e-4)
        assert second.stats.copied == 0
        np.testing.assert_allclose(ow.read(total), step, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(program.run(x=v), 2 * step, rtol=1e-4, atol=1e-4)
        third = second.build(opweave_cost.copy_graph(output, far).outputs)
        places = [{r.buffer for r in p.memory_map().places.values() if r.buffer.usage is ow.Usage.WEIGHTS}
                  for p in (again, third)]  # fmt: skip
        assert places[0] == places[1]
        np.testing.assert_allclose(third.run(x=v), 3 * step, rtol=1e-4, atol=1e-4)


def test_the_copy_has_the_form_of_the_outputs_and_shares_what_reads_no_state():
    x, total = ow.input("x", 3), ow.state("total", 3, fill=2)
    plain, read = ow.neg(x), x + total
    copied = opweave_cost.copy_graph({"plain": plain, "read": read})
    assert copied.outputs["plain"] is plain
    assert copied.outputs["read"] is not read
    assert len(opweave_cost.copy_graph((plain, read)).outputs) == 2
    state = copied.states[total]
    assert (state.leaf.name, state.shape, state.dtype) == ("total", (3,), total.dtype)
    ow.write(total, [5, 6, 7])
    assert np.array_equal(ow.read(state), [2, 2, 2])
    assert np.array_equal(ow.read(opweave_cost.copy_graph(read).states[total]), [5, 6, 7])
    with ow.Scheduler(HostDevice()) as scheduler:
        assert np.array_equal(scheduler.build(copied.outputs).run(x=np.ones(3, F))["read"], [3, 3, 3])


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(ow.SchedulerError, match="outputs are"):
        opweave_cost.copy_graph(3)
    with pytest.raises(ow.UnknownNameError):
        opweave_cost.copy_graph(ow.neg(ow.state("s", 3)), "nowhere")
