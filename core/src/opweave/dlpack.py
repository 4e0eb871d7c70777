"""DLPack: arrays of other libraries as leaves, without copying.

In the other direction nothing is needed here: results are NumPy arrays, which implement DLPack, and so do leaves that
have memory (`Tensor.__dlpack__`).
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import ml_dtypes
import numpy as np

from opweave import registry
from opweave.contract.space import Usage
from opweave.errors import DTypeError, Unavailable
from opweave.graph.leaf import Leaf, Location
from opweave.graph.tensor import Tensor, constant, new_leaf

__all__ = ["from_dlpack", "host_view"]

HOST_TYPES: Final = frozenset({1, 3, 11, 13})
"""Types of DLPack devices whose memory the process reads: the CPU's, pinned for CUDA and ROCm, managed by CUDA."""

BFLOAT: Final = 4


def from_dlpack(array: Any, *, name: str = "dlpack") -> Tensor:
    """A read-only leaf over the memory of another library's array, with its shape and dtype.

    A host array becomes a constant that uses the same memory; do not change it while programs use it. If it is not
    dense it is copied. An array in the memory of a device becomes a weight on that device, if a backend offers the
    device and imports its arrays. PyTorch tensors that require a gradient are detached.

    Args:
        array: an object with ``__dlpack__`` and ``__dlpack_device__``: of NumPy, PyTorch, JAX, CuPy, ...
        name: name of the leaf.

    Raises:
        DTypeError: the object does not implement DLPack, or has a dtype that opweave does not have.
        Unavailable: no backend offers the device of the array.
        UnsupportedOpError: the device cannot import an array with this layout.
    """
    array = _detached(array)
    try:
        kind, number = (int(part) for part in array.__dlpack_device__())
    except (TypeError, AttributeError, BufferError, ValueError) as error:
        raise DTypeError(f"cannot take {type(array).__name__} by DLPack: {error}") from None
    if kind in HOST_TYPES:
        view = host_view(array)
        view.flags.writeable = False
        return constant(view, name=name)
    for device in registry.devices():
        if device.dlpack_device == (kind, number):
            buffer, dtype, shape = device.import_dlpack(array)
            buffer.usage = Usage.WEIGHTS
            leaf = Leaf("weight", name)
            leaf.placement, leaf.device = Location(buffer, 0), device.name
            return new_leaf(leaf, shape, dtype)
    raise Unavailable(
        f"no installed backend offers the device of this {type(array).__name__} (DLPack device {kind}, {number})",
        remedy="install the backend of that device, e.g. opweave-torch, or copy the array to the host first",
    )


def host_view(array: Any) -> np.ndarray[Any, Any]:
    """A new NumPy array object over the memory of another library's host array. Making it read-only does not affect the
    original.

    Raises:
        DTypeError: the array is not on the host, or has a dtype that NumPy and `ml_dtypes` do not have.
    """
    array = _detached(array)
    try:
        return np.from_dlpack(array).view()
    except (TypeError, AttributeError, BufferError, RuntimeError, ValueError) as error:
        try:
            return _bf16_view(array)
        except (TypeError, AttributeError, BufferError, RuntimeError, ValueError):
            raise DTypeError(f"cannot take {type(array).__name__} by DLPack: {error}") from None


def _detached(array: Any) -> Any:
    """A PyTorch tensor that requires a gradient refuses to export its memory; its ``detach()`` does not."""
    return array.detach() if getattr(array, "requires_grad", False) else array


# --- bf16, which numpy.from_dlpack does not support
# --------------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("targets", ctypes.c_uint16))


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
    if (found.dtype.code, found.dtype.bits, found.dtype.targets) != (BFLOAT, 16, 1):
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
