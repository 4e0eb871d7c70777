"""Devices of the shipped backends, each with memory that no other one reaches: `cpu`, `opencl`, `torch`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import opweave as ow

__all__ = ["NAMES", "make", "real_device"]


def _cpu() -> ow.Device:
    from opweave_cpu.device import IsolatedCpuDevice

    return IsolatedCpuDevice(0)


def _opencl() -> ow.Device:
    from tests.support.opencl import DEVICES

    if not DEVICES:
        pytest.skip("no OpenCL driver works here")
    return DEVICES[0]


def _torch() -> ow.Device:
    pytest.importorskip("torch")
    from opweave_torch.accelerator import SeparateCpuDevice

    return SeparateCpuDevice()


_MAKERS: dict[str, Callable[[], ow.Device]] = {"cpu": _cpu, "opencl": _opencl, "torch": _torch}
_MADE: dict[str, ow.Device] = {}

NAMES = tuple(_MAKERS)
"""One device of each shipped backend that computes."""


def make(name: str) -> ow.Device:
    """The device of that backend; the same one each time. Skips the test where the backend finds no hardware."""
    if name not in _MADE:
        made = _MADE[name] = _MAKERS[name]()
        if not getattr(made, "_name", ""):
            made._name = name
    return _MADE[name]


@pytest.fixture(params=NAMES)
def real_device(request: pytest.FixtureRequest) -> ow.Device:
    """Each of them in turn."""
    return make(request.param)
