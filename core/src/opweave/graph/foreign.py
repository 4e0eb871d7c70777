"""Arrays of other libraries in host memory as NumPy arrays, without copying, by DLPack."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import ml_dtypes
import numpy as np

from opweave.errors import DTypeError

__all__ = ["Symbolic", "detached", "dlpack_device", "host_view", "is_foreign", "is_on_host"]

HOST_TYPES: Final = frozenset({1, 3, 11, 13})
"""Types of DLPack devices whose memory the process reads: the CPU's, pinned for CUDA and ROCm, managed by CUDA."""

BFLOAT: Final = 4

_REFUSED: Final = (TypeError, AttributeError, BufferError, RuntimeError, ValueError)
"""What libraries raise where they do not export an array."""


class Symbolic:
    """What is no array although its memory may be exported: the base of tensors."""

    __slots__ = ()


def is_foreign(value: object) -> bool:
    """Whether ``value`` is an array of another library than NumPy that can be shared by DLPack."""
    return not isinstance(value, (np.ndarray, Symbolic)) and hasattr(value, "__dlpack__")


def detached(array: Any) -> Any:
    """``array``, or its ``detach()``: a PyTorch tensor that requires a gradient refuses to export its memory."""
    return array.detach() if getattr(array, "requires_grad", False) else array


def dlpack_device(array: Any) -> tuple[int, int]:
    """The type and the number of the device that holds an array; raises `DTypeError` if the array has none."""
    try:
        kind, number = array.__dlpack_device__()
        return int(kind), int(number)
    except _REFUSED as error:
        raise DTypeError(f"cannot take {type(array).__name__} by DLPack: {error}") from None


def is_on_host(device: tuple[int, int]) -> bool:
    """Whether the process reads the memory of a DLPack device."""
    return device[0] in HOST_TYPES


def host_view(array: Any) -> np.ndarray[Any, Any]:
    """A new NumPy array object over the memory of another library's host array. Making it read-only does not affect the
    original. PyTorch tensors that require a gradient are detached.

    Raises:
        DTypeError: the array is not on the host, or has a dtype that NumPy and `ml_dtypes` do not have.
    """
    if isinstance(array, np.ndarray):
        return array.view()  # NumPy does not export those of `ml_dtypes`
    array = detached(array)
    device = dlpack_device(array)
    if not is_on_host(device):
        raise DTypeError(
            f"this {type(array).__name__} is in the memory of another device (DLPack device {device[0]}, {device[1]}); "
            "copy it to the host first, or use it in place with ow.from_dlpack or ow.weights"
        )
    try:
        return np.from_dlpack(array).view()
    except _REFUSED as error:
        try:
            return _bf16_view(array)
        except _REFUSED:
            raise DTypeError(f"cannot take {type(array).__name__} by DLPack: {error}") from None


# --- bf16, which numpy.from_dlpack does not support -----------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; NULL: dense
        ("byte_offset", ctypes.c_uint64),
    )


def _bf16_view(array: Any) -> np.ndarray[Any, Any]:
    capsule = array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    found = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    if (found.dtype.code, found.dtype.bits, found.dtype.lanes) != (BFLOAT, 16, 1):
        raise BufferError("not bf16")
    dtype = np.dtype(ml_dtypes.bfloat16)
    shape = tuple(found.shape[: found.ndim])
    if not found.data or 0 in shape:
        return np.empty(shape, dtype)
    steps = None if not found.strides else tuple(step * dtype.itemsize for step in found.strides[: found.ndim])
    if steps is not None and min(steps, default=0) < 0:
        raise BufferError("negative strides")
    span = dtype.itemsize * int(np.prod(shape)) if steps is None else dtype.itemsize
    if steps is not None:
        span += sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
    window = (ctypes.c_uint8 * span).from_address(found.data + found.byte_offset)
    window.capsule = capsule  # keeps the memory alive as long as the array
    return np.ndarray(shape, dtype, window, 0, steps)
