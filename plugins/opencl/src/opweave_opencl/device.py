"""`OpenCLDevice`: memory, properties and built programs of one OpenCL device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from opweave.contract import Device, Kind, Stream, Usage
from opweave_opencl.discovery import describe, hardware_id, kind_of
from opweave_opencl.errors import translated
from opweave_opencl.kernels import KERNELS
from opweave_opencl.program import Programs
from opweave_opencl.stream import OpenCLStream
from opweave_opencl.tuning import Tuning

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["OpenCLDevice"]


class OpenCLDevice(Device):
    """One OpenCL device. Its memory is always a space of its own, also where the hardware shares it with the host.

    Args:
        number: its number among all devices of all platforms, the part of the name after the colon.
        device: pyopencl's.
    """

    kernels = KERNELS
    stream_class = OpenCLStream

    def __init__(self, number: int, device: cl.Device) -> None:
        self.cl_device = device
        self.id = str(number)
        self.description = describe(device)
        self.kind: Kind = kind_of(device)
        self.hardware_id = hardware_id(device)
        self.alignment = max(device.mem_base_addr_align // 8, 1)
        self.max_buffer_size = device.max_mem_alloc_size
        self.tuning = Tuning.of(device)
        self.allocated = 0
        self._sizes: dict[int, int] = {}  # id of a handle -> its bytes
        self._lock = Lock()

    # --- made on first use ------------------------------------------------------------------------------------------

    @cached_property
    def context(self) -> cl.Context:
        """The device's context."""
        import pyopencl as cl

        with self.errors("opening the device"):
            return cl.Context([self.cl_device])

    @cached_property
    def queue(self) -> cl.CommandQueue:
        """The queue of blocking transfers; streams have queues of their own."""
        import pyopencl as cl

        with self.errors("opening the device"):
            return cl.CommandQueue(self.context)

    @cached_property
    def programs(self) -> Programs:
        """Programs built for this device."""
        return Programs(self.name, self.context)

    def errors(self, doing: str, *, allocating: bool = False) -> AbstractContextManager[None]:
        """A ``with`` block in which driver errors become typed ones."""
        return translated(self.name, doing, allocating=allocating)

    # --- properties -------------------------------------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """Bytes left by this process's own account (OpenCL tells no more), and in all."""
        total = int(self.cl_device.global_mem_size)
        return max(total - self.allocated, 0), total

    def features(self) -> Mapping[str, Any]:
        """Versions, limits and number formats of the device."""
        d = self.cl_device
        extensions = d.extensions.split()
        return {
            "platform": d.platform.version.strip(),
            "opencl": d.version.strip(),
            "opencl_c": d.opencl_c_version.strip(),
            "driver": d.driver_version.strip(),
            "fp16": "cl_khr_fp16" in extensions,
            "fp64": "cl_khr_fp64" in extensions,
            "compute_units": d.max_compute_units,
            "local_memory": d.local_mem_size,
            "max_work_group": d.max_work_group_size,
            "unified_memory": bool(d.host_unified_memory),
        }

    # --- memory -----------------------------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> cl.Buffer:
        import pyopencl as cl

        free, total = self.mem_info()
        if size > free:
            # Drivers that hand out the host's memory promise more than there is, and the process dies at first use.
            raise MemoryError(f"{self.allocated:,} of {total:,} bytes are taken")
        with self.errors(f"allocating {size:,} bytes", allocating=True):
            mem = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size)
            # Drivers put off the allocation to the first use; moving the buffer to the device is one.
            cl.enqueue_migrate_mem_objects(self.queue, [mem], flags=cl.mem_migration_flags.CONTENT_UNDEFINED)
            self.queue.finish()
        with self._lock:
            self._sizes[mem.int_ptr] = size
            self.allocated += size
        return mem

    def _free(self, mem: cl.Buffer) -> None:
        # Not released by force: drivers crash on kernels whose arguments are gone, and a call that is bound to this
        # memory may be left. The last reference releases it.
        with self._lock:
            self.allocated -= self._sizes.pop(mem.int_ptr, 0)

    def _upload(self, mem: cl.Buffer, offset: int, data: memoryview) -> None:
        import pyopencl as cl

        with self.errors(f"uploading {len(data):,} bytes"):
            cl.enqueue_copy(self.queue, mem, data, dst_offset=offset)

    def _download(self, mem: cl.Buffer, offset: int, out: memoryview) -> None:
        import pyopencl as cl

        with self.errors(f"downloading {len(out):,} bytes"):
            cl.enqueue_copy(self.queue, out, mem, src_offset=offset)

    def _fill(self, mem: cl.Buffer, offset: int, size: int, value: int) -> None:
        import pyopencl as cl

        # The wider the pattern, the faster; it must divide place and size.
        width = next(w for w in (16, 4, 1) if offset % w == 0 and size % w == 0)
        with self.errors(f"filling {size:,} bytes"):
            cl.enqueue_fill_buffer(self.queue, mem, np.full(width, value, np.uint8), offset, size)
            self.queue.finish()

    def _copy(self, dst: cl.Buffer, dst_offset: int, src: cl.Buffer, src_offset: int, size: int) -> None:
        import pyopencl as cl

        if dst is src and abs(dst_offset - src_offset) < size:
            super()._copy(dst, dst_offset, src, src_offset, size)  # the driver refuses ranges that overlap
            return
        with self.errors(f"copying {size:,} bytes"):
            cl.enqueue_copy(self.queue, dst, src, src_offset=src_offset, dst_offset=dst_offset, byte_count=size)
            self.queue.finish()

    # --- work -------------------------------------------------------------------------------------------------------

    def _open(self, **params: Any) -> Stream:
        if params:
            raise TypeError(f"unknown parameters {sorted(params)}")
        return OpenCLStream(self)
