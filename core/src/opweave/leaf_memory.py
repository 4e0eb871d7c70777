"""The memory of leaves on devices: uploading, placing, reading and writing their values, withdrawing them.

Which leaves there are is decided in `opweave.leaves`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opweave.contract.memory import Usage, as_bytes
from opweave.contract.step import Arg
from opweave.errors import (
    AllocationError,
    DTypeError,
    ExecutionError,
    LayoutError,
    SchedulerError,
    ShapeError,
    UnsupportedOpError,
)
from opweave.graph.arrays import host_array
from opweave.graph.blocks import Blocks, checked_blocks
from opweave.graph.dtypes import DType
from opweave.graph.layout import array_shape
from opweave.graph.leaf import Location, Placement, Shards
from opweave.graph.tensor import Tensor
from opweave.ops.quantization import quantize
from opweave.progress import shown
from opweave.runtime.buffer import Buffer, MultiBuffer
from opweave.runtime.changes import CHANGES
from opweave.runtime.device import Device
from opweave.runtime.host.operands import read, write
from opweave.runtime.memory import BufferType
from opweave.runtime.stream import Stream

__all__ = [
    "place",
    "place_state",
    "read_leaf",
    "repack",
    "upload",
    "upload_plain",
    "values_for",
    "withdraw",
    "write_state",
]


def upload(
    tensors: Sequence[Tensor], device: Device, kind: BufferType | None = None, *, copies: bool = False
) -> list[Buffer | MultiBuffer]:
    """Give read-only leaves memory on ``device``, as their placement, or with ``copies`` as a further copy.

    A device that shares host memory uses the arrays in place; on others, and in special memory (``kind``), the leaves
    share one buffer, in parts if it exceeds the largest buffer.

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
        ordinary = device.default_buffer_type
        if kind in (None, ordinary) and ordinary.is_host and device.caps.import_host:
            _import(tensors, arrays, device, buffers, locations)
        left = [(t, a) for t, a in zip(tensors, arrays, strict=True) if t not in locations]
        if left:
            _upload(left, kind or ordinary, buffers, locations)
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
            buffer = device.import_bytes(as_bytes(array))
        except (UnsupportedOpError, AllocationError):
            continue  # not aligned, or larger than the largest buffer: `_upload` copies it
        assert isinstance(buffer, Buffer)
        buffer.usage = Usage.WEIGHTS
        buffers.append(buffer)
        locations[tensor] = Location(buffer, 0)


def _upload(
    pairs: Sequence[tuple[Tensor, np.ndarray[Any, Any]]],
    kind: BufferType,
    buffers: list[Buffer | MultiBuffer],
    locations: dict[Tensor, Location],
) -> None:
    """Copy arrays into one buffer, in parts if it exceeds the largest buffer."""
    whole, offsets = kind.alloc_chunked([kind.alloc_size(tensor) for tensor, _ in pairs], Usage.WEIGHTS)
    buffers.append(whole)
    placed = list(zip(pairs, offsets, strict=True))
    for (tensor, array), offset in shown(placed, f"uploading to {kind.device.name}"):
        part, local = whole.locate(offset, kind.alloc_size(tensor))
        handle = part.init(tensor, local).handle
        part.upload(local, array)
        locations[tensor] = Location(part, local, handle)


def upload_plain(tensor: Tensor, device: Device) -> Location:
    """A copy of a placed leaf, as it is now, in the ordinary memory of ``device``; raises `AllocationError`."""
    locations: dict[Tensor, Location] = {}
    _upload([(tensor, read_leaf(tensor))], device.default_buffer_type, [], locations)
    return locations[tensor]


def repack(tensor: Tensor, kind: BufferType) -> None:
    """Give a read-only leaf a copy in special memory, once for all programs; raises what `upload` raises."""
    leaf = tensor.leaf
    assert leaf is not None
    if kind not in leaf.copies:
        locations: dict[Tensor, Location] = {}
        values = leaf.data if leaf.data is not None else read_leaf(tensor)
        _upload([(tensor, values)], kind, [], locations)
        leaf.copies[kind] = locations[tensor]


def place_state(tensor: Tensor, device: Device, kind: BufferType | None = None) -> None:
    """Allocate a state on ``device`` with its present values, at first ``fill``; raises `AllocationError`.

    Args:
        kind: the memory, where not the ordinary one; raises `UnsupportedOpError` if it is not for states.
    """
    leaf = tensor.leaf
    assert leaf is not None
    kind = kind or device.default_buffer_type
    usage = Usage.ANY if kind.holds(Usage.ANY) else Usage.COMPUTE
    buffer = kind.alloc(kind.alloc_size(tensor), usage)
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
    for key, where in leaf.copies.items():
        if where.buffer.device is device or key is device.space:
            leaf.copies.pop(key)
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


