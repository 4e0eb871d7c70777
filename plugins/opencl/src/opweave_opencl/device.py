"""`OpenCLDevice`: memory, properties and built programs of one OpenCL device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from opweave.contract import BufferType, Device, Kind, Limit, Offloading, Rows, Step, Tunable, Usage, flat_rows
from opweave.contract.kernels import KernelTable
from opweave.errors import Unavailable
from opweave.runtime.host.memory import host_memory_info
from opweave_opencl.budget import MemoryBudget
from opweave_opencl.errors import translated
from opweave_opencl.health import why_unusable
from opweave_opencl.integer_rates import IntegerRates
from opweave_opencl.kernels import KERNELS
from opweave_opencl.kernels.convolution import add_folds
from opweave_opencl.kernels.integer_products import add_integer_products
from opweave_opencl.kernels.lane_products import add_lane_products
from opweave_opencl.mapping import rectangle
from opweave_opencl.pinned import OpenCLPinnedMemory
from opweave_opencl.program import Programs
from opweave_opencl.properties import describe, hardware_id, kind_of, remedy_for
from opweave_opencl.sharing import SharedContext
from opweave_opencl.stream import OpenCLStream
from opweave_opencl.subgroups import Subgroups
from opweave_opencl.tuning import Tuning, card_limit, limit, processor_limit

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["OpenCLDevice"]


class OpenCLDevice(Device):
    """One OpenCL device. Its memory is always a space of its own, also where the hardware shares it with the host.

    Args:
        id: the part of the name after the colon.
        device: pyopencl's.
        contexts: the context of its platform; ``None``: the device gets one of its own.
        budget: of the hardware's memory, shared by sub-devices of one device; ``None``: the device gets its own.
    """

    kernels: KernelTable = KERNELS
    stream_class = OpenCLStream

    def __init__(
        self, id: str, device: cl.Device, contexts: SharedContext | None = None, budget: MemoryBudget | None = None
    ) -> None:
        self.cl_device = device
        self.id = id
        self.description = f"{describe(device)}, {_size(device)}"
        self.kind: Kind = kind_of(device)
        # The scheduler takes devices with one hardware id for the same device; sub-devices are different ones.
        self.hardware_id = hardware_id(device) if "." not in id else None
        self.alignment = max(device.mem_base_addr_align // 8, 1)
        self.max_buffer_size = int(device.max_mem_alloc_size)
        self.tuning = Tuning.of(device)
        self.subgroups = Subgroups(device)
        self.has_f64 = "cl_khr_fp64" in device.extensions.split()
        self.kernels = KERNELS if self.has_f64 else KERNELS.without_f64
        if not self.tuning.tiled:
            self.integers = IntegerRates(self)
            self.kernels = KernelTable("f32", "strided", index="i32 i64", parent=self.kernels)
            add_integer_products(self.kernels, self.integers.why_not)
            add_lane_products(self.kernels)
            add_folds(self.kernels)
        self.budget = budget or MemoryBudget.of(device)
        self._contexts = contexts or SharedContext([device])
        self._unified = bool(device.host_unified_memory)
        self._offloading = Offloading(self)
        self._sizes: dict[int, int] = {}  # of a handle -> its bytes

    # --- created on first use ---------------------------------------------------------------------------------------

    @cached_property
    def context(self) -> cl.Context:
        """The context that it shares with the other devices of its platform."""
        with self.errors("opening the device"):
            return self._contexts.of(self.cl_device)

    @cached_property
    def queue(self) -> cl.CommandQueue:
        """The queue of blocking transfers; streams have queues of their own."""
        import pyopencl as cl

        with self.errors("opening the device"):
            return cl.CommandQueue(self.context, self.cl_device)

    @cached_property
    def programs(self) -> Programs:
        """Programs built for this device."""
        return Programs(self.name, self.context, self.cl_device)

    def errors(self, doing: str, *, allocating: bool = False) -> AbstractContextManager[None]:
        """A ``with`` block in which driver errors become typed ones."""
        return translated(self.name, doing, allocating=allocating)

    def _probe(self) -> None:
        why = why_unusable(self.cl_device)
        if why is not None:
            self._contexts.exclude(self.cl_device)
            raise Unavailable(why, remedy=remedy_for(self.cl_device))

    # --- properties -------------------------------------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """Free and total bytes.

        Free is what this process has not allocated; at most what AMD's driver says, and on devices that share the
        machine's memory at most what is free there, less what is reserved for buffers of all devices and not used yet.
        """
        free = self.budget.free
        if self._unified:
            free = min(free, host_memory_info()[0] or free)
        elif "cl_amd_device_attribute_query" in self.cl_device.extensions.split():
            with self.errors("asking for its free memory"):
                free = min(free, _first(self.cl_device.global_free_memory_amd) << 10)
        return free, self.budget.total

    def features(self) -> Mapping[str, Any]:
        """Versions, limits and number formats of the device."""
        d = self.cl_device
        extensions = d.extensions.split()
        return {
            "platform": d.platform.version.strip(),
            "opencl": d.version.strip(),
            "opencl_c": d.opencl_c_version.strip(),
            "driver": d.driver_version.strip(),
            "vendor": d.vendor.strip(),
            "fp16": "cl_khr_fp16" in extensions,
            "fp64": "cl_khr_fp64" in extensions,
            "compute_units": d.max_compute_units,
            "clock_mhz": d.max_clock_frequency,
            "local_memory": d.local_mem_size,
            "max_work_group": d.max_work_group_size,
            "max_buffer": d.max_mem_alloc_size,
            "unified_memory": self._unified,
            "partitions": d.partition_max_sub_devices,
            "subgroups": self.subgroups.listed or False,
        }

    @property
    def tunables(self) -> Sequence[Tunable]:
        """How results of work-items are combined, where work-items share a row and the device lists sub-groups."""
        return (self.subgroups.tunable,) if self.tuning.row_group > 1 and self.subgroups.listed else ()

    @property
    def limits(self) -> Sequence[Limit]:
        """The limits of all kernels in their form for this device, and the tunables."""
        return (*self.tunables, *limit, *(processor_limit if self.tuning.row_group == 1 else card_limit))

    @cached_property
    def host_buffer_type(self) -> BufferType:
        """Pinned host memory."""
        return OpenCLPinnedMemory(self)

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        """Its own memory and pinned host memory."""
        return (self.default_buffer_type, self.host_buffer_type)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> cl.Buffer:
        import pyopencl as cl

        # Drivers accept more than there is, and the process dies when the memory is first used.
        self.budget.reserve(size, self.mem_info()[0])
        try:
            with self.errors(f"allocating {size:,} bytes", allocating=True):
                mem = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size)
                # Drivers put off the allocation to the first use; moving the buffer to the device is one.
                cl.enqueue_migrate_mem_objects(self.queue, [mem], flags=cl.mem_migration_flags.CONTENT_UNDEFINED)
                self.queue.finish()
        except BaseException:
            self.budget.release(size)
            raise
        self._sizes[mem.int_ptr] = size
        return mem

    def _free(self, mem: cl.Buffer) -> None:
        # Dropped, not released: drivers crash on kernels whose arguments were released, and calls that are bound to
        # this memory may remain. The last reference to it releases it.
        self.budget.release(self._sizes.pop(mem.int_ptr, 0))

    def _upload(self, mem: cl.Buffer, offset: int, data: memoryview) -> None:
        import pyopencl as cl

        with self.errors(f"uploading {len(data):,} bytes"):
            cl.enqueue_copy(self.queue, mem, data, dst_offset=offset)

    def _download(self, mem: cl.Buffer, offset: int, out: memoryview) -> None:
        import pyopencl as cl

        with self.errors(f"downloading {len(out):,} bytes"):
            cl.enqueue_copy(self.queue, out, mem, src_offset=offset)

    def _upload_2d(self, mem: cl.Buffer, offset: int, pitch: int, rows: Rows) -> None:
        import pyopencl as cl

        with self.errors(f"uploading {rows.size:,} bytes"):
            cl.enqueue_copy(self.queue, mem, flat_rows(rows), **rectangle(offset, pitch, rows))

    def _download_2d(self, mem: cl.Buffer, offset: int, pitch: int, out: Rows) -> None:
        import pyopencl as cl

        with self.errors(f"downloading {out.size:,} bytes"):
            cl.enqueue_copy(self.queue, flat_rows(out), mem, **rectangle(offset, pitch, out))

    def _fill(self, mem: cl.Buffer, offset: int, size: int, value: int) -> None:
        import pyopencl as cl

        # The wider the pattern, the faster; offset and size must be multiples of it.
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

    def why_exact(self, step: Step) -> str:
        """Why a product that may be computed in int8 is computed exactly; ``""`` for all else."""
        if step.op != "linear" or step.precision != "int8" or not step.srcs[1].dtype.is_quantized:
            return ""
        whys = [k.why_not(step) for k in self.kernels.candidates("linear") if k.precision == "int8"]
        return f"exact: {whys[0]}" if whys and whys[0] else ""

    # --- work -------------------------------------------------------------------------------------------------------

    def sharing(self) -> dict[str, str]:
        """The macros of ``combining.cl``: how many work-items share a row, and how they combine their results."""
        group = self.tuning.row_group
        return {"GROUP": str(group), **(self.subgroups.macros() if group > 1 else {})}

    def _offload(self, step: Step) -> bool:
        return self._offloading.pays(step)


def _first(values: Any) -> int:
    """Drivers give one number or several."""
    return int(values[0] if isinstance(values, (list, tuple)) else values)


def _size(device: cl.Device) -> str:
    """Size, speed, version and driver of a device, for people who choose between devices."""
    units, clock = device.max_compute_units, device.max_clock_frequency
    many = f"{units} compute unit{'s' if units > 1 else ''}" + (f" at {clock} MHz" if clock else "")
    return f"{many}, {' '.join(device.version.split()[:2])}, driver {device.driver_version.strip()}"
