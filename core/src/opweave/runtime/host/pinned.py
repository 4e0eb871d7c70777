"""`PinnedMemory`: host memory that a driver allocates for fast transfers."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.contract.memory import HOST_SPACE
from opweave.runtime.device import Device
from opweave.runtime.memory import BufferType

__all__ = ["PinnedMemory"]


class PinnedMemory(BufferType):
    """Host memory of a device's driver or library, named ``<device>.pinned``; handles are NumPy arrays of its bytes.

    Subclass it and override ``_alloc`` and ``_free``.

    Args:
        alignment: of its addresses, in bytes; ``None``: that of the device.
    """

    def __init__(self, device: Device, alignment: int | None = None) -> None:
        super().__init__(device, f"{device.name}.pinned", space=HOST_SPACE, alignment=alignment)

    def _upload(self, mem: np.ndarray[Any, Any], offset: int, data: memoryview) -> None:
        mem[offset : offset + len(data)] = data

    def _download(self, mem: np.ndarray[Any, Any], offset: int, out: memoryview) -> None:
        out[:] = mem.data[offset : offset + len(out)]

    def _map(self, mem: np.ndarray[Any, Any], offset: int, size: int) -> memoryview:
        return mem.data[offset : offset + size]

    def _unmap(self, mem: np.ndarray[Any, Any], view: memoryview) -> None:
        view.release()

    def _address(self, mem: np.ndarray[Any, Any]) -> int:
        return int(mem.__array_interface__["data"][0])
