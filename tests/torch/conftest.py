"""Needs torch, in any build. Tests that need an accelerator are skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.skipping import missing, skipped_module

if TYPE_CHECKING:
    from opweave_torch.accelerator import SeparateCpuDevice
    from opweave_torch.device import TorchCpuDevice

MISSING = missing("torch", "opweave_torch")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return skipped_module(module_path, parent, MISSING) if MISSING else None


@pytest.fixture(scope="session")
def device() -> TorchCpuDevice:
    """torch on the CPU, in the memory of the process."""
    from opweave_torch.device import TorchCpuDevice

    return TorchCpuDevice()


@pytest.fixture(scope="session")
def separate() -> SeparateCpuDevice:
    """torch on the CPU, playing an accelerator with memory and queues of its own."""
    from opweave_torch.accelerator import SeparateCpuDevice

    return SeparateCpuDevice()