def read_leaf(tensor: Tensor, *, stream: Stream | None = None) -> np.ndarray[Any, Any]:
    """The current values of a state, weight or constant, or of a view of one, as a new array.

    Its shape and dtype are those of the tensor; of quantized tensors it is ``uint8`` and the last axis counts bytes.

    Args:
        stream: read in the order of this stream, whose device reaches the memory; the array has the values after
            ``stream.synchronize()``. ``None``: wait for work on the device of the tensor, and read.

    Raises:
        SchedulerError: the tensor has no values outside of a run, or no bytes.
        ExecutionError: a failed run left the state half written, or queued work of its device failed.
        LifetimeError: ``stream`` is closed or busy, or its device does not reach the memory.
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
    if leaf.kind == "state" and leaf.shards is not None:
        _check_no_stream(owner, stream)
        whole = np.concatenate([read_leaf(part) for part in leaf.shards.parts], leaf.shards.axis)
        return np.array(_shown(tensor, whole), copy=True)
    if leaf.placement is not None:
        arg = _placed_arg(tensor, leaf.placement)
        if stream is not None:
            from opweave.runtime.host.regions import download  # most values are read at once

            return download(stream, arg, shape)
        leaf.placement.buffer.device.synchronize()
        return read(arg)
    if leaf.data is not None:
        values = leaf.data
    elif leaf.kind == "state":
        values = np.full(array_shape(owner.shape, owner.dtype), leaf.fill, owner.dtype.numpy)
    else:
        raise SchedulerError(f"{tensor.describe()} has no bytes; it can be used for planning, not read")
    return np.array(_shown(tensor, np.ascontiguousarray(values)), copy=True)


def write_state(tensor: Tensor, values: Any, *, stream: Stream | None = None) -> None:
    """Set the values of a state, or those that a view of it shows (``state[3:5]``).

    A state that a failed run left half written can be read again once all of it was written.

    Args:
        tensor: the state or a view of it, not of a later version.
        values: an array or nested sequences of the shape of ``tensor``. They are rounded to a float dtype, but must be
            representable in an integer dtype. For a quantized state `Blocks` of its dtype, or what is quantized to it.
        stream: write in the order of this stream, whose device reaches the memory. An array of the dtype of the state
            must not be changed before ``stream.synchronize()``. ``None``: wait for work on the device, and write.

    Raises:
        SchedulerError: neither a state nor a view of one, or ``stream`` is given and the state lies nowhere yet.
        ShapeError, DTypeError: values of another shape, or that the dtype cannot represent.
        LayoutError: a view that shows elements repeatedly.
        ExecutionError: queued work of the device failed, or a part of a half written state.
        LifetimeError: ``stream`` is closed or busy, or its device does not reach the memory.
    """
    check_tensor("write", tensor)
    owner = tensor.memory
    leaf = owner.leaf
    if leaf is None or leaf.kind != "state" or tensor.root is not owner:
        raise SchedulerError(f"{tensor.describe()} is not a state or a view of one; only states can be written")
    array = values_for(tensor.describe(), values, tensor.dtype)
    shape = array_shape(tensor.shape, tensor.dtype)
    if array.shape != shape:
        raise ShapeError(f"values of shape {array.shape} do not fit {tensor.describe()}")
    repeated = any(stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    if repeated and tensor.size:  # empty rows of blocks have stride 0
        raise LayoutError(f"{tensor.describe()} shows elements repeatedly; write to the state itself")
    whole = tensor.size == owner.size
    if leaf.damaged and not whole:
        raise ExecutionError(f"{leaf.damaged}; a part of it does not make it whole", states=(leaf.name,))
    if leaf.pending is not None:
        leaf.pending()
    if leaf.shards is not None:
        _check_no_stream(owner, stream)
        _write_parts(tensor, leaf.shards, array)
    elif leaf.placement is None:
        if stream is not None:
            raise SchedulerError(f"{owner.describe()} lies nowhere yet, so that no stream writes it; give it a device")
        if leaf.data is None:
            leaf.data = np.full(array_shape(owner.shape, owner.dtype), leaf.fill, owner.dtype.numpy)
        _shown(tensor, leaf.data)[...] = array
    elif array.size:
        arg = _placed_arg(tensor, leaf.placement)
        if stream is not None:
            from opweave.runtime.host.regions import upload as queue_upload  # most values are written at once

            queue_upload(stream, arg, array)
        else:
            leaf.placement.buffer.device.synchronize()
            write(arg, array)
    leaf.damaged, leaf.pending = "", None


def _check_no_stream(state: Tensor, stream: Stream | None) -> None:
    if stream is not None:
        raise SchedulerError(f"{state.describe()} lies in parts on several devices, which no one stream reaches; read "
                             "and write it without a stream")  # fmt: skip


def _write_parts(tensor: Tensor, shards: Shards, array: np.ndarray[Any, Any]) -> None:
    """Write values of a state in shards, or of a view of it."""
    state = tensor.memory
    if tensor.size == state.size:
        whole = array.reshape(array_shape(state.shape, state.dtype))
    else:
        whole = read_leaf(state)
        _shown(tensor, whole)[...] = array
    for i, part in enumerate(shards.parts):
        values = shards.values(whole, i)
        write_state(part, Blocks(values, part.shape, part.dtype) if part.dtype.is_quantized else values)


def _placed_arg(tensor: Tensor, placement: Location) -> Arg:
    """A leaf, or a view of one, where it lies."""
    return Arg(placement.buffer, placement.offset + tensor.offset, tensor.dtype, tensor.shape, tensor.strides)


def _shown(tensor: Tensor, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What a leaf, or a view of one, shows of the leaf's dense values, not a copy."""
    strides = (*tensor.strides[:-1], 1) if tensor.dtype.block > 1 else tensor.strides
    return np.ndarray(array_shape(tensor.shape, tensor.dtype), values.dtype, values, tensor.offset, strides)


def values_for(what: str, values: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """`host_array`, with ``what`` added to its errors; for a quantized dtype the bytes of its blocks."""
    if dtype.is_quantized:
        data, _, given = checked_blocks(values if isinstance(values, Blocks) else quantize(values, dtype), what)
        if given is not dtype:
            raise DTypeError(f"{what} takes blocks of {dtype}, not of {given}")
        return data
    try:
        return host_array(values, dtype, copy=False)
    except DTypeError as error:
        raise DTypeError(f"{what}: {error}") from None
