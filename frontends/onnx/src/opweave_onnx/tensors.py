"""`Arrays`: the tensors of an ONNX file as NumPy arrays, whose sizes are checked before they are used."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import SparseTensorProto, TensorProto
from onnx import numpy_helper as helper
from onnx.helper import tensor_dtype_to_np_dtype

from opweave.errors import DTypeError, FormatError
from opweave.formats.tensor_file import map_file
from opweave.graph.dtypes import DType, as_dtype

__all__ = ["Array", "Arrays", "dtype_of", "elem_of", "numpy_of"]

Array = np.ndarray[Any, Any]

BITS: Final = {
    TensorProto.UINT4: 4, TensorProto.INT4: 4, TensorProto.FLOAT4E2M1: 4, TensorProto.UINT2: 2, TensorProto.INT2: 2,
}  # fmt: skip
"""Bits of an element, for types of which one byte holds several elements."""
LARGEST: Final = 1 << 62


def numpy_of(elem: int, what: str = "a value") -> np.dtype[Any]:
    """The NumPy type of an element type of ONNX. Raises `DTypeError` for texts and complex numbers, `FormatError` for a
    number that is no type."""
    try:
        name = TensorProto.DataType.Name(elem)
    except ValueError:
        raise FormatError(f"{what} has the element type {elem}, which ONNX does not have") from None
    if elem in (TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128, TensorProto.UNDEFINED):
        raise DTypeError(f"{what} is of {name.lower()}, which opweave does not have")
    dtype: np.dtype[Any] = np.dtype(tensor_dtype_to_np_dtype(elem))
    return dtype


def dtype_of(elem: int, what: str = "a value") -> DType:
    """The dtype of an element type of ONNX; raises as `numpy_of`."""
    return as_dtype(numpy_of(elem, what))


def elem_of(dtype: Any) -> int:
    """The number of the element type of ONNX for a NumPy type."""
    from onnx.helper import np_dtype_to_tensor_dtype

    return int(np_dtype_to_tensor_dtype(np.dtype(dtype)))


class Arrays:
    """Reads tensors of one file.

    Attributes:
        where: the file, for messages.
        folder: the folder in which external data must be; ``None`` for a model that was not loaded from a file.
    """

    def __init__(self, where: str, folder: Path | None) -> None:
        self.where: Final = where
        self.folder: Final = folder
        self._mapped: Final[dict[Path, Any]] = {}

    def read(self, proto: TensorProto, what: str) -> Array:
        """The array of a tensor: read-only, over the bytes of the file where the format allows it.

        Raises:
            FormatError: dims that do not fit the bytes, external data outside of the folder or of the file.
            DTypeError: texts, complex numbers.
        """
        label = f"{self.where}: {what}"
        dims = tuple(proto.dims)
        if any(n < 0 for n in dims) or prod(n for n in dims if n) > LARGEST:
            raise FormatError(f"{label} has the shape {list(dims)}, which no memory holds")
        if proto.data_type == TensorProto.STRING:
            raise DTypeError(f"{label} consists of texts, which opweave does not compute with")
        dtype = numpy_of(proto.data_type, label)
        size = prod(dims)
        wanted = (size * BITS.get(proto.data_type, dtype.itemsize * 8) + 7) // 8
        if proto.data_location == TensorProto.EXTERNAL:
            raw = self._external(proto, wanted, label)
        elif proto.HasField("raw_data"):
            raw = np.frombuffer(proto.raw_data, np.uint8)
        else:
            return self._typed(proto, dims, size, label)
        if raw.size != wanted:
            raise FormatError(f"{label} of {dtype}{list(dims)} takes {wanted:,} bytes, not {raw.size:,}")
        if proto.data_type in BITS:
            part = TensorProto()
            part.CopyFrom(proto)
            part.data_location = TensorProto.DEFAULT
            part.raw_data = raw.tobytes()
            return self._frozen(np.asarray(helper.to_array(part)))
        array = raw.view(dtype.newbyteorder("<") if dtype.kind in "iuf" else dtype).reshape(dims)
        if dtype == np.bool_ and raw.size and raw.max() > 1:
            raise FormatError(f"{label} is bool, but has bytes other than 0 and 1")
        return array if array.flags.aligned else self._frozen(array.copy())

    def _typed(self, proto: TensorProto, dims: tuple[int, ...], size: int, label: str) -> Array:
        """A tensor whose elements are numbers of the message."""
        fields = (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
        there = max(len(f) for f in fields)
        packed = 8 // BITS.get(proto.data_type, 8)
        if there not in (size, -(-size // packed)):
            raise FormatError(f"{label} has the shape {list(dims)}, but {there:,} elements")
        try:
            return self._frozen(np.asarray(helper.to_array(proto)).reshape(dims))
        except Exception as error:  # whatever a damaged message makes the converter raise
            raise FormatError(f"{label} cannot be read: {error}") from None

    def _external(self, proto: TensorProto, wanted: int, label: str) -> Array:
        entries = {e.key: e.value for e in proto.external_data}
        location = entries.get("location", "")
        if self.folder is None:
            raise FormatError(f"{label} lies in another file, {location!r}, but the model was not loaded from a file")
        folder = self.folder.resolve()
        path = (folder / location).resolve() if location and "\0" not in location else folder
        if not path.is_relative_to(folder) or path == folder:
            raise FormatError(f"{label} lies in {location!r}, outside of the model's folder; it is not read")
        if not path.is_file():
            raise FormatError(f"{label} lies in {location!r}, which is not in the model's folder")
        try:
            start, length = int(entries.get("offset") or 0), int(entries.get("length") or wanted)
        except ValueError:
            raise FormatError(f"{label}: offset and length of its external data are no numbers") from None
        if path not in self._mapped:
            self._mapped[path] = map_file(path)
        data = self._mapped[path]
        if start < 0 or length < 0 or start + length > data.size:
            raise FormatError(f"{label}: {length:,} bytes from {start:,} are beyond the end of {location!r}")
        return np.asarray(data[start : start + length])

    def read_sparse(self, proto: SparseTensorProto) -> Array:
        """A sparse tensor as a dense one. Raises `FormatError` for indices that do not fit, or more than 2^28
        elements."""
        values, indices = self.read(proto.values, "a sparse tensor"), self.read(proto.indices, "its indices")
        dims = tuple(proto.dims)
        if any(n < 0 for n in dims) or prod(dims) > 1 << 28:
            raise FormatError(f"{self.where}: a sparse tensor has the shape {list(dims)}")
        flat = indices if indices.ndim == 1 else (indices * np.cumprod([*dims[1:], 1][::-1])[::-1]).sum(-1)
        if (
            values.ndim != 1
            or flat.shape != values.shape
            or (flat.size and not 0 <= flat.min() <= flat.max() < prod(dims))
        ):
            raise FormatError(f"{self.where}: the indices of a sparse tensor do not fit its shape {list(dims)}")
        result = np.zeros(prod(dims), values.dtype)
        result[flat] = values
        return self._frozen(result.reshape(dims))

    @staticmethod
    def _frozen(array: Array) -> Array:
        array.flags.writeable = False
        return array
