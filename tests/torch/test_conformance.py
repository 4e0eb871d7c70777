"""Order, marks, copies, splits over two devices, faults: what the conformance suite asks beside kernels."""

from __future__ import annotations

import pytest

from opweave_torch.backend import TorchBackend
from tests.core.conformance import failed


@pytest.mark.parametrize(("separate", "beside"), [("0", "host"), ("1", "separate")])
def test_the_suite_passes(monkeypatch, separate, beside):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", separate)
    assert failed(TorchBackend, beside=beside) == []
