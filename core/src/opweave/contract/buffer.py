"""Blocks of memory: `Buffer`, several as one (`MultiBuffer`), and their bytes as host memory (`mapped`).

`Buffer` is finished: it checks ranges, life times and permissions, and hands on to its `BufferType`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from sys import is_finalizing
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import ref

import numpy as np

from opweave.contract.discarding import discard, reclaim
from opweave.contract.space import CHANGES, Handle, Usage, as_bytes, settle
from opweave.errors import BoundsError, HazardError, LayoutError, LifetimeError
from opweave.graph.dtypes import u8
from opweave.graph.layout import span
from opweave.graph.tensor import Placement
from opweave.lifecycle import INHERITED
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from typing import Protocol

    from opweave.contract.memory import BufferType
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.tensor import Tensor

    class Dependent(Protocol):
        """Something that ends with a buffer."""

        def _orphan(self, why: str) -> None: ...


__all__ = ["Buffer", "MultiBuffer", "mapped"]

FEW_PLANS: Final = 16
"""So many plans of a buffer are remembered without looking for those that are gone."""


class Buffer:
    """A block of memory of one `BufferType`. Made by ``alloc`` and ``import_host``, freed by ``free``, which waits for
    queued work, or once nobody refers to it and such work is over. Not thread-safe: uploads and downloads are ordered
    by the caller.

    Attributes:
        type, device, space: what memory it is.
        handle: what the author's ``_alloc`` returned.
        size: bytes.
        owner: what keeps imported memory alive, or ``None``.
        readonly: nothing may write there (imported from an array or a mapping that is read-only).
    """

    __slots__ = (
        "__weakref__", "_begin", "_freed", "_plans", "_prepared", "_usage", "device", "handle", "owner", "readonly",
        "size", "space", "type",
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
        self._plans: list[ref[Dependent]] | None = None
        self._prepared: dict[int, int] = {}  # in memory that is not raw: where each tensor begins -> its packed bytes
        self.type: Final = type
        self.device: Final = type.device
        self.space: Final = type.space
        self.handle: Handle = handle
        self.size: Final = size
        self._usage = usage
        self.owner = owner
        self.readonly: Final = readonly
        self._begin: int | None = -1  # not asked for yet: arrays tell it slowly, and few need it
        type.device._buffers.add(self)

    @property
    def name(self) -> str:
        return self.type.name

    @property
    def usage(self) -> Usage:
        """What it is for; settable. Building the outputs of a program again makes a new one if that changed."""
        return self._usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        self.type.check_usage(usage)
        if usage is not self._usage:
            self._usage = usage
            if self._plans is not None:
                CHANGES.note()

    @property
    def is_host(self) -> bool:
        """Whether the process can read and write tensors there directly."""
        return self.type.is_host

    @property
    def address(self) -> int | None:
        """Where it begins, for memory that has numeric addresses, else ``None``."""
        if self._begin == -1:
            self._begin = self.type._address(self.handle)
        return self._begin

    def location(self, offset: int) -> tuple[int, int]:
        """Which memory, as a number (0: the host's), and which byte of it: equal where two buffers lie over the same
        bytes. Buffers without addresses never do; each is a memory of its own."""
        if self.address is None:
            return id(self), offset
        return 0 if self.space.host else id(self.space), self.address + offset

    @property
    def freed(self) -> bool:
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
        raise LifetimeError(f"{self!r} cannot be copied or pickled; pickle steps while they are unbound")

    def check(self, offset: int, size: int, *, write: bool = False) -> None:
        """Check that a range of bytes can be used.

        Raises:
            LifetimeError: the buffer was freed.
            BoundsError: ``offset .. offset + size`` is not inside.
            HazardError: ``write``, and the memory is read-only.
        """
        if self._freed:
            raise self._gone()
        if offset < 0 or size < 0 or offset + size > self.size:
            raise BoundsError(f"bytes {offset:,} .. {offset + size:,} are outside of {self!r}")
        if write and self.readonly:
            raise HazardError(f"{self!r} lies over read-only memory; nothing may write there")

    def upload(self, offset: int, data: Any) -> None:
        """Write the bytes of a contiguous array or buffer at ``offset``; complete when it returns.

        In memory of whole tensors (see `BufferType`) a part of a tensor is written by reading the tensor, changing the
        part and writing it whole.

        Raises:
            LifetimeError, BoundsError, HazardError: see `check`.
            LayoutError: memory of whole tensors, and the range is not in one of those that were prepared.
        """
        view = as_bytes(data)
        self.check(offset, len(view), write=True)
        if not len(view):
            return
        start, size = self._tensor_around(offset, len(view))
        if size != len(view):
            part, view = view, memoryview(bytearray(size))
            self.type._download(self.handle, start, view)
            view[offset - start : offset - start + len(part)] = part
        self.type._upload(self.handle, start, view)

    def download(self, offset: int, out: Any) -> None:
        """Read bytes from ``offset`` on into a contiguous writable array or buffer; complete when it returns.

        In memory of whole tensors a part of a tensor is read by reading it whole. Raises what `upload` does.
        """
        view = as_bytes(out, writable=True)
        self.check(offset, len(view))
        if not len(view):
            return
        start, size = self._tensor_around(offset, len(view))
        if size == len(view):
            self.type._download(self.handle, start, view)
        else:
            whole = memoryview(bytearray(size))
            self.type._download(self.handle, start, whole)
            view[:] = whole[offset - start : offset - start + len(view)]

    def _tensor_around(self, offset: int, size: int) -> tuple[int, int]:
        """Start and bytes of the prepared tensor that holds a range; the range itself where none was prepared."""
        if not self._prepared or self._prepared.get(offset) == size:
            return offset, size
        for start, whole in self._prepared.items():
            if start <= offset and offset + size <= start + whole:
                return start, whole
        raise LayoutError(
            f"bytes {offset:,} .. {offset + size:,} of {self!r} are in no tensor that was prepared there (Buffer.init)"
        )

    def read(self, offset: int = 0, size: int | None = None) -> np.ndarray[Any, Any]:
        """The bytes as a new ``uint8`` array."""
        size = self.size - offset if size is None else size
        self.check(offset, size)
        out = np.empty(size, np.uint8)
        self.download(offset, out)
        return out

    def fill(self, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set bytes to ``value`` (0 .. 255). In memory of whole tensors these are the bytes that reading them gives."""
        if value not in range(256):
            raise BoundsError(f"{value} is no byte")
        size = self.size - offset if size is None else size
        self.check(offset, size, write=True)
        if self._prepared:
            ranges = [(offset, size)] if size < self.size else self._prepared.items()
            for start, length in ranges:
                self.upload(start, bytes((value,)) * length)
        elif size:
            self.type._fill(self.handle, offset, size, int(value))

    def clear(self, value: int = 0) -> None:
        """Set every byte to ``value``."""
        self.fill(value)

    def host_bytes(self, offset: int, size: int) -> memoryview:
        """A range of host memory itself, not a copy.

        Raises:
            LifetimeError, BoundsError: the range is not valid.
            LayoutError: the process cannot address it, or tensors lie there in a form of the memory's own.
        """
        self.check(offset, size)
        if not self.type.is_raw:
            raise LayoutError(f"{self!r} does not hold tensors as they were uploaded; download them")
        try:
            view = memoryview(self.handle)
        except TypeError:
            if self.address is None or not self.space.host:
                raise self._opaque() from None
            return _at(self.address, self.size)[offset : offset + size]
        return view.cast("B")[offset : offset + size]

    def view(self, offset: int, dtype: DType, shape: Shape, strides: Strides) -> np.ndarray[Any, Any]:
        """An array over the bytes themselves, for memory that the process can address.

        Quantized types show as ``uint8`` with the last axis in bytes.

        Raises:
            LifetimeError, BoundsError: the range is not valid.
            LayoutError: the process cannot address it.
        """
        handle = self.handle
        if handle is None:
            raise self._gone()
        if dtype.block > 1:
            shape = (*shape[:-1], dtype.row_bytes(shape[-1]))
            strides = (*strides[:-1], 1)
        try:
            # NumPy checks the bounds.
            return np.ndarray(shape, dtype.numpy, handle, offset, strides)
        except (TypeError, ValueError):
            self.check(offset, span(shape, strides, dtype if dtype.block == 1 else u8))
            if self.address is None or not self.space.host:
                raise self._opaque() from None
            return np.ndarray(shape, dtype.numpy, _at(self.address, self.size), offset, strides)

    def _gone(self) -> LifetimeError:
        return LifetimeError(f"{self!r} {INHERITED if self.owner is INHERITED else 'was freed'}")

    def _opaque(self) -> LayoutError:
        return LayoutError(f"{self!r} cannot be addressed by the process; download it")

    def exported(self, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        """A part of the memory as an object with ``__dlpack__`` and ``__dlpack_device__``, which keeps it alive.

        Raises:
            LifetimeError, BoundsError: the range is not valid.
            BufferError: the memory, or the dtype, cannot be shown to other libraries.
        """
        self.check(offset, span(shape, strides, dtype))
        if dtype.block > 1:
            raise BufferError(f"DLPack has no {dtype}")
        if not self.type.is_raw:
            raise BufferError(f"{self!r} does not hold tensors as they were uploaded")
        if not self.is_host:
            return self.device._export_dlpack(self.handle, offset, dtype, shape, strides)
        try:
            memoryview(self.handle)
        except TypeError:  # an address, which nothing keeps alive
            raise BufferError(f"{self!r} is no array; download it") from None
        return self.view(offset, dtype, shape, strides)

    def __dlpack__(self, **params: Any) -> Any:
        """The bytes for another library's ``from_dlpack``, without copying; see `exported`."""
        return self.exported(0, u8, (self.size,), (1,)).__dlpack__(**params)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.exported(0, u8, (self.size,), (1,)).__dlpack_device__()
        return int(kind), int(number)

    def init(self, tensor: Tensor, offset: int) -> Placement:
        """Place ``tensor`` at ``offset``; special memory prepares it here, so it comes before the upload.

        Raises:
            BoundsError: it does not fit there, or ``offset`` is not aligned.
            LifetimeError: the buffer was freed.
        """
        self.check(offset, self.type.alloc_size(tensor))
        if offset % self.type.alignment:
            raise BoundsError(f"offset {offset} is not a multiple of the alignment {self.type.alignment} of {self!r}")
        placement = Placement(tensor, self, offset, self.type._init(self.handle, offset, tensor))
        if not self.type.is_raw:
            end = offset + tensor.nbytes
            for start, size in [*self._prepared.items()]:
                if start < end and offset < start + size:
                    del self._prepared[start]  # what was there is overwritten
            self._prepared[offset] = tensor.nbytes
        return placement

    def reset(self) -> None:
        """Forget what `init` prepared; the bytes stay."""
        self.check(0, 0)
        self._prepared.clear()
        self.type._reset(self.handle)

    def free(self, *, wait: bool = True) -> None:
        """Give the memory back, after queued work that may touch it is done. Freeing twice does nothing.

        Plans that were compiled with the buffer can no longer be run. Work that failed is not raised here but stays
        on its stream.

        Args:
            wait: ``False``: do not wait for that work; the memory goes once it is over.
        """
        if self._freed:
            return
        if not wait:
            self._discard()
            return
        settle(self.space)
        reclaim()
        self._release(self.type._free)

    def _note(self, plan: Dependent) -> None:
        """Have ``plan`` ended with the buffer."""
        # Weak references without callbacks are shared, which makes this ten times as fast as a WeakSet.
        plans = self._plans
        if plans is None:
            self._plans = [ref(plan)]
            return
        plans.append(ref(plan))
        if len(plans) >= FEW_PLANS and not len(plans) & (len(plans) - 1):
            self._plans = [known for known in plans if known() is not None]

    def retire(self) -> None:
        """End the plans that were compiled with the buffer: what it holds is kept elsewhere from here on."""
        for known in self._plans or ():
            plan = known()
            if plan is not None:
                plan._orphan(f"{self!r} was {'freed' if self._freed else 'given up'}")

    def _discard(self) -> None:
        self._release(partial(discard, self.type, owner=self.owner))

    def _release(self, give: Callable[[Handle], None]) -> None:
        self._freed = True
        self.retire()
        handle, self.handle = self.handle, None
        try:
            give(handle)
        finally:
            self.owner = None
        if TRACE.listening:
            now = perf_counter_ns()
            TRACE.emit("free", self.name, now, now, bytes=self.size, device=self.device.name)

    def _inherit(self) -> tuple[Handle, object]:
        """Be unusable in a forked child; gives what must not be given back there."""
        kept = self.handle, self.owner
        self._freed, self.handle, self.owner = True, None, INHERITED
        return kept

    def __del__(self) -> None:
        # A constructor that failed leaves no attributes; an interpreter that shuts down may have lost the driver.
        if getattr(self, "_freed", True) or is_finalizing():
            return
        try:
            self._discard()
        except Exception:
            self._freed = True


class MultiBuffer:
    """Several buffers addressed as one, where a device cannot give memory in one piece.

    Windows over one mapping may overlap; then a range is found in the last window that holds all of it.

    Attributes:
        buffers: in order.
        starts: where each begins in the whole.
        size: bytes of the whole.
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
        return all(buffer.freed for buffer in self.buffers)

    def locate(self, offset: int, size: int) -> tuple[Buffer, int]:
        """The buffer that holds ``offset .. offset + size``, and the offset in it.

        Raises:
            BoundsError: no single buffer holds the range.
        """
        if size < 0:
            raise BoundsError(f"a range has no {size} bytes")
        for i in range(bisect_right(self.starts, offset) - 1, -1, -1):
            buffer, local = self.buffers[i], offset - self.starts[i]
            if local >= 0 and local + size <= buffer.size:
                return buffer, local
        raise BoundsError(f"no buffer of {self!r} holds bytes {offset:,} .. {offset + size:,} in one piece")

    @property
    def usage(self) -> Usage:
        return self.buffers[0].usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        for buffer in self.buffers:
            buffer.usage = usage

    def clear(self, value: int = 0) -> None:
        for buffer in self.buffers:
            buffer.clear(value)

    def reset(self) -> None:
        for buffer in self.buffers:
            buffer.reset()

    def free(self) -> None:
        for buffer in self.buffers:
            buffer.free()


@contextmanager
def mapped(buffer: Buffer, offset: int, size: int, *, write: bool = False) -> Iterator[memoryview]:
    """The bytes ``offset .. offset + size`` as host memory for the length of a ``with`` block.

    Direct where the device maps its memory, else a copy that is written back at the end if ``write`` (and not if the
    block raised). Only ``write`` permits changes.
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


def _at(address: int, size: int) -> memoryview:
    """Host memory at a numeric address."""
    from ctypes import c_ubyte

    return memoryview((c_ubyte * size).from_address(address)).cast("B")
