"""Kernels are right with whatever value of a tunable a machine measures."""

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Tunable
from opweave_cost.tunables import measure_tunables
from opweave_torch.device import TorchCpuDevice
from opweave_torch.kernels.encoding import _AT_ONCE
from opweave_torch.tunables import TUNABLES

CASES = [(tunable, value) for tunable in TUNABLES for value in (tunable.choices[0], tunable.choices[-1])]


@pytest.mark.parametrize(("tunable", "value"), CASES, ids=[f"{tunable.name}-{value}" for tunable, value in CASES])
def test_results(tunable: Tunable, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the references."""
    monkeypatch.setattr(tunable, "value", value)
    rng = np.random.default_rng(0)
    for node in tunable.samples():
        feeds = {leaf: rng.standard_normal(leaf.shape, np.float32) for leaf in node.srcs}
        got, want = (ow.Scheduler(device).build(node).run(feeds) for device in ("torch:cpu", "host"))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TorchCpuDevice()
    assert device.tunables == TUNABLES
    for tunable in TUNABLES:
        monkeypatch.setattr(tunable, "value", tunable.default)
    seen = []
    measure_tunables(device, lambda name, done, of: seen.append((name, done, of)))
    assert seen == [(tunable.name, at, len(TUNABLES)) for at, tunable in enumerate(TUNABLES)]
    assert all(tunable.value in tunable.choices for tunable in TUNABLES)


def test_a_long_row_is_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements are encoded some rows at a time; a tensor with one axis is one row, also where it is long."""
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    for at_once in (_AT_ONCE.value, 256):
        monkeypatch.setattr(_AT_ONCE, "value", at_once)
        for dtype in ("q8_0", "q4_k"):
            graph = ow.quantize(ow.input("x", (4096,)), dtype)
            got, want = (ow.Scheduler(device).build(graph).run(x=values) for device in ("torch:cpu", "host"))
            np.testing.assert_array_equal(got, want)
