"""What the conformance suite tests beside kernels: order, events, copies, splits over two devices, faults."""

from __future__ import annotations

from opweave_torch.backend import TorchBackend
from tests.support.levels import failed


def test_the_suite_passes_in_memory_of_its_own(monkeypatch, one_thread):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "1")
    assert failed(TorchBackend, beside="separate") == []
