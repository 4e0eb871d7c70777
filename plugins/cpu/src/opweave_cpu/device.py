"""`CpuDevice`: the processor and the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opweave.contract import Device, Kind, MemorySpace, Stream
from opweave.host.memory import HostMemory
from opweave_cpu.hardware import blas_features, cpu_name, instruction_sets
from opweave_cpu.kernels import KERNELS
from opweave_cpu.stream import CpuStream
from opweave_cpu.threads import check_threads

__all__ = ["CpuDevice", "IsolatedCpuDevice"]


class CpuDevice(HostMemory):
    """The CPU, computing in host memory. ``device.open(threads=2)`` limits the threads of a stream."""

    kind = Kind.CPU
    kernels = KERNELS

    def __init__(self) -> None:
        self.description = cpu_name()

    def features(self) -> Mapping[str, Any]:
        return {**blas_features(), "instructions": instruction_sets()}

    def _open(self, *, threads: int | str | None = None, **params: Any) -> Stream:
        if params:
            return super()._open(**params)  # which refuses what nobody knows
        return CpuStream(self, None if threads is None else check_threads(threads))


class IsolatedCpuDevice(CpuDevice):
    """A CPU device that plays a card: its memory is a space of its own, which neither the host nor another device
    reaches. For testing code for several devices on any machine.

    Args:
        number: the part of its name after the colon.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.id = str(number)
        self.space = MemorySpace(f"cpu:{number}")

    # What is not overridden is no capability: host memory neither goes in nor comes out without a copy.
    _import_host = Device._import_host
    _map = Device._map
    _unmap = Device._unmap
