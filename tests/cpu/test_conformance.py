"""What the conformance suite tests beside kernels: order, events, copies, splits over two devices, faults."""

from __future__ import annotations

import pytest

from opweave_cpu import CpuBackend
from tests.support.levels import failed


@pytest.mark.parametrize(("devices", "beside"), [("1", "host"), ("2", "separate")])
def test_the_suite_passes(monkeypatch, devices, beside):
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", devices)
    assert failed(CpuBackend, beside=beside) == []
