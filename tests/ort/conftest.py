"""Needs ONNX Runtime; any package of it will do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from opweave_ort.device import OrtDevice

MISSING = ""
try:
    import onnxruntime  # noqa: F401

    import opweave_ort  # noqa: F401
except ImportError as error:
    MISSING = f"onnxruntime or opweave-ort is not installed: {error}"


class Skipped(pytest.Module):
    """A module that is not even imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def device() -> OrtDevice:
    """ONNX Runtime's kernels for the CPU."""
    from opweave_ort.device import OrtDevice
    from opweave_ort.providers import PROVIDERS

    return OrtDevice(PROVIDERS[-1])
