"""`BufferType`: a kind of memory of a device; and the bytes of any buffer as host memory (`mapped`).

An author implements ordinary memory with four methods of `Device` (``_alloc _free _upload _download``) and subclasses
`BufferType` only for special memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract.buffer import Buffer
from opweave.contract.discarding import reclaim, reclaim_all
from opweave.contract.multibuffer import MultiBuffer
from opweave.contract.rows import Rows, download_rows, upload_rows
from opweave.contract.space import Handle, MemorySpace, Usage, round_up
from opweave.errors import AllocationError, BoundsError, Broken, UnknownNameError, UnsupportedOpError
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.contract.step import Call, Step
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.tensor import Tensor

__all__ = ["BOUNCE_BYTES", "BufferType", "check_sizes", "copy_by_host", "fill_by_upload", "mapped"]


class BufferType:
    """A kind of memory of a device. The base class is the device's ordinary memory.

    Subclass it for special memory (pinned, split over devices, repacked weights) and override the underscored methods
    that differ; the others call the methods of the device.

    - Pinned host memory: pass ``space=HOST_SPACE``, override ``_alloc`` and ``_free``; handles are arrays,
      buffer-protocol objects or addresses.
    - Repacked or split memory: override ``_init``, ``_upload`` and ``_download`` for whole tensors, and ``alloc_size``;
      or subclass `opweave.host.repacked.RepackedType`, which asks for less.
      Overriding ``_init`` declares that the memory stores tensors in its own format: they are then read and written
      by ``_upload`` and ``_download`` only, and by kernels that accept the type (``kernels("linear", accepts=...)``).
      All other kernels read a copy.

    Attributes:
        device: the device whose memory it is.
        name: e.g. ``"cpu"`` or ``"cpu.repacked"``.
        space: the memory space in which its addresses are valid.
        alignment: bytes, a power of two; every tensor begins at a multiple of it.
        max_size: the largest single buffer in bytes, or ``None`` for no limit.
        usages: the usages it is for; anything else is neither allocated nor placed there. `Usage.ANY` includes all.

    Raises:
        Broken: ``alignment`` is not a power of two, or ``max_size`` is not positive.
    """

    usages: frozenset[Usage] = frozenset(Usage)

    def __init__(
        self,
        device: Device,
        name: str = "",
        *,
        space: MemorySpace | None = None,
        alignment: int | None = None,
        max_size: int | None = None,
    ) -> None:
        self.device: Final = device
        self._name: Final = name
        self.space: Final = space or device.space
        self.alignment: Final = alignment if alignment is not None else device.alignment
        self.max_size: Final = max_size if max_size is not None else device.max_buffer_size
        check_sizes(name or type(device).__name__, self.alignment, self.max_size)

    def __repr__(self) -> str:
        return f"<BufferType {self.name}>"

    @property
    def name(self) -> str:
        """The given name, else that of the device."""
        return self._name or self.device.name

    @cached_property
    def is_raw(self) -> bool:
        """Whether tensors are stored as they were uploaded. ``False`` for types that override ``_init``."""
        return type(self)._init is BufferType._init

    @cached_property
    def is_host(self) -> bool:
        """Whether the process can read and write tensors there directly."""
        return self.space.host and self.is_raw

    @cached_property
    def is_typed(self) -> bool:
        """Whether whole arrays are written and read by the device's ``_put`` and ``_get``."""
        own = type(self)
        plain = own._upload is BufferType._upload and own._download is BufferType._download and self.is_raw
        return plain and self.device.caps.typed

    @cached_property
    def can_map(self) -> bool:
        """Whether parts of its buffers can be mapped into host memory; see `mapped`."""
        own = type(self)
        if own._map is not BufferType._map:
            return self.is_raw
        plain = own._alloc is BufferType._alloc and own._upload is BufferType._upload and self.is_raw
        return plain and self.device.caps.map

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that ``tensor`` needs in this memory, including padding; not less than its packed size, the default."""
        return tensor.nbytes

    def why_not(self, tensor: Tensor) -> str | None:
        """Why the memory does not keep ``tensor``, or ``None`` if it does; by its author's ``_why_not``."""
        return self._why_not(tensor.dtype, tensor.shape)

    def check_tensor(self, tensor: Tensor) -> None:
        """Raise `UnsupportedOpError` unless the memory keeps ``tensor``."""
        why = self.why_not(tensor)
        if why is not None:
            raise UnsupportedOpError(f"{self.name} does not keep {tensor.describe()}: {why}")

    def pays(self, step: Step, source: int) -> bool:
        """Whether the scheduler should keep a read-only tensor here by itself, as a further copy, for ``step`` to read
        it as its source of that number; by its author's ``_pays``."""
        arg = step.srcs[source]
        return self._why_not(arg.dtype, arg.shape) is None and self._pays(step, source)

    def holds(self, usage: Usage) -> bool:
        """Whether the memory is for this usage."""
        return usage in self.usages or Usage.ANY in self.usages

    def check_usage(self, usage: Usage) -> None:
        """Raise `UnsupportedOpError` unless the memory is for this usage, `UnknownNameError` if it is no `Usage`."""
        if not isinstance(usage, Usage):
            members = [f"Usage.{member.name}" for member in Usage]
            hint = f"(a usage is a member of opweave.Usage, not an object of type {type(usage).__name__})"
            raise UnknownNameError("usage of memory", f"{usage!s:.60}", members, hint, listed=True)
        if not self.holds(usage):
            known = ", ".join(sorted(f"Usage.{u.name}" for u in self.usages))
            raise UnsupportedOpError(f"{self.name} is memory for {known}, not for Usage.{usage.name}")

    def alloc(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A buffer of ``size`` bytes with undefined contents.

        Raises:
            AllocationError: the device has not enough free memory, or ``size`` is above ``max_size`` (see
                `alloc_chunked`).
            BoundsError: ``size`` is negative.
            UnsupportedOpError: the memory is not for this usage.
            UnknownNameError: ``usage`` is no `Usage`.
            Broken: the author's ``_alloc`` returned an address that is not aligned.
            Unavailable: this process was forked after the device was set up, and its driver does not survive that.
        """
        self.device.check_process()
        if size < 0:
            raise BoundsError(f"cannot allocate {size} bytes")
        self.check_usage(usage)
        self._check_max(size)
        start = perf_counter_ns() if TRACE.listening else 0
        reclaim()
        try:
            try:
                handle = self._alloc(max(size, 1), usage)
            except MemoryError:
                if not reclaim_all(self.space):
                    raise
                handle = self._alloc(max(size, 1), usage)
        except MemoryError as error:
            if isinstance(error, AllocationError):
                raise
            raise self._allocation_error(size, str(error)) from error
        if handle is None:
            raise self._allocation_error(size, "its _alloc returned None")
        buffer = Buffer(self, handle, size, usage)
        if buffer.address is not None and buffer.address % self.alignment:
            buffer.free()
            raise Broken(
                f"{self.name}: _alloc returned {buffer.address}, which is not an address aligned to {self.alignment}",
                remedy="align it; if handles are integers that are not addresses, override _address to return None",
            )
        if TRACE.listening:
            TRACE.emit(
                "alloc", self.name, start, perf_counter_ns(), bytes=size, usage=usage.value, device=self.device.name
            )
        return buffer

    def alloc_chunked(self, sizes: Sequence[int], usage: Usage = Usage.ANY) -> tuple[MultiBuffer, list[int]]:
        """Memory for parts of the given sizes in bytes, in as few buffers as ``max_size`` allows.

        Returns:
            The buffers as one, and the offset of each part in it. No part lies across two buffers.

        Raises:
            AllocationError: the device has not enough free memory, or one part is above ``max_size``. Nothing stays
                allocated.
            BoundsError: a size is negative. Other errors as `alloc`.
        """
        chunks: list[int] = [0]
        positions: list[tuple[int, int]] = []  # chunk and offset in it
        for size in sizes:
            if size < 0:
                raise BoundsError(f"cannot allocate {size} bytes")
            self._check_max(size)
            at = round_up(chunks[-1], self.alignment)
            if self.max_size is not None and chunks[-1] and at + size > self.max_size:
                chunks.append(0)
                at = 0
            positions.append((len(chunks) - 1, at))
            chunks[-1] = at + size
        buffers: list[Buffer] = []
        try:
            for chunk in chunks:
                buffers.append(self.alloc(chunk, usage))  # noqa: PERF401 - freed on failure
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        whole = MultiBuffer(buffers)
        return whole, [whole.starts[chunk] + at for chunk, at in positions]

    def _check_max(self, size: int) -> None:
        if self.max_size is not None and size > self.max_size:
            raise self._allocation_error(size, f"one buffer has at most {self.max_size:,} bytes")

    def _allocation_error(self, size: int, why: str) -> AllocationError:
        try:
            free, total = self.device.mem_info()
        except Exception:
            free = total = 0  # a failing query must not hide the failed allocation
        if self.name != self.device.name:
            why = f"{why} ({self.name})" if why else self.name
        return AllocationError(self.device.name, size, free if total else None, why)

    # --- what a subclass may override -------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> Handle:
        return self.device._alloc(size, usage)

    def _free(self, mem: Handle) -> None:
        self.device._free(mem)

    def _upload(self, mem: Handle, offset: int, data: memoryview) -> None:
        self.device._upload(mem, offset, data)

    def _download(self, mem: Handle, offset: int, out: memoryview) -> None:
        self.device._download(mem, offset, out)

    def _upload_2d(self, mem: Handle, offset: int, pitch: int, rows: Rows) -> None:
        if type(self)._upload is BufferType._upload:
            self.device._upload_2d(mem, offset, pitch, rows)
        else:
            upload_rows(self._upload, self._download, mem, offset, pitch, rows)

    def _download_2d(self, mem: Handle, offset: int, pitch: int, out: Rows) -> None:
        if type(self)._download is BufferType._download:
            self.device._download_2d(mem, offset, pitch, out)
        else:
            download_rows(self._download, mem, offset, pitch, out)

    # The hooks of the device for filling, copying, mapping and binding work with its ordinary memory only. If a
    # subclass moves bytes differently, its `_upload` and `_download` are used instead.

    def _bind_upload(self, mem: Handle, offset: int, data: memoryview) -> Call:
        if type(self)._upload is BufferType._upload:
            return self.device._bind_upload(mem, offset, data)
        return partial(self._upload, mem, offset, data)

    def _bind_download(self, mem: Handle, offset: int, out: memoryview) -> Call:
        if type(self)._download is BufferType._download:
            return self.device._bind_download(mem, offset, out)
        return partial(self._download, mem, offset, out)

    def _fill(self, mem: Handle, offset: int, size: int, value: int) -> None:
        if type(self)._upload is BufferType._upload or not self.is_raw:
            self.device._fill(mem, offset, size, value)
        else:
            fill_by_upload(self._upload, mem, offset, size, value)

    def _copy(self, dst: Handle, dst_offset: int, src: Handle, src_offset: int, size: int) -> None:
        """Copy within this kind of memory. The ranges may overlap: the result is as if all bytes were read first."""
        own = type(self)
        if own._upload is BufferType._upload and own._download is BufferType._download:
            self.device._copy(dst, dst_offset, src, src_offset, size)
        else:
            chunk = BOUNCE_BYTES if self.is_raw else size
            copy_by_host(self._upload, self._download, dst, dst_offset, src, src_offset, size, chunk)

    def _map(self, mem: Handle, offset: int, size: int) -> memoryview:
        """Show bytes of the buffer as host memory until ``_unmap``. Overriding it makes `can_map` true."""
        return self.device._map(mem, offset, size)

    def _unmap(self, mem: Handle, view: memoryview) -> None:
        self.device._unmap(mem, view)

    def _address(self, mem: Handle) -> int | None:
        return self.device._address(mem)

    def _init(self, mem: Handle, offset: int, tensor: Tensor) -> Any:
        """Prepare for ``tensor`` at byte ``offset``. Optional. Called before the upload of the tensor; kernels receive
        the result as ``Arg.handle``.

        Overriding it declares that the memory stores whole tensors in its own format: ``_upload`` and ``_download`` are
        then called with the offset and the packed bytes of a tensor that was prepared.
        """
        return None

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        """Why the memory does not keep tensors of that dtype and shape, or ``None`` if it does. Optional; default: it
        keeps all."""
        return None

    def _pays(self, step: Step, source: int) -> bool:
        """Whether ``step``, which is unbound, is so much faster with its source ``source`` in this memory that a second
        copy of a read-only tensor pays off. Optional; default: no. Called for tensors that the memory keeps."""
        return False

    def _read_part(self, mem: Handle, offset: int, size: int, at: int, out: memoryview) -> None:
        """Read bytes from byte ``at`` on of the tensor of ``size`` bytes that was prepared at ``offset``. Optional, for
        memory that stores whole tensors; default: all of the tensor is read, and a part of it returned. Raises
        `LayoutError` where neither the part nor the whole tensor can be read."""
        whole = memoryview(bytearray(size))
        self._download(mem, offset, whole)
        out[:] = whole[at : at + len(out)]

    def _reset(self, mem: Handle) -> None:
        """Undo all preparations of ``_init``. Optional."""


def check_sizes(what: str, alignment: object, max_size: object) -> None:
    """Raise `Broken` unless ``alignment`` is a power of two and ``max_size`` is positive or ``None``, both in bytes."""
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise Broken(f"the alignment of {what} is {alignment!r}, not a power of two in bytes")
    if max_size is not None and (not isinstance(max_size, int) or max_size <= 0):
        raise Broken(f"the largest buffer of {what} has {max_size!r} bytes, not a positive number (None: no limit)")


# --- fallbacks for any memory --------------------------------------------------------------------------------------

BOUNCE_BYTES: Final = 8 << 20
"""Largest number of bytes that a copy by way of the host moves at a time."""


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


def fill_by_upload(
    upload: Callable[[Handle, int, memoryview], None], mem: Handle, offset: int, size: int, value: int
) -> None:
    """Set bytes to ``value`` by uploads of at most `BOUNCE_BYTES`."""
    chunk = memoryview(bytes((value,)) * min(size, BOUNCE_BYTES))
    for at in range(0, size, BOUNCE_BYTES):
        upload(mem, offset + at, chunk[: size - at])


def copy_by_host(
    upload: Callable[[Handle, int, memoryview], None],
    download: Callable[[Handle, int, memoryview], None],
    dst: Handle,
    dst_offset: int,
    src: Handle,
    src_offset: int,
    size: int,
    chunk: int = BOUNCE_BYTES,
) -> None:
    """Copy bytes by downloads and uploads of ``chunk`` bytes. Ranges of one memory may overlap."""
    scratch = memoryview(bytearray(min(size, chunk)))
    starts = range(0, size, chunk)
    # Backwards if the target lies behind the source, so that no chunk is overwritten before it is read.
    for at in reversed(starts) if dst_offset > src_offset else starts:
        part = scratch[: size - at]
        download(src, src_offset + at, part)
        upload(dst, dst_offset + at, part)
