"""`Blocks`: a quantized array, as callers pass it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType, DTypeLike, as_dtype
from opweave.graph.layout import Shape, check_shape, nbytes

__all__ = ["Blocks", "checked_blocks"]


class Blocks(NamedTuple):
    """A quantized array.

    Attributes:
        data: the bytes in the GGUF layout of ``dtype``, ``uint8``.
        shape: in elements.
        dtype: a quantized `DType` or its name.
    """

    data: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    dtype: DTypeLike

    def __repr__(self) -> str:
        return f"<Blocks {self.dtype}{list(self.shape)}, {np.asarray(self.data).nbytes:,} bytes>"


def checked_blocks(blocks: Blocks, what: str) -> tuple[np.ndarray[Any, Any], Shape, DType]:
    """The bytes of a quantized array, dense and with the last axis in bytes, its shape and its dtype.

    Args:
        what: the array, as messages name it.

    Raises:
        DTypeError, UnknownNameError: ``dtype`` is no quantized type.
        LayoutError: rows that do not consist of whole blocks.
        ShapeError: more than 8 axes or a negative length; ``data`` is not ``uint8``, or not as many bytes as the shape
            takes.
    """
    dtype = as_dtype(blocks.dtype)
    if not dtype.is_quantized:
        raise DTypeError(f"{what}: Blocks are of a quantized type, not {dtype}; pass the array itself")
    shape = check_shape(blocks.shape, dtype)
    data = np.ascontiguousarray(blocks.data)
    if data.dtype != np.uint8 or data.size != nbytes(shape, dtype):
        raise ShapeError(
            f"{what}: {dtype}{list(shape)} takes {nbytes(shape, dtype):,} bytes, not {data.size:,} of {data.dtype}"
        )
    return data.reshape(*shape[:-1], dtype.row_bytes(shape[-1])), shape, dtype
