"""`UnifiedDevice`: a device that works in the host's memory. Host arrays are used in place, its buffers are mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opweave.contract import Kind, Rows
from opweave.errors import UnsupportedOpError
from opweave_opencl.device import OpenCLDevice
from opweave_opencl.mapping import map_bytes, unmap_bytes

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["UnifiedDevice"]

PAGE = 4096


class UnifiedDevice(OpenCLDevice):
    """A device whose memory is the host's: a CPU, or a graphics processor beside it.

    OpenCL guarantees that host and device see the same bytes only where the host maps them. So the host accesses
    buffers only while they are mapped, and the memory remains a memory space of its own.
    """

    def _import_host(self, data: memoryview) -> cl.Buffer:
        import pyopencl as cl

        array = np.frombuffer(data, np.uint8)
        address = array.__array_interface__["data"][0]
        # Kernels rely on the alignment. Drivers of graphics processors use only whole cache lines of whole pages in
        # place. Of other bytes they make a copy, silently, and later changes would not be seen on the other side.
        aligned = max(self.alignment, PAGE) if self.kind is not Kind.CPU else self.alignment
        if address % aligned or (self.kind is not Kind.CPU and len(data) % 64):
            raise UnsupportedOpError(
                f"{self.name} uses host memory in place that begins at a multiple of {aligned} bytes"
                + (" and ends at one of 64" if self.kind is not Kind.CPU else "")
            )
        access = cl.mem_flags.READ_ONLY if data.readonly else cl.mem_flags.READ_WRITE
        with self.errors(f"importing {len(data):,} bytes", allocating=True):
            return cl.Buffer(self.context, access | cl.mem_flags.USE_HOST_PTR, hostbuf=array)

    # What the device writes to the buffer of an imported array is in the array only after the buffer was mapped.

    def _upload(self, mem: cl.Buffer, offset: int, data: memoryview) -> None:
        super()._upload(mem, offset, data)
        self._write_through(mem, offset, len(data))

    def _upload_2d(self, mem: cl.Buffer, offset: int, pitch: int, rows: Rows) -> None:
        super()._upload_2d(mem, offset, pitch, rows)
        self._write_through(mem, offset, (len(rows) - 1) * pitch + rows.shape[1])

    def _fill(self, mem: cl.Buffer, offset: int, size: int, value: int) -> None:
        super()._fill(mem, offset, size, value)
        self._write_through(mem, offset, size)

    def _copy(self, dst: cl.Buffer, dst_offset: int, src: cl.Buffer, src_offset: int, size: int) -> None:
        super()._copy(dst, dst_offset, src, src_offset, size)
        self._write_through(dst, dst_offset, size)

    def _write_through(self, mem: cl.Buffer, offset: int, size: int) -> None:
        """Map what was written to the buffer of an imported array, so that it is in the array."""
        if mem.int_ptr not in self._sizes:
            with self.errors(f"mapping {size:,} bytes"):
                unmap_bytes(self.queue, map_bytes(self.queue, mem, offset, size, write=False))

    def _map(self, mem: cl.Buffer, offset: int, size: int) -> memoryview:
        import pyopencl as cl

        write = not mem.flags & cl.mem_flags.READ_ONLY
        with self.errors(f"mapping {size:,} bytes"):
            return map_bytes(self.queue, mem, offset, size, write=write).data

    def _unmap(self, mem: cl.Buffer, view: memoryview) -> None:
        array: Any = view.obj
        view.release()
        with self.errors("unmapping memory"):
            unmap_bytes(self.queue, array)
