"""Two parts of an OpenCL device as one device."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave_combined.device import CombinedDevice
from opweave_conformance.suite import Suite

F = np.float32


@pytest.fixture(scope="module")
def both(halves):
    """A combination of two parts of the device."""
    return CombinedDevice(halves)


def test_they_compute_an_mlp_together(both):
    rng = np.random.default_rng(0)
    up, down, value = (rng.integers(-3, 4, shape).astype(F) for shape in ((96, 48), (48, 96), (5, 48)))
    group = ow.weights({"up": up, "down": down}, device=both)
    x = ow.input("x_parts_combined", (5, 48))
    with ow.Scheduler(both) as scheduler:
        program = scheduler.build(ow.linear(ow.relu(ow.linear(x, group["up"])), group["down"]))
        for _ in range(2):
            got = program.run(x_parts_combined=value)
            assert np.array_equal(got, np.maximum(value @ up.T, 0) @ down.T)


def test_they_conform(both):
    registry = ow.Registry(environ={}, search=[])
    registry.register_device(both)
    checks = ["hygiene-*", "memory-s*", "assign-f32-*", "async-upload-*", "observe-separate-state-written", "fault-ra*"]
    suite = Suite("combineddevice", only=checks, using=registry)
    results = [suite.perform(item) for item in suite.items]
    assert [f"{r.name}: {r.reason}" for r in results if r.status == "failed"] == []
    assert {r.level for r in results if r.status == "passed"} == {0, 1, 2, 3, 4, 5}
