"""Needs torch, in any build. Tests that need an accelerator are skipped without one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from opweave_torch.accelerator import SeparateCpuDevice
    from opweave_torch.device import TorchCpuDevice

MISSING = ""
try:
    import torch  # noqa: F401

    import opweave_torch  # noqa: F401
except ImportError as error:
    MISSING = f"torch or opweave-torch is not installed: {error}"


class Skipped(pytest.Module):
    """A module that is not even imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


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
