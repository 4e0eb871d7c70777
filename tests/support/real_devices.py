"""Devices of the shipped backends, each with memory that no other one reaches: `cpu`, `opencl`, `torch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg
from opweave.graph.dtypes import f32

__all__ = ["NAMES", "make", "real_device", "three", "values", "vector"]


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


def vector(buffer: ow.Buffer, offset: int = 0) -> Arg:
    """16 numbers in f32."""
    return Arg(buffer, offset, f32, (16,), (4,))


def three(device: ow.Device) -> list[Arg]:
    """Two operands of ones and a result of zeros."""
    buffers = [device.alloc(64) for _ in range(3)]
    for buffer, value in zip(buffers, (1, 1, 0), strict=True):
        buffer.upload(0, np.full(16, value, np.float32))
    return [vector(buffer) for buffer in buffers]


def values(arg: Arg) -> np.ndarray[Any, Any]:
    """All of an operand's buffer, in f32."""
    assert arg.buffer is not None
    return arg.buffer.read().view(np.float32)
