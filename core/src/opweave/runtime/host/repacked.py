"""`RepackedType`: memory that keeps each tensor as an object that an author's function makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract.memory import Usage
from opweave.errors import LayoutError
from opweave.runtime.host.reservations import RESERVATIONS
from opweave.runtime.memory import BufferType

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.tensor import Tensor

__all__ = ["Repacked", "RepackedType"]


class Repacked:
    """One tensor in memory of a `RepackedType`; kernels get it as ``Arg.handle``.

    Attributes:
        dtype, shape: of the tensor.
        value: what ``_pack`` made of it, ``None`` before its first upload. Kernels read it in each run, because a later
            upload puts another one there.
    """

    __slots__ = ("dtype", "shape", "value")

    def __init__(self, dtype: DType, shape: Shape) -> None:
        self.dtype: Final = dtype
        self.shape: Final = shape
        self.value: Any = None


class _Store:
    """The handle of a buffer: the tensors that were prepared in it, by offset, and its bytes as they are counted."""

    __slots__ = ("size", "tensors")

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self.tensors: dict[int, Repacked] = {}


class RepackedType(BufferType):
    """Memory for weights in a form that kernels are faster with: packed by a library, or decoded from blocks.

    A subclass implements ``_pack`` and ``_unpack``, says with ``alloc_size`` what a packed tensor takes, with
    ``_why_not`` which tensors it keeps, and with ``_pays`` where the scheduler should keep weights in it by itself.
    Kernels declare it with ``accepts=``. The objects that ``_pack`` returns take the memory; it counts as allocated on
    the host from ``alloc`` to ``free``.
    """

    usages = frozenset({Usage.WEIGHTS})

    def _pack(self, data: np.ndarray[Any, Any], dtype: DType, shape: Shape) -> Any:
        """The packed form of a tensor, which must not show the memory of ``data``: read-only ``uint8``, its dense
        bytes."""
        raise NotImplementedError(f"{type(self).__name__} implements no _pack")

    def _unpack(self, packed: Any, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        """The dense bytes of a tensor, bit for bit those that ``_pack`` got, as a contiguous array of any dtype."""
        raise NotImplementedError(f"{type(self).__name__} implements no _unpack")

    # --- what follows from these ------------------------------------------------------------------------------------

    @property
    def is_raw(self) -> bool:
        return False

    def _alloc(self, size: int, usage: Usage) -> _Store:
        RESERVATIONS.reserve(size)
        return _Store(size)

    def _free(self, mem: _Store) -> None:
        mem.tensors.clear()
        RESERVATIONS.release(mem.size)

    def _init(self, mem: _Store, offset: int, tensor: Tensor) -> Repacked:
        made = mem.tensors[offset] = Repacked(tensor.dtype, tensor.shape)
        return made

    def _reset(self, mem: _Store) -> None:
        mem.tensors.clear()

    def _upload(self, mem: _Store, offset: int, data: memoryview) -> None:
        tensor = self._at(mem, offset)
        tensor.value = self._pack(np.frombuffer(data, np.uint8), tensor.dtype, tensor.shape)

    def _download(self, mem: _Store, offset: int, out: memoryview) -> None:
        tensor = self._at(mem, offset)
        if tensor.value is None:
            raise LayoutError(f"the tensor at byte {offset:,} of {self.name} was never written")
        out[:] = self._unpack(tensor.value, tensor.dtype, tensor.shape).reshape(-1).view(np.uint8).data

    def _fill(self, mem: _Store, offset: int, size: int, value: int) -> None:
        """Does nothing: there are no bytes outside of tensors, and `Buffer.fill` writes those of tensors."""

    def _address(self, mem: _Store) -> None:
        return None

    def _at(self, mem: _Store, offset: int) -> Repacked:
        found = mem.tensors.get(offset)
        if found is None:
            raise LayoutError(f"no tensor was prepared at byte {offset:,} of {self.name}; see Buffer.init")
        return found
