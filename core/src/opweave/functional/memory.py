"""`ArrayMemory`: memory of a device that consists of a library's arrays, as a map from byte ranges to arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import numpy as np

from opweave.concurrency import Lock
from opweave.graph.layout import array_shape, nbytes

if TYPE_CHECKING:
    from opweave.functional.library import ArrayLibrary
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape

__all__ = ["ArrayMemory", "Cell"]

Array = np.ndarray[Any, Any]


class Cell:
    """A place in an `ArrayMemory` for one dense array.

    Attributes:
        offset, end: its bytes.
        shape: of the array.
        dtype: of the array; ``None`` for bytes that came from the host and are not an array of the library yet.
        array: what lies there; ``None``: other arrays lie there, or nothing.
        placed: no other cell has any of these bytes.
        borrowed: somebody outside of this memory has the array too: the caller of a run, or who was given a result. It
            must not be donated.
    """

    __slots__ = ("__weakref__", "array", "borrowed", "dtype", "end", "memory", "offset", "placed", "shape")

    def __init__(self, memory: ArrayMemory, offset: int, dtype: DType | None, shape: Shape) -> None:
        self.memory: Final = memory
        self.offset: Final = offset
        self.end: Final = offset + (shape[0] if dtype is None else nbytes(shape, dtype))
        self.dtype: Final = dtype
        self.shape: Final = shape
        self.array: Any = None
        self.placed = self.borrowed = False

    def load(self) -> Any:
        """The array, made of whatever lies in these bytes."""
        return self.array if self.array is not None else self.memory.load(self)

    def put(self, array: Any, borrowed: bool = False) -> None:
        """Let ``array`` lie there. Nothing is copied."""
        self.borrowed = borrowed
        if self.placed:
            self.array = array
        else:
            self.memory._fill(self, array)

    def owned(self) -> Any:
        """The array, or a copy of it if somebody else has it."""
        array = self.load()
        return self.memory.library.copy(array) if self.borrowed else array


class ArrayMemory:
    """``size`` bytes of memory that hold arrays of a library: the handle of an `ArrayDevice`'s buffer.

    An array is put at an offset and taken from there as it is. Reading other bytes than were put, or in another dtype,
    works too; then the bytes go through the host. Bytes that were never written are zeros.

    Threads: several may use one memory, never the same bytes of it at once.
    """

    __slots__ = ("__weakref__", "_cells", "_lock", "_placed", "library", "size")

    def __init__(self, size: int, library: ArrayLibrary) -> None:
        self.size: Final = size
        self.library: Final = library
        self._lock: Final = Lock()
        self._placed: Final[dict[int, Cell]] = {}  # what lies or lay here; no two overlap
        self._cells: Final[WeakValueDictionary[tuple[int, DType | None, Shape], Cell]] = WeakValueDictionary()

    # --- arrays -----------------------------------------------------------------------------------------------------

    def cell(self, offset: int, dtype: DType | None, shape: Shape) -> Cell:
        """The place for an array at byte ``offset``; the same object as long as somebody keeps it."""
        key = (offset, dtype, shape)
        found = self._cells.get(key)
        if found is None:
            found = self._cells.setdefault(key, Cell(self, offset, dtype, shape))
        return found

    def zeros(self, dtype: DType, shape: Shape) -> Any:
        """A new array of zeros, which is not put into this memory."""
        return self.library.from_host(np.zeros(array_shape(shape, dtype), dtype.numpy), True)

    def put(self, offset: int, dtype: DType, shape: Shape, array: Any, borrowed: bool = False) -> None:
        """Let ``array`` lie at byte ``offset``, in place of what lay there. Nothing is copied."""
        self.cell(offset, dtype, shape).put(array, borrowed)

    def get(self, offset: int, dtype: DType, shape: Shape) -> Any:
        """The array at byte ``offset``."""
        return self.cell(offset, dtype, shape).load()

    def load(self, cell: Cell) -> Any:
        with self._lock:
            there = self._overlapping(cell.offset, cell.end)
            dtype = cell.dtype
            assert dtype is not None
            alike = len(there) == 1 and (there[0].offset, there[0].end) == (cell.offset, cell.end)
            if alike and there[0].dtype is dtype:
                array = self.library.reshape(there[0].array, array_shape(cell.shape, dtype))
            else:
                data = self._bytes(cell.offset, cell.end, there)
                host = data.view(dtype.numpy).reshape(array_shape(cell.shape, dtype))
                array = self.library.from_host(host, False)  # on the device: mostly a weight, read by every run
            # An array that reaches beyond these bytes is kept whole, because it will be read again.
            if all(cell.offset <= other.offset and other.end <= cell.end for other in there):
                cell.borrowed = any(other.borrowed for other in there)
                self._clear(cell.offset, cell.end)
                self._enter(cell, array)
            return array

    def _fill(self, cell: Cell, array: Any) -> None:
        with self._lock:
            self._clear(cell.offset, cell.end)
            self._enter(cell, array)

    def _enter(self, cell: Cell, array: Any) -> None:
        if cell.end > cell.offset:
            cell.array, cell.placed = array, True
            self._placed[id(cell)] = cell

    # --- bytes ------------------------------------------------------------------------------------------------------

    def read(self, offset: int, size: int) -> Array:
        """A ``uint8`` array of the bytes, which nobody writes: it may show memory of the library."""
        with self._lock:
            return self._bytes(offset, offset + size, self._overlapping(offset, offset + size))

    def write(self, offset: int, data: Array) -> None:
        """Let the bytes of a NumPy array lie at byte ``offset``. It belongs to this memory from here on."""
        self.cell(offset, None, (data.nbytes,)).put(data.reshape(-1).view(np.uint8))

    def copy(self, offset: int, source: ArrayMemory, source_offset: int, size: int) -> None:
        """Copy bytes; the ranges may overlap. A whole array is copied by the library."""
        end = source_offset + size
        with source._lock:
            there = source._overlapping(source_offset, end)
            whole = len(there) == 1 and (there[0].offset, there[0].end) == (source_offset, end)
            dtype = there[0].dtype if whole else None
            if dtype is not None:
                array = source.library.copy(there[0].array)
            else:
                array = np.array(source._bytes(source_offset, end, there))
        if dtype is None:
            self.write(offset, array)
        else:
            self.put(offset, dtype, there[0].shape, array)

    def _overlapping(self, start: int, end: int) -> list[Cell]:
        """The cells with arrays that have some of these bytes."""
        return [cell for cell in self._sharing(start, end) if cell.array is not None]

    def _sharing(self, start: int, end: int) -> list[Cell]:
        return [cell for cell in list(self._placed.values()) if cell.offset < end and start < cell.end]

    def _bytes(self, start: int, end: int, there: list[Cell]) -> Array:
        if len(there) == 1 and there[0].offset <= start and end <= there[0].end:
            return self._bytes_of(there[0])[start - there[0].offset : end - there[0].offset]
        result = np.zeros(end - start, np.uint8)
        for cell in there:
            first, last = max(start, cell.offset), min(end, cell.end)
            result[first - start : last - start] = self._bytes_of(cell)[first - cell.offset : last - cell.offset]
        return result

    def _bytes_of(self, cell: Cell) -> Array:
        array = cell.array if isinstance(cell.array, np.ndarray) else self.library.to_host(cell.array)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _clear(self, start: int, end: int) -> None:
        """Remove the arrays that have some of these bytes; of those that reach beyond them, the rest stays as host
        bytes."""
        for cell in self._sharing(start, end):
            pieces = [(at, to) for at, to in ((cell.offset, start), (end, cell.end)) if at < to]
            data = self._bytes_of(cell) if pieces and cell.array is not None else None
            del self._placed[id(cell)]
            cell.array, cell.placed = None, False
            if data is not None:
                for at, to in pieces:
                    kept = self.cell(at, None, (to - at,))
                    self._enter(kept, np.array(data[at - cell.offset : to - cell.offset]))
