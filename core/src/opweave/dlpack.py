"""DLPack: arrays of other libraries as leaves, without copying.

In the other direction nothing is needed here: results are NumPy arrays, which implement DLPack, and so do leaves that
have memory (`Tensor.__dlpack__`).
"""

from __future__ import annotations

from typing import Any

from opweave import registry
from opweave.contract.memory import Usage
from opweave.errors import Unavailable
from opweave.graph.foreign import detached, dlpack_device, host_view, is_on_host
from opweave.graph.leaf import Leaf, Location
from opweave.graph.tensor import Tensor, constant, new_leaf

__all__ = ["from_dlpack"]


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
    array = detached(array)
    where = dlpack_device(array)
    if is_on_host(where):
        view = host_view(array)
        view.flags.writeable = False
        return constant(view, name=name)
    for device in registry.devices():
        if device.dlpack_device == where:
            buffer, dtype, shape = device.import_dlpack(array)
            buffer.usage = Usage.WEIGHTS
            leaf = Leaf("weight", name)
            leaf.placement, leaf.device = Location(buffer, 0), device.name
            return new_leaf(leaf, shape, dtype)
    raise Unavailable(
        f"no installed backend offers the device of this {type(array).__name__} (DLPack device {where[0]}, {where[1]})",
        remedy="install the backend of that device, e.g. opweave-torch, or copy the array to the host first",
    )
