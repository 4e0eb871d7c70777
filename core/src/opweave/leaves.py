"""Leaves with memory: `weights`, which nodes read, and `state`, which nodes also write.

Both may be placed on a device by name. If they are not, the first program that uses them places them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from opweave import registry
from opweave.contract.buffer import Buffer
from opweave.contract.device import Device
from opweave.contract.memory import BufferType
from opweave.contract.multibuffer import MultiBuffer
from opweave.contract.space import CHANGES, Usage
from opweave.contract.step import Arg
from opweave.errors import (
    AllocationError,
    DTypeError,
    ExecutionError,
    SchedulerError,
    ShapeError,
    UnknownNameError,
    UnsupportedOpError,
)
from opweave.graph.arrays import host_array
from opweave.graph.blocks import Blocks, checked_blocks
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, f32
from opweave.graph.foreign import is_foreign
from opweave.graph.layout import check_shape
from opweave.graph.leaf import Leaf, Location, Placement, Spec
from opweave.graph.tensor import Tensor, new_leaf
from opweave.host.storage import array_shape, dense_arg, read, write

__all__ = ["Blocks", "Weights", "place", "read_leaf", "state", "upload", "weights", "write_state"]

Where = str | Device | None


class Weights(Mapping[str, Tensor]):
    """Read-only tensors by name, which share buffers. Made by `weights` and `opweave.load_weights`.

    Attributes:
        metadata: what the files that they were loaded from say beside the tensors; empty for weights made of arrays.
        buffers: the memory of the placed ones; one per device, in parts if it exceeds the largest buffer.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.metadata: Mapping[str, Any] = {}
        self.buffers: list[Buffer | MultiBuffer] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # With values, in the memory of the host: buffers belong to this process.
        return _restore_weights, (self._tensors, dict(self.metadata))

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise UnknownNameError("weight", str(name), self._tensors) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())

    def __repr__(self) -> str:
        return f"<Weights: {len(self)} tensors, {self.nbytes:,} bytes>"


