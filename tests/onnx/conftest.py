"""Needs the package onnx. Devices for the tests of the front end."""

from __future__ import annotations

from pathlib import Path

import pytest

import opweave as ow
from tests.support.skipping import missing, skipped_module

PLACEMENTS = ("cpu", "torch:cpu", "ort:cpu", "opencl:0")
"""Devices that models run on, each with ``host`` for what it refuses."""
MISSING = missing("onnx", "opweave_onnx")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return skipped_module(module_path, parent, MISSING) if MISSING else None


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> list[str]:
    """A device that is here, and the host."""
    try:
        ow.device(request.param)
    except ow.OpweaveError as error:
        pytest.skip(str(error))
    return [request.param, "host"]
