"""Changing read-only leaves that programs use: new values in all their memories, and giving up those on a device.

Both wait for the runs in flight of every scheduler that has programs with these leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from opweave.graph.leaf import Location
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import withdraw
from opweave.runtime.buffer import Buffer
from opweave.runtime.device import Device
from opweave.runtime.host.operands import dense_arg, write

__all__ = ["evict", "has_copies", "rewrite"]

Array = np.ndarray[Any, Any]


def rewrite(values: Mapping[Tensor, Array]) -> None:
    """Set the values of read-only leaves on the host, in their memories, and in what was made of them: copies on other
    devices, other forms, other types. Programs go on with the new values.

    Args:
        values: leaf -> an array of its dtype and shape (of quantized types the bytes, ``uint8``).

    Raises:
        HazardError: memory that nothing may write, as that of a mapped file. Nothing was written.
        LifetimeError: memory that was freed. Nothing was written.
        ExecutionError: work on a device failed.
        SchedulerError: called from within a run.
    """
    # Of a leaf that was converted the other types follow from the new values too.
    everything = {leaf: array for tensor, array in values.items() for leaf, array in _with_converted(tensor, array)}
    places = {tensor: _locations(tensor) for tensor in everything}
    buffers = {where.buffer for locations in places.values() for where in locations}
    for tensor, locations in places.items():
        for buffer, offset, _ in locations:
            buffer.check(offset, tensor.nbytes, write=True)

    def work() -> None:
        for tensor, array in everything.items():
            _write(tensor, array, places[tensor])
        token = object()  # several plans may share what they have to make again
        for dependent in {dependent for buffer in buffers for dependent in buffer.dependents}:
            dependent.refresh(token)

    _when_idle(buffers, work)


def has_copies(tensor: Tensor) -> bool:
    """Whether programs read anything but the array that a read-only leaf was made of: what is written to the array,
    past opweave, is then not seen before `rewrite`."""
    leaf = tensor.leaf
    assert leaf is not None
    if leaf.data is None or leaf.converted or leaf.shards is not None:
        return True
    found = _locations(tensor)
    return any(not _lies_in(leaf.data, where) for where in found) or any(
        dependent.keeps_copies for where in found for dependent in where.buffer.dependents
    )


def _with_converted(tensor: Tensor, array: Array) -> Iterator[tuple[Tensor, Array]]:
    yield tensor, array
    assert tensor.leaf is not None
    for dtype, other in tensor.leaf.converted.items():
        yield from _with_converted(other, array.astype(dtype.numpy))
    shards = tensor.leaf.shards
    for i, part in enumerate(shards.parts if shards is not None else ()):
        assert shards is not None
        yield from _with_converted(part, shards.values(array, i))


def _locations(tensor: Tensor) -> list[Location]:
    """Everywhere where the values of a leaf lie, each place once."""
    leaf = tensor.leaf
    assert leaf is not None
    found = [*leaf.copies.values(), *([leaf.placement] if leaf.placement is not None else [])]
    return [] if 0 in tensor.shape else list({(id(where.buffer), where.offset): where for where in found}.values())


def _write(tensor: Tensor, array: Array, locations: Sequence[Location]) -> None:
    leaf = tensor.leaf
    assert leaf is not None
    for buffer, offset, handle in locations:
        write(dense_arg(buffer, offset, tensor.dtype, tensor.shape, handle=handle), array)
    if leaf.data is not None and not any(_lies_in(leaf.data, where) for where in locations):
        leaf.data = np.array(array, copy=True)


def _lies_in(array: Array, where: Location) -> bool:
    """Whether a device uses an array of the host where it lies."""
    buffer, offset, _ = where
    return bool(buffer.is_host and buffer.location(offset) == (0, array.__array_interface__["data"][0]))


def evict(tensors: Iterable[Tensor], device: Device) -> None:
    """Give up the memory of read-only leaves on a device; their values stay on the host. Programs that use this memory
    can no longer run.

    Raises:
        SchedulerError: values that cannot be read back, or called from within a run.
        ExecutionError: work on a device failed.
    """
    leaves = [leaf for tensor in tensors for leaf in _converted(tensor)]
    gone = {where.buffer for leaf in leaves for where in _locations(leaf) if where.buffer.device is device}

    def work() -> None:
        for leaf in leaves:
            withdraw(leaf, device)
        for buffer in gone:
            buffer.invalidate_dependents()
            for dependent in buffer.dependents:
                dependent.give_up()

    _when_idle(gone, work)


def _converted(tensor: Tensor) -> Iterator[Tensor]:
    """A leaf, its parts, and what these were converted to."""
    yield tensor
    assert tensor.leaf is not None
    shards = tensor.leaf.shards
    for other in (*tensor.leaf.converted.values(), *(shards.parts if shards is not None else ())):
        yield from _converted(other)


def _when_idle(buffers: Iterable[Buffer], work: Callable[[], None]) -> None:
    """Call ``work`` while no run of a program that uses the buffers is in flight, and no work of their devices."""
    buffers = set(buffers)
    waits = {d.when_idle for buffer in buffers for d in buffer.dependents if d.when_idle is not None}

    def synchronized() -> None:
        for device in {buffer.device for buffer in buffers}:
            device.synchronize()
        work()

    call: Callable[[], None] = synchronized
    # Each holds the lock of its scheduler while the next one waits: always in one order.
    for when_idle in sorted(waits, key=lambda wait: id(wait.__self__), reverse=True):  # type: ignore[attr-defined]
        call = partial(when_idle, call)
    call()
