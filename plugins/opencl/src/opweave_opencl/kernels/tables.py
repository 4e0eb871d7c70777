"""Tables that the host computes, where f32 on the device is too coarse; calls share the memory of equal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from opweave.contract import Arg, Buffer, Call
from opweave.graph.dtypes import as_dtype

if TYPE_CHECKING:
    from opweave_opencl.device import OpenCLDevice
    from opweave_opencl.stream import OpenCLStream

__all__ = ["keep", "table", "turns"]

_TABLES: Final[WeakKeyDictionary[OpenCLDevice, WeakValueDictionary[bytes, Buffer]]] = WeakKeyDictionary()


def table(stream: OpenCLStream, values: np.ndarray[Any, Any]) -> Arg:
    """The values (f32 or i32) in the device's memory, which equal tables share; `keep` them with the call."""
    known = _TABLES.setdefault(stream.target, WeakValueDictionary())
    data = np.ascontiguousarray(values)
    key = data.dtype.char.encode() + data.tobytes()
    buffer = known.get(key)
    if buffer is None:
        buffer = stream.target.alloc(data.nbytes)
        buffer.upload(0, data)
        known[key] = buffer
    return Arg(buffer, 0, as_dtype(data.dtype), data.shape, data.strides)


def keep(call: Call, *tables: Arg) -> Call:
    """``call``, which keeps the buffers of its tables alive from here on."""
    vars(call)["tables"] = [t.buffer for t in tables]
    return call


def turns(angles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Angles in turns (of 2 pi), each the sum of two f32: what ``turning.cl`` multiplies by a position."""
    exact = np.asarray(angles, np.float64) / (2 * np.pi)
    high = exact.astype(np.float32)
    return np.stack([high, (exact - high).astype(np.float32)])
