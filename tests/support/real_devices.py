"""Devices of the shipped backends, all but `ort` and `host` with memory that no other one reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg
from opweave.graph.dtypes import f32
from opweave.runtime.host.device import HostDevice

__all__ = ["COMBINATIONS", "NAMES", "combined", "make", "real_device", "three", "values", "vector"]


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


def _second_cpu() -> ow.Device:
    from opweave_cpu.device import IsolatedCpuDevice

    device = IsolatedCpuDevice(1)
    device.name = "cpu-2"
    return device


def _second_opencl() -> ow.Device:
    from tests.support.opencl import DEVICES

    if len(DEVICES) < 2:
        pytest.skip("no second OpenCL driver works here")
    return DEVICES[1]


def _ort() -> ow.Device:
    pytest.importorskip("onnxruntime")
    return ow.device("ort:cpu")


_MAKERS: dict[str, Callable[[], ow.Device]] = {
    "cpu": _cpu, "opencl": _opencl, "torch": _torch, "ort": _ort, "cpu 2": _second_cpu, "opencl 2": _second_opencl,
    "host": HostDevice,
}  # fmt: skip
_MADE: dict[str, ow.Device] = {}

NAMES = ("cpu", "opencl", "torch")
"""One device of each shipped backend that computes in memory of its own."""

COMBINATIONS = (
    "cpu", "opencl", "opencl 2", "torch", "ort", "remote", "host", "cpu + cpu 2", "opencl + cpu", "torch + opencl",
    "ort + cpu", "remote + cpu 2",
)  # fmt: skip
"""The devices of all shipped backends, alone and in pairs; see `combined`."""


def make(name: str) -> ow.Device:
    """The device of that backend; the same one each time. Skips the test where the backend finds no hardware."""
    if name not in _MADE:
        made = _MADE[name] = _MAKERS[name]()
        if not made.name:
            made.name = name
    return _MADE[name]


@contextmanager
def combined(names: str) -> Iterator[list[ow.Device]]:
    """The devices of one of `COMBINATIONS`. ``remote`` is a device ``cpu`` with memory of its own, on a server in this
    process."""
    from opweave_cpu.device import IsolatedCpuDevice
    from tests.support.remote import beside

    with ExitStack() as stack:
        devices: list[ow.Device] = []
        for name in names.split(" + "):
            if name == "remote":
                served = IsolatedCpuDevice(7)
                served.name = "cpu:7"
                _, connection = stack.enter_context(beside([served]))
                devices.append(connection.devices[0])
            else:
                devices.append(make(name))
        yield devices


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
