"""Memory of this process: its size, and `NumPyMemory` and `HostMemory`, devices whose buffers are NumPy arrays."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import numpy as np

from opweave.contract.memory import HOST_SPACE, MemorySpace, Usage
from opweave.runtime.device import Device
from opweave.runtime.host.cgroups import memory_bounds
from opweave.runtime.host.reservations import RESERVATIONS

if TYPE_CHECKING:
    from opweave.contract.step import Call

__all__ = ["HostMemory", "NumPyMemory", "host_memory_info"]

CHECKED_BYTES: Final = 1 << 20
"""Allocations of at least this many bytes are counted (`Reservations`) and refused if the machine lacks memory."""


def host_memory_info() -> tuple[int, int]:
    """Free and total memory in bytes: the machine's, or what the control group of a container allows; ``(0, 0)`` if the
    system does not tell.

    Memory that was allocated for buffers and not written to yet does not count as free.
    """
    try:
        page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        free = os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0, 0
    available, bounds = RESERVATIONS.available(), memory_bounds()
    total_bytes = page * total if bounds is None else min(page * total, bounds[1])
    return page * free if available is None else available, total_bytes


PAGE: Final = 4096
"""Alignment of large allocations in bytes. Large NumPy arrays begin 16 bytes behind a page boundary. A result that
begins slightly later in its page than a source would be written to addresses whose low 12 bits equal those of the next
reads; processors then delay these reads (4 KiB aliasing), which costs 2 to 4 % of large elementwise kernels."""

LARGE: Final = 1 << 16
"""Allocations of at least this many bytes are aligned to `PAGE`; for smaller ones that wastes too much memory."""

FEW_BYTES: Final = 1 << 14
"""Up to this many bytes memoryviews copy, in a quarter of the time that NumPy's call takes; NumPy releases the GIL."""


class NumPyMemory(Device):
    """A device whose buffers are NumPy arrays, in a memory space of its own: bytes get in and out by copies only.

    Base of `HostMemory`, and of devices that stand for separate hardware in tests.
    """

    survives_fork = True

    def mem_info(self) -> tuple[int, int]:
        return host_memory_info()

    def _alloc(self, size: int, usage: Usage) -> np.ndarray[Any, Any]:
        # np.empty guarantees 16 bytes of alignment only; allocate more and skip to the next aligned address.
        alignment = PAGE if size >= LARGE else self.alignment
        if size >= CHECKED_BYTES:
            RESERVATIONS.reserve(size)
        try:
            raw = np.empty(size + alignment, np.uint8)
        except (ValueError, MemoryError) as error:
            if size >= CHECKED_BYTES:
                RESERVATIONS.release(size)
            raise MemoryError(str(error)) from None  # ValueError: larger than the address space
        if size >= CHECKED_BYTES:
            finalize(raw, RESERVATIONS.release, size).atexit = False  # views keep `raw` alive
        skip = -raw.__array_interface__["data"][0] % alignment
        return raw[skip : skip + size]

    def _upload(self, mem: np.ndarray[Any, Any], offset: int, data: memoryview) -> None:
        mem[offset : offset + len(data)] = data

    def _download(self, mem: np.ndarray[Any, Any], offset: int, out: memoryview) -> None:
        out[:] = mem.data[offset : offset + len(out)]

    # The next two are shortcuts for this class; a subclass that overrides `_upload` or `_download` gets the defaults.

    def _bind_upload(self, mem: np.ndarray[Any, Any], offset: int, data: memoryview) -> Call:
        if type(self)._upload is not NumPyMemory._upload:
            return super()._bind_upload(mem, offset, data)
        if len(data) <= FEW_BYTES and data.format == "B":
            return partial(mem.data[offset : offset + len(data)].__setitem__, slice(None), data)
        return partial(np.copyto, mem[offset : offset + len(data)], np.frombuffer(data, np.uint8))

    def _bind_download(self, mem: np.ndarray[Any, Any], offset: int, out: memoryview) -> Call:
        if type(self)._download is not NumPyMemory._download:
            return super()._bind_download(mem, offset, out)
        if len(out) <= FEW_BYTES and out.format == "B":
            return partial(out.__setitem__, slice(None), mem.data[offset : offset + len(out)])
        return partial(np.copyto, np.frombuffer(out, np.uint8), mem[offset : offset + len(out)])

    def _fill(self, mem: np.ndarray[Any, Any], offset: int, size: int, value: int) -> None:
        mem[offset : offset + size] = value

    def _copy(
        self, dst: np.ndarray[Any, Any], dst_offset: int, src: np.ndarray[Any, Any], src_offset: int, size: int
    ) -> None:
        dst[dst_offset : dst_offset + size] = src[src_offset : src_offset + size]


class HostMemory(NumPyMemory):
    """A device that computes in host memory, the space `HOST_SPACE`, which it shares with all devices that do so.

    Arrays are imported and buffers are mapped without a copy. Base of ``host`` and of backends for CPUs.
    """

    space: MemorySpace = HOST_SPACE

    def _import_host(self, data: memoryview) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, np.uint8)

    def _map(self, mem: np.ndarray[Any, Any], offset: int, size: int) -> memoryview:
        return mem.data[offset : offset + size]

    def _unmap(self, mem: np.ndarray[Any, Any], view: memoryview) -> None:
        view.release()
