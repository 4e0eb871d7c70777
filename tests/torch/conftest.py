"""Needs torch, in any build. Tests that need an accelerator are skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Every thread that calls torch gets as many more as torch uses, and all of them spin while they wait."""
    import torch

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
