"""What the conformance suite tests beside kernels: order, events, copies, splits over two devices, faults."""

from __future__ import annotations

import pytest

from opweave_cpu import CpuBackend
from tests.support.levels import failed


@pytest.mark.parametrize(("devices", "beside", "jit"), [("1", "host", "1"), ("2", "separate", "0")])
def test_the_suite_passes(monkeypatch, devices, beside, jit):
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", devices)
    monkeypatch.setenv("OPWEAVE_CPU_JIT", jit)
    assert failed(CpuBackend, beside=beside) == []
