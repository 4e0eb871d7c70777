"""Needs ONNX Runtime; any package of it will do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.skipping import missing, skipped_module

if TYPE_CHECKING:
    from opweave_ort.device import OrtDevice

MISSING = missing("onnxruntime", "opweave_ort")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return skipped_module(module_path, parent, MISSING) if MISSING else None


@pytest.fixture(scope="session")
def device() -> OrtDevice:
    """ONNX Runtime's kernels for the CPU."""
    from opweave_ort.device import OrtDevice
    from opweave_ort.providers import PROVIDERS

    return OrtDevice(PROVIDERS[-1])
