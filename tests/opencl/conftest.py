"""Needs an OpenCL driver: PoCL and Intel's come with ``opweave-opencl[pocl,intel]``. Runs on every one that works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import opweave as ow
from opweave.errors import Unavailable
from tests.support.notes import note
from tests.support.opencl import DEVICES, SKIPPED
from tests.support.skipping import skipped_module

if TYPE_CHECKING:
    from opweave_opencl import OpenCLDevice, OpenCLStream


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if DEVICES or module_path.stem == "test_drivers":
        return None
    return skipped_module(module_path, parent, "; ".join(f"{driver}: {why}" for driver, why in SKIPPED.items()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    ran = ", ".join(device.description for device in DEVICES)
    not_on = [f"OpenCL: not on {driver}: {why}" for driver, why in SKIPPED.items()]
    note(session.config, [f"OpenCL: the tests ran on {ran or 'no driver'}", *not_on])


@pytest.fixture(scope="session", params=DEVICES, ids=lambda device: device.cl_device.platform.name.split("(")[0])
def device(request: pytest.FixtureRequest) -> OpenCLDevice:
    """The first device of each driver that works."""
    return request.param


@pytest.fixture
def stream(device: OpenCLDevice) -> Iterator[OpenCLStream]:
    with device.open() as opened:
        yield opened  # type: ignore[misc]


@pytest.fixture(scope="module")
def halves(device: OpenCLDevice) -> list[ow.Device]:
    """Two parts of the device, as devices of their own."""
    from opweave_opencl import OpenCLBackend
    from opweave_opencl.discovery import PARTS

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PARTS, "2")
        try:
            registry = ow.Registry()
            registry.register(OpenCLBackend)
        except Unavailable as error:
            pytest.skip(str(error))
        devices = registry.devices()
    return [d for d in devices if d.name.startswith(f"opencl:{device.id}.")]
