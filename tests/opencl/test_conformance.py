"""What the conformance suite tests beside kernels: order, events, copies, splits over two devices, faults."""

from __future__ import annotations

from opweave_opencl import OpenCLBackend
from tests.support.levels import failed


def test_the_suite_passes():
    assert failed(OpenCLBackend, beside="separate") == []
