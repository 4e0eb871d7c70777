"""Memory in huge pages: weights, states and temporaries lie there, and every reader of host memory reads them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import opweave as ow
from opweave_cpu.huge_pages import HUGE_PAGE, has_huge_pages

pytestmark = pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages")
F = np.float32


def kind() -> ow.BufferType:
    device = ow.device("cpu")  # cpu:0 where there are several
    return device.buffer_type(f"{device.name}.huge_pages")


def flags_at(address: int) -> list[str]:
    """What the system notes of the mapping with this address; ``hg``: huge pages were asked for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


def test_a_buffer_begins_with_a_page_and_is_of_huge_ones():
    buffer = kind().alloc(3 * HUGE_PAGE + 5)
    assert buffer.address is not None
    assert buffer.address % HUGE_PAGE == 0
    assert "hg" in flags_at(buffer.address)
    assert "hg" in flags_at(buffer.address + buffer.size - 1)
    data = np.random.default_rng(0).integers(0, 256, buffer.size).astype(np.uint8)
    buffer.upload(0, data)
    assert bytes(buffer.read()) == data.tobytes()
    buffer.free()


def test_more_than_there_is_raises_a_typed_error():
    with pytest.raises(ow.AllocationError, match="cpu"):
        kind().alloc(1 << 60)


@pytest.mark.parametrize("name", ["cpu", "torch:cpu"])
def test_weights_states_and_temporaries_lie_in_huge_pages(name):
    w = np.random.default_rng(1).standard_normal((64, 32)).astype(F)
    weight = ow.weights({"w": w}, device="cpu", buffer_type=kind().name)["w"]
    state = ow.state(f"huge-{name}", (4, 64), device="cpu", buffer_type=kind().name)
    for leaf in (weight, state):
        assert leaf.placement is not None
        assert leaf.placement.buffer.type is kind()
    x = ow.input("huge-x", (4, 32))
    value = np.random.default_rng(2).standard_normal((4, 32)).astype(F)
    kinds: dict[ow.Device | str, ow.BufferType] | None = {kind().device: kind()} if name == "cpu" else None
    with ow.Scheduler([name, "host"], buffer_types=kinds) as scheduler:
        program = scheduler.build(ow.assign(state, ow.relu(ow.linear(x, weight)) + state))
        program.run({x: value})
        got = program.run({x: value})
        assert program.n_copies == 0 or not ow.device(name).reaches(kind().space)
        if kinds:
            places = program.memory_map(0).places
            held = [p.buffer for s, p in places.items() if program.partition.arena_of[s] >= 0]
            assert held
            assert all(buffer.type is kind() for buffer in held)
    np.testing.assert_allclose(got, 2 * np.maximum(value @ w.T, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ow.read(weight), w)
