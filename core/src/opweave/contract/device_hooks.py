"""`DeviceHooks`: the methods that the author of a device implements, and those that he may override.

Overridden hooks define the capabilities (`Caps`). Public methods of `Device` check their arguments before they call a
hook; hooks may rely on that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from opweave.contract.memory import copy_by_host, fill_by_upload
from opweave.contract.rows import Rows, download_rows, upload_rows
from opweave.contract.stream import Stream
from opweave.errors import UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opweave.contract.kernels import KernelTable
    from opweave.contract.memory import BufferType
    from opweave.contract.space import Handle, Usage
    from opweave.contract.step import Call, Step
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.precision import Precision

__all__ = ["DeviceHooks"]


class DeviceHooks:
    """The required and optional methods of a device, with the defaults of the optional ones."""

    kernels: KernelTable
    stream_class: type[Stream] = Stream
    _name: str

    @property
    def name(self) -> str:
        """``<entry-point name>:<id>`` once registered."""
        return self._name

    # --- what an author implements ----------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> Handle:
        """A handle of ``size`` > 0 new bytes, aligned to ``alignment``; raises ``MemoryError`` if there are not
        enough."""
        raise NotImplementedError(f"{type(self).__name__} implements no _alloc")

    def _free(self, mem: Handle) -> None:
        """Free what ``_alloc`` or ``_import_host`` returned. Default: nothing; dropping the handle frees it."""

    def _upload(self, mem: Handle, offset: int, data: memoryview) -> None:
        """Write ``data`` (not empty, within bounds) at byte ``offset``. Complete when it returns."""
        raise NotImplementedError(f"{type(self).__name__} implements no _upload")

    def _download(self, mem: Handle, offset: int, out: memoryview) -> None:
        """Read ``len(out)`` bytes (not 0, within bounds) from byte ``offset``. Complete when it returns."""
        raise NotImplementedError(f"{type(self).__name__} implements no _download")

    # --- what an author may override --------------------------------------------------------------------------------

    def _open(self, **params: Any) -> Stream:
        """A new stream. Default: ``stream_class(self, **params)``."""
        if params and self.stream_class.__init__ is Stream.__init__:
            raise TypeError(f"unknown parameters {sorted(params)}")
        return self.stream_class(self, **params)

    def _probe(self) -> None:
        """Try out the device; raise ``Unavailable`` with cause and remedy if it is present but does not work (a driver
        that does not know the hardware, a library without kernels for it). Default: no check."""

    def _bind_upload(self, mem: Handle, offset: int, data: memoryview) -> Call:
        """A function that calls ``_upload`` and is called many times; it writes what ``data`` holds at that time."""
        return partial(self._upload, mem, offset, data)

    def _bind_download(self, mem: Handle, offset: int, out: memoryview) -> Call:
        """A function that calls ``_download`` and is called many times."""
        return partial(self._download, mem, offset, out)

    def _upload_2d(self, mem: Handle, offset: int, pitch: int, rows: Rows) -> None:
        """Write rows of bytes, row ``i`` at byte ``offset + i * pitch``. Default: by ``_download`` and ``_upload`` of
        the range, or row by row where that is large.

        Args:
            rows: ``uint8`` array of two axes with at least one element. Each row is contiguous; ``rows.strides[0]`` is
                the distance between them in host memory (`flat_rows` gives the bytes from the first to the last one).
        """
        upload_rows(self._upload, self._download, mem, offset, pitch, rows)

    def _download_2d(self, mem: Handle, offset: int, pitch: int, out: Rows) -> None:
        """Read rows of bytes: the counterpart of ``_upload_2d``. Default: by ``_download``."""
        download_rows(self._download, mem, offset, pitch, out)

    def _put(self, mem: Handle, offset: int, dtype: DType, shape: Shape, array: Any, borrowed: bool) -> None:
        """Write a whole dense array, so that a device that keeps arrays need not make one of bytes. Optional, with
        ``_get``.

        Args:
            array: a C-contiguous NumPy array of that dtype and shape (of quantized types the bytes), or an array in
                this device's memory that ``_import_dlpack`` took.
            borrowed: the array stays unchanged until the run for which it is written has ended, and may be used where
                it lies. If not, it may be changed when this returns.
        """
        raise NotImplementedError

    def _get(self, mem: Handle, offset: int, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        """Read a whole dense array, which must not be written: it may show memory of the device."""
        raise NotImplementedError

    def _bind_put(self, mem: Handle, offset: int, dtype: DType, shape: Shape) -> Callable[[Any, bool], None]:
        """A function of ``array`` and ``borrowed`` that calls ``_put`` and is called many times."""
        return partial(self._put, mem, offset, dtype, shape)

    def _bind_get(self, mem: Handle, offset: int, dtype: DType, shape: Shape) -> Callable[[], np.ndarray[Any, Any]]:
        """A function that calls ``_get`` and is called many times."""
        return partial(self._get, mem, offset, dtype, shape)

    def _fill(self, mem: Handle, offset: int, size: int, value: int) -> None:
        """Set ``size`` bytes from ``offset`` on to ``value`` (0 .. 255). Default: by uploads."""
        fill_by_upload(self._upload, mem, offset, size, value)

    def _copy(self, dst: Handle, dst_offset: int, src: Handle, src_offset: int, size: int) -> None:
        """Copy within the device's memory. The ranges may overlap: the result is as if all bytes were read first.
        Default: by way of the host."""
        copy_by_host(self._upload, self._download, dst, dst_offset, src, src_offset, size)

    def _import_host(self, data: memoryview) -> Handle:
        """A handle over host bytes, which stay at their address until ``_free``; ``data`` may be read-only.

        Raises ``UnsupportedOpError`` for bytes that the driver cannot use (alignment, read-only); callers then copy
        them.
        """
        raise NotImplementedError

    def _import_dlpack(self, array: Any) -> tuple[Handle, DType, Shape]:
        """A handle over another library's dense array in this device's memory, valid until ``_free``; dtype and shape
        of the array. The device of the array is ``dlpack_device``."""
        raise UnsupportedOpError(f"{self.name} does not import arrays of other libraries")

    def _export_dlpack(self, mem: Handle, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        """An object with ``__dlpack__`` and ``__dlpack_device__`` over a part of this device's memory, which it keeps
        alive. ``offset`` and ``strides`` are in bytes. Raises ``BufferError`` where that is not possible."""
        raise BufferError(f"{self.name} does not export its memory to other libraries")

    def _map(self, mem: Handle, offset: int, size: int) -> memoryview:
        """Show ``size`` bytes of device memory as host memory until ``_unmap``."""
        raise NotImplementedError

    def _unmap(self, mem: Handle, view: memoryview) -> None:
        """End a mapping. What was written to it is in the device's memory when this returns."""

    def _address(self, mem: Handle) -> int | None:
        """The numeric address of a handle, ``None`` if it has none. Default: that of integers and NumPy arrays.

        Override it if handles are integers that are not addresses.
        """
        if isinstance(mem, int):
            return mem
        if isinstance(mem, np.ndarray):
            return int(mem.__array_interface__["data"][0])
        return None

    def _why_not(self, step: Step) -> str | None:
        """Why the device does not run ``step``, or ``None`` if it does. Default: the answer of the kernel table. Called
        with unbound args, once for each signature."""
        return self.kernels.why_not(step)

    def _why_not_many(self, steps: Sequence[Step]) -> Sequence[str | None]:
        """`_why_not` of many steps at once, for devices where a question takes long. Default: one after the other.

        A device that overrides it is asked about all nodes of a graph at once when the graph is built; it should keep
        what it learns, to answer the single questions that follow.
        """
        return [self._why_not(step) for step in steps]

    def _reads(self, kind: BufferType) -> bool:
        """Whether some kernel reads tensors in ``kind``, which overrides ``_init``. Default: as declared by the kernels
        (``accepts``). Override it together with ``_why_not``, which then decides for each step."""
        return self.kernels.reads(kind)

    def _inplace(self, step: Step) -> bool:
        """Whether the output may be the same memory as a source. Default: as declared by the kernel."""
        kernel = self.kernels.find(step)
        return kernel is not None and kernel.inplace

    def _precision(self, step: Step) -> Precision:
        """The precision in which the device computes ``step``, ``step.precision`` or finer. Default: as declared by the
        kernel. Override it together with ``_why_not``."""
        kernel = self.kernels.find(step)
        return "exact" if kernel is None else kernel.precision

    def _workspace(self, step: Step) -> int:
        """Bytes of scratch memory that the kernel for ``step`` needs while it runs. Default: as declared by the
        kernel."""
        return self.kernels.workspace(step)

    def _offload(self, step: Step) -> bool:
        """Whether ``step`` is so much faster here that its weights should be copied from host memory for each run; see
        `Offloading`."""
        return False

    def _wants(self, step: Step) -> bool:
        """Whether to run ``step`` instead of a device of lower priority that shares the memory, e.g. because the step
        is large."""
        return False
