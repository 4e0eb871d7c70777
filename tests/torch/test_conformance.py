"""What the conformance suite tests beside kernels: order, events, copies, splits over two devices, faults."""

from __future__ import annotations

import pytest
import torch

from opweave_torch.backend import TorchBackend
from tests.support.levels import failed


@pytest.fixture
def one_thread():
    """Every thread that calls torch gets as many more as torch uses, and all of them spin while they wait."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def test_the_suite_passes_in_memory_of_its_own(monkeypatch, one_thread):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "1")
    assert failed(TorchBackend, beside="separate") == []
