"""Memory: spaces and usages, and what the author of a special kind of memory implements (`BufferTypeHooks`).

Ordinary memory is implemented by four methods of the device (``_alloc _free _upload _download``).
"""

from __future__ import annotations

import enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract.transfers import (
    BOUNCE_BYTES,
    Handle,
    Rows,
    copy_by_host,
    download_rows,
    fill_by_upload,
    upload_rows,
)
from opweave.errors import Broken, LayoutError

if TYPE_CHECKING:
    from opweave.contract.step import Call, Step
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.tensor import Tensor
    from opweave.runtime.device import Device

__all__ = ["HOST_SPACE", "BufferTypeHooks", "Handle", "MemorySpace", "Usage", "as_bytes"]


class Usage(enum.Enum):
    """What a buffer is used for. A device may choose memory by it; the scheduler keeps work near weights."""

    ANY = "any"
    """Anything."""
    WEIGHTS = "weights"
    """Read-only leaves."""
    COMPUTE = "compute"
    """Inputs, temporaries and results."""


class MemorySpace:
    """A set of addresses. Two devices share memory when both can reach one space.

    Attributes:
        name: shown to people; spaces are compared by identity.
        host: whether the process itself can read and write there.
    """

    __slots__ = ("__weakref__", "host", "name")

    def __init__(self, name: str, *, host: bool = False) -> None:
        self.name: Final = name
        self.host: Final = host

    def __repr__(self) -> str:
        return f"<MemorySpace {self.name}>"


HOST_SPACE: Final = MemorySpace("host", host=True)
"""The memory of this process."""


def as_bytes(data: Any, *, writable: bool = False) -> memoryview:
    """The bytes of any contiguous buffer-protocol object as a flat memoryview.

    Raises:
        LayoutError: ``data`` has no buffer, is not C-contiguous, or is read-only although ``writable`` is set.
    """
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or (writable and not data.flags.writeable):
            raise LayoutError(f"needs a C-contiguous{', writable' * writable} array, not strides {data.strides}")
        try:
            return data.data.cast("B")  # takes a fifth of the time
        except (TypeError, ValueError):  # an array without elements, or of a type that Python does not have
            return data.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(data)
    except TypeError:
        raise LayoutError(f"needs an array or another object with a buffer, not {type(data).__name__}") from None
    if not view.c_contiguous or (writable and view.readonly):
        raise LayoutError(f"needs a contiguous{', writable' * writable} buffer, not {type(data).__name__}")
    return view.cast("B")


class BufferTypeHooks:
    """A kind of memory of a device, as its author sees it. `opweave.contract.BufferType`, which has the finished
    methods too, is the device's ordinary memory.

    Subclass that for special memory (pinned, split over devices, repacked weights) and override the underscored methods
    that differ; the others call the methods of the device.

    - Pinned host memory: pass ``space=HOST_SPACE``, override ``_alloc`` and ``_free``; handles are arrays,
      buffer-protocol objects or addresses.
    - Repacked or split memory: override ``_init``, ``_upload`` and ``_download`` for whole tensors, and ``alloc_size``;
      or subclass `opweave.runtime.host.repacked.RepackedType`, which asks for less.
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
        return type(self)._init is BufferTypeHooks._init

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that ``tensor`` needs in this memory, including padding; not less than its packed size, the default."""
        return tensor.nbytes

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
        if type(self)._upload is BufferTypeHooks._upload:
            self.device._upload_2d(mem, offset, pitch, rows)
        else:
            upload_rows(self._upload, self._download, mem, offset, pitch, rows)

    def _download_2d(self, mem: Handle, offset: int, pitch: int, out: Rows) -> None:
        if type(self)._download is BufferTypeHooks._download:
            self.device._download_2d(mem, offset, pitch, out)
        else:
            download_rows(self._download, mem, offset, pitch, out)

    # The hooks of the device for filling, copying, mapping and binding work with its ordinary memory only. If a
    # subclass moves bytes differently, its `_upload` and `_download` are used instead.

    def _bind_upload(self, mem: Handle, offset: int, data: memoryview) -> Call:
        if type(self)._upload is BufferTypeHooks._upload:
            return self.device._bind_upload(mem, offset, data)
        return partial(self._upload, mem, offset, data)

    def _bind_download(self, mem: Handle, offset: int, out: memoryview) -> Call:
        if type(self)._download is BufferTypeHooks._download:
            return self.device._bind_download(mem, offset, out)
        return partial(self._download, mem, offset, out)

    def _fill(self, mem: Handle, offset: int, size: int, value: int) -> None:
        if type(self)._upload is BufferTypeHooks._upload or not self.is_raw:
            self.device._fill(mem, offset, size, value)
        else:
            fill_by_upload(self._upload, mem, offset, size, value)

    def _copy(self, dst: Handle, dst_offset: int, src: Handle, src_offset: int, size: int) -> None:
        """Copy within this kind of memory. The ranges may overlap: the result is as if all bytes were read first."""
        own = type(self)
        if own._upload is BufferTypeHooks._upload and own._download is BufferTypeHooks._download:
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
