"""`Buffer`: one allocation of a device.

`Buffer` is not subclassed: it checks ranges, lifetimes and permissions, then calls its `BufferType`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import c_ubyte
from functools import partial
from itertools import accumulate, pairwise
from sys import is_finalizing
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import ref

import numpy as np

from opweave.contract.memory import Handle, Usage, as_bytes
from opweave.contract.transfers import as_rows, rows_in
from opweave.errors import BoundsError, HazardError, LayoutError, LifetimeError
from opweave.graph.dtypes import u8
from opweave.graph.layout import array_shape, span
from opweave.graph.leaf import Placement
from opweave.lifecycle import INHERITED
from opweave.runtime.changes import CHANGES
from opweave.runtime.reclaim import discard, reclaim, settle
from opweave.tracing import TRACE

__all__ = ["Buffer", "MultiBuffer"]

if TYPE_CHECKING:
    from typing import Protocol

    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.tensor import Tensor
    from opweave.runtime.memory import BufferType

    class Dependent(Protocol):
        """Something that uses a buffer and cannot run without it: a `Plan`, a run list of the scheduler.

        Attributes:
            when_idle: calls a function while no run in flight uses it; ``None``: waiting for the device is enough.
            keeps_copies: whether it may keep other forms of read-only memory, which `refresh` makes again.
        """

        @property
        def keeps_copies(self) -> bool: ...
        @property
        def when_idle(self) -> Callable[[Callable[[], Any]], Any] | None: ...
        def invalidate(self, why: str) -> None: ...
        def refresh(self, token: object) -> None: ...
        def give_up(self) -> None: ...


class Buffer:
    """One allocation of a `BufferType`. Made by ``alloc`` and ``import_host``.

    `free` frees the memory and waits for queued work first. Without it the memory is freed when nothing refers to the
    buffer any more and queued work that may use it is complete. Not thread-safe: the caller orders uploads, downloads
    and work.

    Attributes:
        type, device, space: the buffer type, its device and its memory space.
        handle: what the author's ``_alloc`` or ``_import_host`` returned; ``None`` once freed.
        size: bytes.
        owner: the object that keeps imported memory alive, or ``None``.
        usage_changes: how often its usage was changed; what lies there may have been written in between.
        readonly: nothing may write there, because it was imported from a read-only array or mapping.
    """

    __slots__ = (
        "__weakref__", "_address", "_dependents", "_freed", "_prepared", "_usage", "device", "handle", "owner",
        "readonly", "size", "space", "type", "usage_changes",
    )  # fmt: skip

    def __init__(
        self,
        type: BufferType,
        handle: Handle,
        size: int,
        usage: Usage = Usage.ANY,
        owner: object = None,
        readonly: bool = False,
    ) -> None:
        self._freed = False
        self._dependents: list[ref[Dependent]] = []
        self._prepared: dict[int, int] = {}  # in memory that is not raw: offset of each tensor -> its packed bytes
        self.type: Final = type
        self.device: Final = type.device
        self.space: Final = type.space
        self.handle: Handle = handle
        self.size: Final = size
        self._usage = usage
        self.usage_changes = 0
        self.owner = owner
        self.readonly: Final = readonly
        self._address: int | None = -1  # not known yet: asking an array for it is slow, and few buffers need it
        type.device.live_buffers.add(self)

    @property
    def name(self) -> str:
        """The name of the buffer type."""
        return self.type.name

    @property
    def usage(self) -> Usage:
        """What the buffer is for; settable. After a change `Scheduler.build` of the same outputs makes a new program.

        Setting it raises `UnsupportedOpError` if the buffer type is not for this usage, and `UnknownNameError` if it is
        no `Usage`.
        """
        return self._usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        self.type.check_usage(usage)
        if usage is not self._usage:
            self._usage = usage
            self.usage_changes += 1
            if self._dependents:
                CHANGES.note()

    @property
    def is_host(self) -> bool:
        """Whether the process can read and write tensors there directly."""
        return self.type.is_host

    @property
    def address(self) -> int | None:
        """Address of the first byte, ``None`` for memory without numeric addresses."""
        if self._address == -1:
            self._address = self.type._address(self.handle)
        return self._address

    def location(self, offset: int) -> tuple[int, int]:
        """A number for the memory (0: host memory) and the position of a byte in it. Two buffers over the same byte
        give the same result. Buffers without addresses count as a memory of their own, so they never overlap."""
        if self.address is None:
            return id(self), offset
        return 0 if self.space.host else id(self.space), self.address + offset

    @property
    def freed(self) -> bool:
        """Whether the memory was given up and can no longer be used."""
        return self._freed

    def __repr__(self) -> str:
        state = "freed" if self._freed else self.usage.value
        return f"<Buffer {self.name} {self.size:,} bytes, {state}>"

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    def __reduce__(self) -> NoReturn:
        # The default would make a second object that frees the same memory.
        raise LifetimeError(f"{self!r} cannot be copied or pickled; pickle steps before memory is planned")

    def check(self, offset: int, size: int, *, write: bool = False) -> None:
        """Check that bytes ``offset .. offset + size`` can be used.

        Raises:
            LifetimeError: the buffer was freed.
            BoundsError: the range is not inside of the buffer.
            HazardError: ``write`` is set and the memory is read-only.
        """
        if self._freed:
            raise self._gone()
        if offset < 0 or size < 0 or offset + size > self.size:
            raise BoundsError(f"bytes {offset:,} .. {offset + size:,} are outside of {self!r}")
        if write and self.readonly:
            raise HazardError(f"{self!r} lies over read-only memory; nothing may write there")

    def upload(self, offset: int, data: Any) -> None:
        """Write the bytes of a contiguous array or buffer at byte ``offset``. Complete when it returns.

        In memory that stores whole tensors (see `BufferType`), writing a part of a tensor reads the tensor, changes the
        part and writes the tensor back.

        Raises:
            LifetimeError, BoundsError, HazardError: see `check`.
            LayoutError: ``data`` is not contiguous; or the memory stores whole tensors and the range is not inside of
                a tensor that was prepared by `init`.
        """
        view = as_bytes(data)
        self.check(offset, len(view), write=True)
        if not len(view):
            return
        start, size = self._tensor_around(offset, len(view))
        if size != len(view):
            part, view = view, self.read(start, size).data
            view[offset - start : offset - start + len(part)] = part
        self.type._upload(self.handle, start, view)

    def download(self, offset: int, out: Any) -> None:
        """Read bytes from byte ``offset`` into a contiguous writable array or buffer. Complete when it returns.

        In memory that stores whole tensors, reading a part of a tensor reads all of it, unless it has a ``_read_part``.
        Raises what `upload` raises, except `HazardError`.
        """
        view = as_bytes(out, writable=True)
        self.check(offset, len(view))
        if not len(view):
            return
        start, size = self._tensor_around(offset, len(view))
        if size == len(view):
            self.type._download(self.handle, start, view)
        else:
            self.type._read_part(self.handle, start, size, offset - start, view)

    def upload_2d(self, offset: int, pitch: int, rows: Any) -> None:
        """Write rows at equal distances: row ``i`` goes to byte ``offset + i * pitch``. Complete when it returns. The
        bytes between the rows keep their values.

        Args:
            pitch: bytes from the beginning of one row to that of the next.
            rows: an array of two axes and any dtype. Each row is contiguous; rows need not follow each other.

        Raises:
            LifetimeError, BoundsError, HazardError: see `check`.
            LayoutError: ``rows`` is no such array, its rows overlap, or `upload` refuses the range.
        """
        given = as_rows(rows, pitch)
        size = self.check_rows(offset, pitch, given.shape, write=True)
        if not given.size:
            return
        if size == given.size:
            self.upload(offset, np.ascontiguousarray(given))
        elif self.is_host:
            np.copyto(self.view(offset, u8, given.shape, (pitch, 1)), given)
        elif self._prepared:
            start, whole = self._tensor_around(offset, size)
            data = self.read(start, whole)
            rows_in(data, offset - start, pitch, given.shape)[...] = given
            self.type._upload(self.handle, start, data.data)
        else:
            self.type._upload_2d(self.handle, offset, pitch, given)

    def download_2d(self, offset: int, pitch: int, out: Any) -> None:
        """Read rows at equal distances: row ``i`` of a writable array comes from byte ``offset + i * pitch``.

        The counterpart of `upload_2d`, which has the same arguments. Raises what `download` raises, and `LayoutError`
        for the arrays that `upload_2d` refuses.
        """
        given = as_rows(out, pitch, writable=True)
        size = self.check_rows(offset, pitch, given.shape)
        if not given.size:
            return
        if self.is_host:
            np.copyto(given, self.view(offset, u8, given.shape, (pitch, 1)))
        elif self._prepared or (size == given.size and given.flags.c_contiguous):
            given[...] = rows_in(self.read(offset, size), 0, pitch, given.shape)
        else:
            self.type._download_2d(self.handle, offset, pitch, given)

    def check_rows(self, offset: int, pitch: int, shape: tuple[int, int], *, write: bool = False) -> int:
        """Check the range of rows of bytes; gives its size."""
        count, width = shape
        size = (count - 1) * pitch + width if count else 0
        self.check(offset, size, write=write)
        return size

    def _tensor_around(self, offset: int, size: int) -> tuple[int, int]:
        """Offset and bytes of the prepared tensor that contains a range; the range itself if none was prepared."""
        if not self._prepared or self._prepared.get(offset) == size:
            return offset, size
        for start, whole in self._prepared.items():
            if start <= offset and offset + size <= start + whole:
                return start, whole
        raise LayoutError(
            f"bytes {offset:,} .. {offset + size:,} of {self!r} are not inside of a tensor that was prepared there by "
            "Buffer.init"
        )

    def read(self, offset: int = 0, size: int | None = None) -> np.ndarray[Any, Any]:
        """``size`` bytes from ``offset`` on (default: all that follow) as a new ``uint8`` array. Raises what `download`
        raises."""
        size = self.size - offset if size is None else size
        self.check(offset, size)
        out = np.empty(size, np.uint8)
        self.download(offset, out)
        return out

    def fill(self, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set ``size`` bytes from ``offset`` on (default: all that follow) to ``value``.

        In memory that stores whole tensors, reading the tensors gives these bytes afterwards.

        Raises:
            BoundsError: ``value`` is not in 0 .. 255, or the range is outside of the buffer.
            LifetimeError, HazardError, LayoutError: see `check` and `upload`.
        """
        if value not in range(256):
            raise BoundsError(f"{value} is not a byte (0 .. 255)")
        size = self.size - offset if size is None else size
        self.check(offset, size, write=True)
        if self._prepared:
            ranges = [(offset, size)] if size < self.size else self._prepared.items()
            for start, length in ranges:
                self.upload(start, bytes((value,)) * length)
        elif size:
            self.type._fill(self.handle, offset, size, int(value))

    def clear(self, value: int = 0) -> None:
        """Set every byte to ``value`` (0 .. 255); see `fill`."""
        self.fill(value)

    def host_bytes(self, offset: int, size: int) -> memoryview:
        """Bytes ``offset .. offset + size`` of host memory, not a copy.

        Raises:
            LifetimeError, BoundsError: see `check`.
            LayoutError: the process cannot address the memory, or it stores tensors in its own format.
        """
        self.check(offset, size)
        if not self.type.is_raw:
            raise LayoutError(f"{self!r} does not store tensors as they were uploaded; download them")
        return self.view(offset, u8, (size,), (1,)).data

    def view(self, offset: int, dtype: DType, shape: Shape, strides: Strides) -> np.ndarray[Any, Any]:
        """A NumPy array over the memory, not a copy, where the process can address it.

        Args:
            offset: byte of the first element.
            dtype, shape: of the array. Of quantized types it is a ``uint8`` array whose last axis counts bytes.
            strides: bytes per axis.

        Raises:
            LifetimeError, BoundsError: see `check`.
            LayoutError: the process cannot address the memory.
        """
        handle = self.handle
        if handle is None:
            raise self._gone()
        if dtype.block > 1:
            shape, strides = array_shape(shape, dtype), (*strides[:-1], 1)
        try:
            # NumPy checks the bounds.
            return np.ndarray(shape, dtype.numpy, handle, offset, strides)
        except (TypeError, ValueError):
            self.check(offset, span(shape, strides, dtype if dtype.block == 1 else u8))
            if self.address is None or not self.space.host:
                raise LayoutError(f"the process cannot address {self!r}; download it") from None
            memory = memoryview((c_ubyte * self.size).from_address(self.address))
            return np.ndarray(shape, dtype.numpy, memory, offset, strides)

    def _gone(self) -> LifetimeError:
        return LifetimeError(f"{self!r} {INHERITED if self.owner is INHERITED else 'was freed'}")

    def exported(self, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        """A part of the memory as an object with ``__dlpack__`` and ``__dlpack_device__``, which keeps it alive.

        Args:
            offset: byte of the first element.
            dtype, shape: of the array that other libraries see.
            strides: bytes per axis.

        Raises:
            LifetimeError, BoundsError: see `check`.
            BufferError: DLPack has no such dtype, or the memory cannot be exported.
        """
        self.check(offset, span(shape, strides, dtype))
        if dtype.block > 1:
            raise BufferError(f"DLPack has no {dtype}")
        if not self.type.is_raw:
            raise BufferError(f"{self!r} does not store tensors as they were uploaded")
        if not self.is_host:
            return self.device._export_dlpack(self.handle, offset, dtype, shape, strides)
        try:
            memoryview(self.handle)
        except TypeError:  # the handle is an address, and nothing would keep its memory alive
            raise BufferError(f"{self!r} is not an array; download it") from None
        return self.view(offset, dtype, shape, strides)

    def __dlpack__(self, **params: Any) -> Any:
        """All bytes as a ``uint8`` array for another library's ``from_dlpack``, without copying; see `exported`."""
        return self.exported(0, u8, (self.size,), (1,)).__dlpack__(**params)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.exported(0, u8, (self.size,), (1,)).__dlpack_device__()
        return int(kind), int(number)

    def init(self, tensor: Tensor, offset: int) -> Placement:
        """Place ``tensor`` at byte ``offset``. Call it before the upload: memory that stores whole tensors prepares for
        this tensor here.

        Raises:
            BoundsError: the tensor does not fit there, or ``offset`` is not a multiple of the alignment.
            LifetimeError: the buffer was freed.
            UnsupportedOpError: the memory does not keep such tensors.
        """
        self.type.check_tensor(tensor)
        self.check(offset, self.type.alloc_size(tensor))
        if offset % self.type.alignment:
            raise BoundsError(f"offset {offset} is not a multiple of the alignment {self.type.alignment} of {self!r}")
        placement = Placement(tensor, self, offset, self.type._init(self.handle, offset, tensor))
        if not self.type.is_raw:
            end = offset + tensor.nbytes
            # Tensors that were prepared in these bytes before are overwritten.
            apart = {at: size for at, size in self._prepared.items() if at >= end or at + size <= offset}
            self._prepared = {**apart, offset: tensor.nbytes}
        return placement

    def reset(self) -> None:
        """Undo all preparations of `init`; the bytes stay as they are."""
        self.check(0, 0)
        self._prepared.clear()
        self.type._reset(self.handle)

    def free(self, *, wait: bool = True) -> None:
        """Free the memory after queued work that may use it is complete. Freeing twice does nothing.

        Plans that were compiled with the buffer can no longer be run. A failure of that work is not raised here, but
        stays on its stream.

        Args:
            wait: ``False``: return at once; the memory is freed when that work is complete.
        """
        if self._freed:
            return
        if wait:
            settle(self.space)
            reclaim()
            self._release(self.type._free)
        else:
            self._release(partial(discard, self.type, owner=self.owner))

    def add_dependent(self, dependent: Dependent) -> None:
        """Invalidate ``dependent``, while it lives, when the buffer is freed."""
        # Weak references without callbacks are shared, which makes this ten times as fast as a WeakSet. Dead ones are
        # removed whenever their number reaches a power of two from 16 on.
        dependents = self._dependents
        dependents.append(ref(dependent))
        if len(dependents) >= 16 and not len(dependents) & (len(dependents) - 1):
            self._dependents = [known for known in dependents if known() is not None]

    @property
    def dependents(self) -> list[Dependent]:
        """The plans and run lists that use it."""
        return [dependent for known in self._dependents if (dependent := known()) is not None]

    def invalidate_dependents(self) -> None:
        """Make plans that were compiled with the buffer unusable, because it is freed or its contents move."""
        for dependent in self.dependents:
            dependent.invalidate(f"{self!r} was {'freed' if self._freed else 'given up'}")

    def _release(self, free: Callable[[Handle], None]) -> None:
        self._freed = True
        self.invalidate_dependents()
        handle, self.handle = self.handle, None
        try:
            free(handle)
        finally:
            self.owner = None
        if TRACE.listening:
            now = perf_counter_ns()
            TRACE.emit("free", self.name, now, now, bytes=self.size, device=self.device.name)

    def after_fork(self) -> tuple[Handle, object]:
        """Make the buffer unusable in a forked child. Returns handle and owner, which must not be freed there."""
        kept = self.handle, self.owner
        self._freed, self.handle, self.owner = True, None, INHERITED
        return kept

    def __del__(self) -> None:
        # A constructor that failed leaves no attributes; at interpreter shutdown the driver may be unloaded already.
        if getattr(self, "_freed", True) or is_finalizing():
            return
        try:
            self.free(wait=False)
        except Exception:
            self._freed = True


class MultiBuffer:
    """Several buffers addressed as one, where a device cannot allocate or import enough bytes at once.

    Windows over one mapping may overlap; a range is then found in the last window that contains all of it.

    Attributes:
        buffers: the parts, in order.
        starts: the byte at which each part begins in the whole.
        size: bytes of the whole.

    Raises:
        BoundsError: no buffer, or ``starts`` that are not one ascending number for each buffer.
    """

    __slots__ = ("__weakref__", "buffers", "size", "starts")

    def __init__(self, buffers: Sequence[Buffer], starts: Sequence[int] | None = None) -> None:
        if not buffers:
            raise BoundsError("a MultiBuffer needs at least one buffer")
        if starts is None:
            starts = [0, *accumulate(b.size for b in buffers[:-1])]
        if len(starts) != len(buffers) or starts[0] < 0 or any(a > b for a, b in pairwise(starts)):
            raise BoundsError(f"{len(buffers)} buffers need as many starts in ascending order, not {list(starts)}")
        self.buffers: Final = tuple(buffers)
        self.starts: Final = tuple(starts)
        self.size: Final = max(start + b.size for start, b in zip(self.starts, self.buffers, strict=True))

    def __repr__(self) -> str:
        return f"<MultiBuffer of {len(self.buffers)}, {self.size:,} bytes, {self.buffers[0].name}>"

    def __enter__(self) -> MultiBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    @property
    def freed(self) -> bool:
        """Whether every part was freed."""
        return all(buffer.freed for buffer in self.buffers)

    def locate(self, offset: int, size: int) -> tuple[Buffer, int]:
        """The buffer that contains bytes ``offset .. offset + size`` of the whole, and the offset in that buffer.

        Raises:
            BoundsError: no single buffer contains the range.
        """
        if size < 0:
            raise BoundsError(f"a range cannot have {size} bytes")
        for i in range(bisect_right(self.starts, offset) - 1, -1, -1):
            buffer, local = self.buffers[i], offset - self.starts[i]
            if local >= 0 and local + size <= buffer.size:
                return buffer, local
        raise BoundsError(f"no single buffer of {self!r} contains bytes {offset:,} .. {offset + size:,}")

    @property
    def usage(self) -> Usage:
        """What the parts are for; setting it sets that of every part."""
        return self.buffers[0].usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        for buffer in self.buffers:
            buffer.usage = usage

    def clear(self, value: int = 0) -> None:
        """Set every byte to ``value`` (0 .. 255)."""
        for buffer in self.buffers:
            buffer.clear(value)

    def reset(self) -> None:
        """`Buffer.reset` of every part."""
        for buffer in self.buffers:
            buffer.reset()

    def free(self) -> None:
        """`Buffer.free` of every part."""
        for buffer in self.buffers:
            buffer.free()
