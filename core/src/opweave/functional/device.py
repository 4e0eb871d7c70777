"""`ArrayDevice`: a device whose memory consists of a library's arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from opweave.contract.memory import Usage
from opweave.contract.step import Arg
from opweave.errors import Broken, UnsupportedOpError, raise_backend_failure
from opweave.functional.memory import ArrayMemory
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import is_dense, nbytes, span
from opweave.runtime.device import Device
from opweave.runtime.host.memory import host_memory_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from opweave.functional.library import ArrayLibrary
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides

__all__ = ["ArrayDevice"]


class ArrayDevice(Device):
    """A device whose memory consists of arrays of a library. Subclass it with a `stream_class` that overrides
    ``_compile_functional``, and with ``_why_not``.

    Attributes:
        library: how to handle the library's arrays.
    """

    library: ArrayLibrary

    def mem_info(self) -> tuple[int, int]:
        """Free and total memory in bytes. Default: the host's; override it where arrays lie elsewhere."""
        return host_memory_info()

    def _library_for(self, dtype: DType) -> ArrayLibrary:
        """The library, after an array of a dtype has once gone there and come back.

        Raises:
            Broken: another array came back.
            ExecutionError: the library failed.
        """
        tried = self.__dict__.setdefault("_tried", set())
        if dtype.numpy not in tried:
            library, there = self.library, np.array([[1, 0]], dtype.numpy)
            what = type(library).__name__
            try:
                back = library.to_host(library.from_host(there.copy(), False))
            except NotImplementedError as error:
                raise Broken(str(error)) from error
            except Exception as error:
                raise_backend_failure(error, self.name, f"converting an array of {there.dtype}")
            if not isinstance(back, ndarray):
                raise Broken(f"to_host of {what} gave {type(back).__name__}, and no NumPy array")
            if back.dtype != there.dtype or back.shape != there.shape or not (back == there).all():
                raise Broken(f"from_host and to_host of {what} made {back.dtype} {back.shape} {back.tolist()} of "
                             f"{there.dtype} {there.shape} {there.tolist()}")  # fmt: skip
            tried.add(dtype.numpy)
        return self.library

    def _alloc(self, size: int, usage: Usage) -> ArrayMemory:
        if not hasattr(self, "library"):
            raise Broken(f"{self.name} has no library: set it to an opweave.functional.ArrayLibrary")
        free, total = self.mem_info()
        if total and size > free:  # arrays take memory only when they are made, too late for this error
            raise MemoryError(f"{free:,} bytes are free")
        return ArrayMemory(size, self.library)

    def _upload(self, mem: ArrayMemory, offset: int, data: memoryview) -> None:
        mem.write(offset, np.array(data))

    def _download(self, mem: ArrayMemory, offset: int, out: memoryview) -> None:
        out[:] = mem.read(offset, len(out)).data

    def _fill(self, mem: ArrayMemory, offset: int, size: int, value: int) -> None:
        mem.write(offset, np.full(size, value, np.uint8))

    def _copy(self, dst: ArrayMemory, dst_offset: int, src: ArrayMemory, src_offset: int, size: int) -> None:
        dst.copy(dst_offset, src, src_offset, size)

    def _put(self, mem: ArrayMemory, offset: int, dtype: DType, shape: Shape, array: Any, borrowed: bool) -> None:
        self._bind_put(mem, offset, dtype, shape)(array, borrowed)

    def _get(self, mem: ArrayMemory, offset: int, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        return self._bind_get(mem, offset, dtype, shape)()

    def _bind_put(self, mem: ArrayMemory, offset: int, dtype: DType, shape: Shape) -> Callable[[Any, bool], None]:
        library, cell = self._library_for(dtype), mem.cell(offset, dtype, shape)

        def put(array: Any, borrowed: bool) -> None:
            array = library.from_host(array, borrowed) if isinstance(array, ndarray) else library.adopt(array)
            if cell.placed:  # without a call, because small functions take little longer than a few calls
                cell.array, cell.borrowed = array, borrowed
            else:
                cell.put(array, borrowed)

        return put

    def _bind_get(
        self, mem: ArrayMemory, offset: int, dtype: DType, shape: Shape
    ) -> Callable[[], np.ndarray[Any, Any]]:
        library, cell = self._library_for(dtype), mem.cell(offset, dtype, shape)

        def get() -> np.ndarray[Any, Any]:
            array = cell.array
            if array is None:
                array = cell.load()
            return array if isinstance(array, ndarray) else library.to_host(array)

        return get

    def _import_dlpack(self, array: Any) -> tuple[ArrayMemory, DType, Shape]:
        try:
            taken = self.library.adopt(array)
        except Exception as error:
            raise UnsupportedOpError(f"{self.name} cannot take this {type(array).__name__}: {error}") from error
        dtype, shape = as_dtype(taken.dtype), tuple(taken.shape)
        mem = ArrayMemory(nbytes(shape, dtype), self.library)
        mem.put(0, dtype, shape, taken, True)
        return mem, dtype, shape

    def _export_dlpack(self, mem: ArrayMemory, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        if not is_dense(shape, strides, dtype):
            flat = mem.get(offset, dtype, (span(shape, strides, dtype) // dtype.itemsize,))
            return self.library.copy(self.library.window(flat, Arg(None, 0, dtype, shape, strides)))
        cell = mem.cell(offset, dtype, shape)
        array = cell.owned()  # a copy of a fed array, which its caller may change after the run
        cell.borrowed = True
        return array
