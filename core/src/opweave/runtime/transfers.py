"""`copy_bytes`: bytes from any buffer to any other one: by the device, or by way of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from opweave.contract.transfers import BOUNCE_BYTES
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.runtime.buffer import Buffer

__all__ = ["copy_bytes", "mapped"]


def copy_bytes(dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> None:
    """Copy ``size`` bytes between any two buffers.

    Within one buffer type the device copies. If the host can address one side (host memory or mapped), the bytes are
    copied once. Otherwise they go through a host array in chunks of `BOUNCE_BYTES`. Ranges of one buffer may overlap.
    In memory that stores whole tensors (repacked, split), a range must lie within one prepared tensor.

    Raises:
        BoundsError, LifetimeError: a range is outside of its buffer, or a buffer was freed.
        HazardError: the target is read-only.
        LayoutError: a range is not within one prepared tensor.
    """
    dst.check(dst_offset, size, write=True)
    src.check(src_offset, size)
    if not size:
        return
    start = perf_counter_ns() if TRACE.listening else 0
    if dst.type is src.type and dst.type.is_raw:
        dst.type._copy(dst.handle, dst_offset, src.handle, src_offset, size)
    elif src.is_host:
        dst.upload(dst_offset, src.host_bytes(src_offset, size))
    elif dst.is_host:
        src.download(src_offset, dst.host_bytes(dst_offset, size))
    elif dst.type.can_map:
        with mapped(dst, dst_offset, size, write=True) as view:
            src.download(src_offset, view)
    elif src.type.can_map:
        with mapped(src, src_offset, size) as view:
            dst.upload(dst_offset, view)
    else:
        step = min(size, BOUNCE_BYTES) if dst.type.is_raw and src.type.is_raw else size
        chunk = np.empty(step, np.uint8)
        for at in range(0, size, step):
            part = chunk[: size - at]
            src.download(src_offset + at, part)
            dst.upload(dst_offset + at, part)
    if TRACE.listening:
        TRACE.emit("copy", f"{src.name} -> {dst.name}", start, perf_counter_ns(), bytes=size)


@contextmanager
def mapped(buffer: Buffer, offset: int, size: int, *, write: bool = False) -> Iterator[memoryview]:
    """Bytes ``offset .. offset + size`` as host memory within a ``with`` block.

    Maps the memory if the device can do that. Otherwise the block sees a copy, which is written back at the end if
    ``write`` is set and the block did not raise. Without ``write`` the bytes must not be changed.

    Raises:
        LifetimeError, BoundsError, HazardError: see `Buffer.check`.
    """
    buffer.check(offset, size, write=write)
    kind = buffer.type
    if kind.can_map and size:
        view = kind._map(buffer.handle, offset, size)
        try:
            yield view
        finally:
            kind._unmap(buffer.handle, view)
        return
    scratch = np.empty(size, np.uint8)
    buffer.download(offset, scratch)
    yield scratch.data
    if write:
        buffer.upload(offset, scratch)
