"""Needs an OpenCL driver: PoCL comes with ``opweave-opencl[pocl]`` and runs anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opweave.errors import Unavailable

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave_opencl import OpenCLDevice, OpenCLStream

DEVICES: list[Device] = []
MISSING = ""
try:
    from opweave_opencl import OpenCLBackend

    DEVICES += OpenCLBackend().devices()
except ImportError as error:
    MISSING = f"opweave-opencl is not installed: {error}"
except Unavailable as error:
    MISSING = f"no OpenCL driver here: {error}"


class Skipped(pytest.Module):
    """A module that is not even imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def device() -> OpenCLDevice:
    """The first OpenCL device."""
    return DEVICES[0]  # type: ignore[return-value]


@pytest.fixture
def stream(device: OpenCLDevice) -> Iterator[OpenCLStream]:
    with device.open() as opened:
        yield opened  # type: ignore[misc]
