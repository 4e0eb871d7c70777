"""Memory of this process: how much there is, and `NumPyMemory` and `HostMemory`, devices whose buffers are arrays."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import numpy as np

from opweave.contract.device import Device
from opweave.contract.space import HOST_SPACE, MemorySpace, Usage
from opweave.host.cgroups import memory_bounds
from opweave.host.promises import PROMISES

if TYPE_CHECKING:
    from opweave.contract.step import Call

__all__ = ["HostMemory", "NumPyMemory", "host_memory_info"]

CHECKED_BYTES: Final = 1 << 20
"""From this size on an allocation counts, and is held against the memory that is left."""


def host_memory_info() -> tuple[int, int]:
    """Bytes of memory that are left, without what buffers were promised, and in all: the machine's, or what the control
    group of a container allows. ``(0, 0)`` where the system does not tell."""
    try:
        page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        free = os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0, 0
    left, bounds = PROMISES.left(), memory_bounds()
    in_all = page * total if bounds is None else min(page * total, bounds[1])
    return page * free if left is None else left, in_all


PAGE: Final = 4096
"""Where large allocations begin. NumPy's large arrays begin 16 bytes behind a page: a result that began a little later
in its page would be written where, by the low 12 bits of the address, its sources are about to be read, for which
processors wait. It costs large passes 2 to 4 %."""

LARGE: Final = 1 << 16
"""Bytes of an allocation that can spare a page."""


class NumPyMemory(Device):
    """A device whose buffers are NumPy arrays of this process, in a memory space of its own: nothing goes in or comes
    out without a copy. Base of devices that stand for cards in tests, and of `HostMemory`."""

    survives_fork = True

    def mem_info(self) -> tuple[int, int]:
        return host_memory_info()

    def _alloc(self, size: int, usage: Usage) -> np.ndarray[Any, Any]:
        # np.empty promises 16 bytes; over-allocate and step forward to the alignment.
        alignment = PAGE if size >= LARGE else self.alignment
        if size >= CHECKED_BYTES:
            PROMISES.take(size)
        try:
            raw = np.empty(size + alignment, np.uint8)
        except (ValueError, MemoryError) as error:
            if size >= CHECKED_BYTES:
                PROMISES.give(size)
            raise MemoryError(str(error)) from None  # ValueError: more than there are addresses
        if size >= CHECKED_BYTES:
            finalize(raw, PROMISES.give, size).atexit = False  # views keep it as long as they live
        skip = -raw.__array_interface__["data"][0] % alignment
        return raw[skip : skip + size]

    def _upload(self, mem: np.ndarray[Any, Any], offset: int, data: memoryview) -> None:
        mem[offset : offset + len(data)] = data

    def _download(self, mem: np.ndarray[Any, Any], offset: int, out: memoryview) -> None:
        out[:] = mem.data[offset : offset + len(out)]

    # A subclass that moves bytes differently need not know of these two.

    def _bind_upload(self, mem: np.ndarray[Any, Any], offset: int, data: memoryview) -> Call:
        if type(self)._upload is not NumPyMemory._upload:
            return super()._bind_upload(mem, offset, data)
        return _bind_bytes(mem[offset : offset + len(data)], np.frombuffer(data, np.uint8))

    def _bind_download(self, mem: np.ndarray[Any, Any], offset: int, out: memoryview) -> Call:
        if type(self)._download is not NumPyMemory._download:
            return super()._bind_download(mem, offset, out)
        return _bind_bytes(np.frombuffer(out, np.uint8), mem[offset : offset + len(out)])

    def _fill(self, mem: np.ndarray[Any, Any], offset: int, size: int, value: int) -> None:
        mem[offset : offset + size] = value

    def _copy(
        self, dst: np.ndarray[Any, Any], dst_offset: int, src: np.ndarray[Any, Any], src_offset: int, size: int
    ) -> None:
        dst[dst_offset : dst_offset + size] = src[src_offset : src_offset + size]


class HostMemory(NumPyMemory):
    """A device that computes in host memory, which it shares with all others that do: arrays are imported and buffers
    are mapped without a copy. Base of ``host`` and of backends that compute there."""

    space: MemorySpace = HOST_SPACE

    def _import_host(self, data: memoryview) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, np.uint8)

    def _map(self, mem: np.ndarray[Any, Any], offset: int, size: int) -> memoryview:
        return mem.data[offset : offset + size]

    def _unmap(self, mem: np.ndarray[Any, Any], view: memoryview) -> None:
        view.release()


FEW_BYTES: Final = 1 << 14
"""Bytes up to which memoryviews copy: they take a quarter of the time of NumPy's call, which lets other threads run."""


def _bind_bytes(dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any]) -> Call:
    if dst.size > FEW_BYTES:
        return partial(np.copyto, dst, src)
    return partial(dst.data.__setitem__, slice(None), src.data)
