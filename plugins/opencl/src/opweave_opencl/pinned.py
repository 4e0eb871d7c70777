"""`OpenCLPinnedMemory`: host memory allocated by the driver, from and to which transfers are fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opweave.contract import Usage
from opweave.runtime.host.pinned import PinnedMemory
from opweave_opencl.mapping import map_bytes

if TYPE_CHECKING:
    from opweave_opencl.device import OpenCLDevice

__all__ = ["OpenCLPinnedMemory"]


class OpenCLPinnedMemory(PinnedMemory):
    """Host memory of a driver, which stays mapped: drivers transfer from and to it without a copy in between.

    Handles show the mapping. Kernels never use it, so host and device need no order between them.
    """

    def __init__(self, device: OpenCLDevice) -> None:
        super().__init__(device, alignment=64)
        self._target = device

    def _alloc(self, size: int, usage: Usage) -> np.ndarray[Any, Any]:
        import pyopencl as cl

        target = self._target
        with target.errors(f"allocating {size:,} bytes of host memory", allocating=True):
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
            mem = cl.Buffer(target.context, flags, size)
            return map_bytes(target.queue, mem, 0, size, write=True)

    def _free(self, mem: np.ndarray[Any, Any]) -> None:
        with self._target.errors("freeing host memory"):
            mapping: Any = mem.base
            mapping.release(self._target.queue)  # queued; the driver frees the memory once it is unmapped
            self._target.queue.flush()