def _restore_weights(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Weights:
    group = Weights(tensors)
    group.metadata = metadata
    return group


def weights(
    arrays: Mapping[str, Any], device: Where | Mapping[str, Where] = None, *, dtype: DTypeLike | None = None
) -> Weights:
    """Read-only leaves for a model's parameters.

    Args:
        arrays: name -> array, also of another library (``dict(module.named_parameters())`` of PyTorch), `Blocks`
            (quantized), what `opweave.from_dlpack` made, or `Spec` (shape and dtype only, to plan without bytes).
            Arrays are not copied and must not be changed afterwards.
        device: where to keep them: a device or its name for all; or a mapping of glob patterns to devices, of which
            the first match counts. Weights without a device are uploaded once to each device where programs use them;
            devices that share host memory use them in place.
        dtype: convert floating-point arrays to this float type; ``"bf16"`` halves the memory of f32. (To compute
            products in bf16 with weights and inputs in f32, see ``precision`` of `opweave.Scheduler`.)

    Raises:
        UnknownNameError: no such device, or a pattern that matches no name.
        DTypeError: a dtype that opweave does not have, or values that are not arrays.
        LayoutError: rows that do not consist of whole blocks.
        ShapeError: `Blocks` whose number of bytes does not fit their shape.
        AllocationError: a device has not enough free memory; nothing stays allocated.
    """
    if not isinstance(arrays, Mapping):
        raise DTypeError(f"weights are made from a mapping of names to arrays, not of {type(arrays).__name__}")
    group, token = Weights({}), object()
    narrow = None if dtype is None else as_dtype(dtype)
    if narrow is not None and not narrow.is_float:
        raise DTypeError(f"dtype is a float type, to which floating-point arrays are converted, not {narrow}")
    for name, given in arrays.items():
        value = _unwrapped(str(name), given)
        if narrow is not None and isinstance(value, Tensor) and value.dtype.is_float:
            value = read_leaf(value)  # from its device
        if narrow is not None and isinstance(value, np.ndarray) and as_dtype(value.dtype).is_float:
            value = value.astype(narrow.numpy, copy=False)
        group._tensors[str(name)] = _weight(str(name), value, token)
    placement = device if isinstance(device, Mapping) else {"*": device}
    by_device: dict[Device, list[Tensor]] = {}
    matched: set[str] = set()
    targets = {pattern: _resolve(where) for pattern, where in placement.items()}
    for name, tensor in group._tensors.items():
        for pattern, target in targets.items():
            if fnmatchcase(name, pattern):
                matched.add(pattern)
                if target is not None:
                    by_device.setdefault(target, []).append(tensor)
                break
    if isinstance(device, Mapping):
        for pattern in targets:
            if pattern not in matched and not any(fnmatchcase(name, pattern) for name in group):
                raise UnknownNameError("weight", pattern, group, "It is a pattern of device=, and matches none.")
    try:
        for target, tensors in by_device.items():
            group.buffers += upload([t for t in tensors if _needs_upload(t, target)], target)
    except BaseException:
        for buffer in group.buffers:
            buffer.free()
        raise
    return group


def _unwrapped(name: str, value: Any) -> Any:
    """A weight's value in a form that `_weight` accepts: converts arrays of other libraries, and leaves made of
    them."""
    if is_foreign(value) and not isinstance(value, Tensor):
        from opweave.dlpack import from_dlpack

        value = from_dlpack(value, name=name)
    if not isinstance(value, Tensor):
        return value
    leaf = value.leaf
    if leaf is None or leaf.kind not in ("constant", "weight") or (leaf.data is None and leaf.placement is None):
        raise DTypeError(f"weight {name!r} is {value.describe()}; weights are made from arrays")
    if leaf.data is None:
        return value  # in the memory of a device
    return leaf.data if value.dtype.block == 1 else Blocks(leaf.data, value.shape, value.dtype)


def _needs_upload(tensor: Tensor, device: Device) -> bool:
    """Whether a weight has to be uploaded to ``device``. One on another device is first downloaded to the host."""
    leaf = tensor.leaf
    assert leaf is not None
    if leaf.placement is None:
        return True
    if leaf.placement.buffer.device is device:
        return False
    leaf.data, leaf.placement = read_leaf(tensor), None
    return True


def _weight(name: str, value: Any, group: object) -> Tensor:
    if isinstance(value, Tensor):
        assert value.leaf is not None
        leaf = Leaf("weight", name, device=value.leaf.device, group=group)
        leaf.placement = value.leaf.placement
        return new_leaf(leaf, value.shape, value.dtype)
    if isinstance(value, Spec):
        dtype = as_dtype(value.dtype)
        return new_leaf(Leaf("weight", name, group=group), check_shape(value.shape, dtype), dtype)
    if isinstance(value, Blocks):
        data, shape, dtype = checked_blocks(value, f"weight {name!r}")
        return new_leaf(Leaf("weight", name, data, group=group), shape, dtype)
    array = host_array(value, copy=False)
    dtype = as_dtype(array.dtype)
    return new_leaf(Leaf("weight", name, array, group=group), check_shape(array.shape, dtype), dtype)


def _resolve(where: Where) -> Device | None:
    if where is not None and not isinstance(where, (str, Device)):
        raise SchedulerError(f"device= takes a device or its name, not {where!r}")
    return registry.device(where) if isinstance(where, str) else where


def upload(tensors: Sequence[Tensor], device: Device, *, copies: bool = False) -> list[Buffer | MultiBuffer]:
    """Give read-only leaves memory on ``device``, as their placement, or with ``copies`` as a further copy.

    A device that shares host memory uses the arrays in place; on others the leaves share one buffer, in parts if it
    exceeds the largest buffer.

    Returns:
        The new buffers.

    Raises:
        SchedulerError: a leaf without bytes.
        AllocationError: the device has not enough free memory; nothing stays allocated.
    """
    arrays = []
    for tensor in tensors:
        leaf = tensor.leaf
        assert leaf is not None
        if leaf.data is None:
            raise SchedulerError(f"{tensor.describe()} has no bytes; it can be used for planning, not placed or run")
        arrays.append(leaf.data)
    buffers: list[Buffer | MultiBuffer] = []
    locations: dict[Tensor, Location] = {}
    try:
        if device.default_buffer_type.is_host and device.caps.import_host:
            _import(tensors, arrays, device, buffers, locations)
        left = [(t, a) for t, a in zip(tensors, arrays, strict=True) if t not in locations]
        if left:
            _upload(left, device, buffers, locations)
    except BaseException:
        for buffer in buffers:
            buffer.free()
        raise
    for tensor, where in locations.items():
        assert tensor.leaf is not None
        if copies:
            tensor.leaf.copies[device.space] = where
        else:
            tensor.leaf.placement = where
            tensor.leaf.device = device.name
    return buffers


def _import(
    tensors: Sequence[Tensor],
    arrays: Sequence[np.ndarray[Any, Any]],
    device: Device,
    buffers: list[Buffer | MultiBuffer],
    locations: dict[Tensor, Location],
) -> None:
    """Use arrays in place, as far as the device can import them."""
    kind = device.default_buffer_type
    pads = type(kind).alloc_size is not BufferType.alloc_size
    for tensor, array in zip(tensors, arrays, strict=True):
        if pads and kind.alloc_size(tensor) > array.nbytes:
            continue  # kernels may read the padding
        try:
            buffer = device.import_host(array)
        except (UnsupportedOpError, AllocationError):
            continue  # not aligned, or larger than the largest buffer: `_upload` copies it
        assert isinstance(buffer, Buffer)
        buffer.usage = Usage.WEIGHTS
        buffers.append(buffer)
        locations[tensor] = Location(buffer, 0)


def _upload(
    pairs: Sequence[tuple[Tensor, np.ndarray[Any, Any]]],
    device: Device,
    buffers: list[Buffer | MultiBuffer],
    locations: dict[Tensor, Location],
) -> None:
    """Copy arrays into one buffer, in parts if it exceeds the largest buffer."""
    kind = device.default_buffer_type
    whole, offsets = kind.alloc_chunked([kind.alloc_size(tensor) for tensor, _ in pairs], Usage.WEIGHTS)
    buffers.append(whole)
    for (tensor, array), offset in zip(pairs, offsets, strict=True):
        part, local = whole.locate(offset, kind.alloc_size(tensor))
        handle = part.init(tensor, local).handle
        part.upload(local, array)
        locations[tensor] = Location(part, local, handle)


def upload_plain(tensor: Tensor, device: Device) -> Location:
    """A copy of a placed leaf, as it is now, in the ordinary memory of ``device``; raises `AllocationError`."""
    locations: dict[Tensor, Location] = {}
    _upload([(tensor, read_leaf(tensor))], device, [], locations)
    return locations[tensor]


def state(
    name: str, shape: int | Sequence[int], dtype: DTypeLike = f32, *, device: Where = None, fill: float = 0
) -> Tensor:
    """A leaf that nodes may write: a cache, an accumulator. It keeps its values from run to run.

    Args:
        name: unique within a graph.
        shape: lengths of up to 8 axes.
        dtype: a plain `DType` or its name.
        device: a device or its name; ``None``: the first program that uses the state places it.
        fill: initial value of every element.

    Raises:
        UnknownNameError: no such device.
        DTypeError: a quantized dtype, or a ``fill`` that the dtype does not hold.
        AllocationError: the device has not enough free memory.
        ShapeError: a missing name, or a shape that is not possible.
    """
    if not isinstance(name, str) or not name:
        raise ShapeError(f"a state needs a name: ow.state('cache', shape), not {name!r:.60}")
    dtype = as_dtype(dtype)
    if dtype.block > 1:
        raise DTypeError(f"state {name!r}: nodes cannot write {dtype}; use a plain type")
    shape = check_shape(shape if isinstance(shape, int) else tuple(shape), dtype)
    target = _resolve(device)
    _values_for(f"the fill of state {name!r}", fill, dtype)
    tensor = new_leaf(Leaf("state", name, fill=fill), shape, dtype)
    if target is not None:
        place_state(tensor, target)
    return tensor


def place_state(tensor: Tensor, device: Device) -> None:
    """Allocate a state on ``device`` with its present values, at first ``fill``; raises `AllocationError`."""
    leaf = tensor.leaf
    assert leaf is not None
    buffer = device.alloc(device.default_buffer_type.alloc_size(tensor))
    try:
        handle = buffer.init(tensor, 0).handle
        if leaf.data is not None:
            buffer.upload(0, leaf.data)
        elif leaf.fill == 0:
            buffer.clear()
        else:
            buffer.upload(0, np.full(tensor.shape, leaf.fill, tensor.dtype.numpy))
    except BaseException:
        buffer.free()
        raise
    leaf.data = None
    leaf.placement = Location(buffer, 0, handle)
    leaf.device = device.name


def withdraw(tensor: Tensor, device: Device) -> None:
    """Remove the memory of a leaf on a device that may be lost; the next program places the leaf again.

    A read-only leaf keeps its bytes on the host. A state keeps its values if the device can still be read; if not, it
    is damaged: reading it raises until it is written.

    Raises:
        SchedulerError: the only bytes of a read-only leaf were there and cannot be read.
    """
    leaf = tensor.leaf
    assert leaf is not None
    leaf.copies.pop(device.space, None)
    if leaf.placement is None or leaf.placement.buffer.device is not device:
        return
    values = leaf.data
    if leaf.kind == "state" or values is None:
        try:
            values = None if leaf.damaged else read_leaf(tensor)
        except Exception as error:  # a lost device may raise anything
            reason = f"{tensor.describe()} was on {device.name}, which can no longer be read: {error}"
            if leaf.kind != "state":
                raise SchedulerError(reason) from error
            leaf.damaged = f"{reason}; write it anew to use it"
    # Otherwise programs of other schedulers would keep using this memory and miss what is written elsewhere.
    leaf.placement.buffer.invalidate_dependents()
    leaf.placement, leaf.device, leaf.data = None, None, values
    CHANGES.note()


def check_tensor(function: str, tensor: Tensor) -> None:
    """Raise `SchedulerError` if ``tensor`` is not a `Tensor`."""
    if not isinstance(tensor, Tensor):
        raise SchedulerError(f"{function}() takes a tensor, not {tensor!r:.60}")


def place(tensor: Tensor, buffer: Buffer, offset: int = 0) -> Placement:
    """Place a tensor in a buffer at byte ``offset``. The bytes that are there become its values.

    A weight, constant or state is placed permanently. For a computed tensor pass the result to
    ``Scheduler.build(..., placements=[...])``.

    Raises:
        SchedulerError: a view, an input, or a leaf that has memory already.
        UnsupportedOpError: the buffer type is not for such tensors (`BufferType.usages`).
        BoundsError: the tensor does not fit there, or the offset is not aligned.
        LifetimeError: the buffer was freed.
    """
    check_tensor("place", tensor)
    if not isinstance(buffer, Buffer):
        raise SchedulerError(f"place() takes a buffer, from device.alloc(...), not {buffer!r:.60}")
    leaf = tensor.leaf
    if tensor.is_view or tensor.memory is not tensor or (leaf is not None and leaf.kind == "input"):
        raise SchedulerError(f"{tensor.describe()} cannot be placed; place the tensor that owns the memory")
    if leaf is not None and leaf.placement is not None:
        raise SchedulerError(f"{tensor.describe()} already lies in {leaf.placement.buffer!r}")
    if leaf is None:
        buffer.type.check_usage(Usage.COMPUTE)
    elif leaf.kind != "state":
        buffer.type.check_usage(Usage.WEIGHTS)
    elif not buffer.type.holds(Usage.ANY):
        buffer.type.check_usage(Usage.COMPUTE)
    made = buffer.init(tensor, offset)
    if leaf is not None:
        leaf.placement = Location(buffer, offset, made.handle)
        leaf.device = buffer.device.name
        CHANGES.note()
    return made


def read_leaf(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The current values of a state, weight or constant, or of a view of one, as a new array.

    Its shape and dtype are those of the tensor; of quantized tensors it is ``uint8`` and the last axis counts bytes.
    Waits for work on the device of the tensor.

    Raises:
        SchedulerError: the tensor has no values outside of a run, or no bytes.
        ExecutionError: a failed run left the state half written, or queued work of its device failed.
    """
    check_tensor("read", tensor)
    owner = tensor.memory
    leaf = owner.leaf
    if leaf is None or leaf.kind == "input":
        raise SchedulerError(f"{tensor.describe()} has no values outside of a run; make it an output")
    if leaf.damaged:
        raise ExecutionError(leaf.damaged, states=(leaf.name,))
    shape = array_shape(tensor.shape, tensor.dtype)
    if 0 in shape:
        return np.empty(shape, tensor.dtype.numpy)
    if leaf.placement is not None:
        buffer, offset, _ = leaf.placement
        buffer.device.synchronize()
        return read(Arg(buffer, offset + tensor.offset, tensor.dtype, tensor.shape, tensor.strides))
    if leaf.data is not None:
        values = leaf.data
    elif leaf.kind == "state":
        values = np.full(owner.shape, leaf.fill, owner.dtype.numpy)
    else:
        raise SchedulerError(f"{tensor.describe()} has no bytes; it can be used for planning, not read")
    strides = (*tensor.strides[:-1], 1) if tensor.dtype.block > 1 else tensor.strides
    return np.array(np.ndarray(shape, values.dtype, np.ascontiguousarray(values), tensor.offset, strides), copy=True)


def write_state(tensor: Tensor, values: Any) -> None:
    """Set all values of a state. A state that a failed run left half written can be read again afterwards.

    Args:
        tensor: the state itself, not a view or a later version of it.
        values: an array or nested sequences of the shape of the state. They are rounded to a float dtype, but must be
            representable in an integer dtype.

    Raises:
        SchedulerError: the tensor is not a state.
        ShapeError, DTypeError: values of another shape, or that the dtype cannot represent.
        ExecutionError: queued work of the device failed.
    """
    check_tensor("write", tensor)
    leaf = tensor.leaf
    if leaf is None or leaf.kind != "state":
        raise SchedulerError(f"{tensor.describe()} is not a state; only states can be written")
    array = _values_for(tensor.describe(), values, tensor.dtype)
    if array.shape != tensor.shape:
        raise ShapeError(f"values of shape {array.shape} do not fit {tensor.describe()}")
    if leaf.placement is None:
        leaf.data = np.array(array, copy=True)
    else:
        leaf.placement.buffer.device.synchronize()
        write(dense_arg(leaf.placement.buffer, leaf.placement.offset, tensor.dtype, tensor.shape), array)
    leaf.damaged = ""


def _values_for(what: str, values: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """`host_array`, with ``what`` added to its errors."""
    try:
        return host_array(values, dtype, copy=False)
    except DTypeError as error:
        raise DTypeError(f"{what}: {error}") from None
