"""`bind`: memory for a plan, and where every operand lies in it. `MemoryPlan` to `Bindings`, one for each slot.

This is the first pass that takes anything from a device: chunks of the arenas, and memory for leaves that have none.
With several slots, runs may be under way at once: what more than one queue touches then has memory of its own in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.contract.buffer import Buffer
from opweave.contract.space import HOST_SPACE
from opweave.contract.step import Arg
from opweave.graph.dtypes import u8
from opweave.leaves import place_state, upload

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.graph.leaf import Location, Placement
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.allocate import MemoryPlan
    from opweave.scheduler.arena import Arena, Lease
    from opweave.scheduler.splits import Partition, StorageView

__all__ = ["Bindings", "Operands", "bind"]


class Bindings(NamedTuple):
    """Where everything lies in one slot.

    Attributes:
        buffers, offsets: of every storage id; no buffer for values that live only inside of a fused group.
        handles: what special memory has prepared for leaves, by storage id.
        workspaces: (index of the split, index of the group) -> its scratch memory.
    """

    buffers: Sequence[Buffer | None]
    offsets: Sequence[int]
    handles: Mapping[int, Any]
    workspaces: Mapping[tuple[int, int], Arg]


def bind(
    partition: Partition, plan: MemoryPlan, arenas: Sequence[Arena], host: Device, *, tight: bool = False
) -> tuple[list[Bindings], list[Lease]]:
    """Take the memory that a plan asks for.

    Args:
        arenas: of every target; the plan was made for their present capacities.
        host: the device whose memory holds read-only leaves that nobody else holds.
        tight: as the plan was made.

    Returns:
        The bindings of every slot, and the leases of chunks, which the program keeps as long as it runs.

    Raises:
        AllocationError: a device has no room. What was taken for temporaries is given back.
        SchedulerError: a leaf without bytes.
    """
    for split in partition.splits:
        if any(copy.cause == "weight-fetch" for copy in split.copies):
            split.target.open_copier()
    leases: list[Lease] = []
    try:
        chunks: list[Mapping[int, Buffer]] = []
        for arena, wanted in zip(arenas, plan.arenas, strict=True):
            if wanted is None:
                chunks.append({})
                continue
            leases.append(arena.take(wanted, tight=tight))
            chunks.append(leases[-1].chunks)
        handles: dict[int, Any] = {}
        offsets = list(plan.offsets)
        buffers = [
            chunks[arena][chunk] if chunk >= 0 else None
            for arena, chunk in zip(partition.arenas, plan.chunks, strict=True)
        ]
        _bind_leaves(partition, host, buffers, offsets, handles)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    scratch = {
        key: Arg(chunks[space.target][space.chunk], space.offset, u8, (space.size,), (1,))
        for key, space in plan.workspaces.items()
    }
    result = []
    for slot in plan.slots:
        own_buffers, own_offsets = buffers, offsets
        if slot:
            own_buffers, own_offsets = list(buffers), list(offsets)
            for storage, (chunk, offset) in slot.items():
                own_buffers[storage] = chunks[partition.arenas[storage]][chunk]
                own_offsets[storage] = offset
        result.append(Bindings(own_buffers, own_offsets, handles, scratch))
    return result, leases


def _bind_leaves(
    partition: Partition, host: Device, buffers: list[Buffer | None], offsets: list[int], handles: dict[int, Any]
) -> None:
    """Memory of leaves: placed states and weights, and read-only leaves where they are wanted."""
    missing: dict[tuple[Device, int], list[Tensor]] = {}
    targets = partition.assignment.targets
    for tensor, space in partition.owners.values():
        leaf = tensor.leaf
        if 0 in tensor.shape or leaf is None or leaf.placement is not None or space in leaf.copies:
            continue
        if leaf.kind == "state":
            place_state(tensor, targets[partition.assignment.target_of[tensor]].device)
            continue
        device = next((x.device for x in targets if x.device.space is space), None)
        if device is None or (space is HOST_SPACE and not device.caps.import_host):
            device = host
        # Weights of one mapping share buffers, and so do all constants (whose group is None).
        missing.setdefault((device, id(leaf.group)), []).append(tensor)
    for (device, _), tensors in missing.items():
        upload(tensors, device, copies=True)
    for storage, (tensor, space) in partition.owners.items():
        if 0 in tensor.shape:
            buffers[storage] = host.alloc(1)
            continue
        made: Placement | Location | None = partition.placed.get(tensor)
        if made is None:
            assert tensor.leaf is not None
            made = tensor.leaf.placement or tensor.leaf.copies[space]
        made.buffer.check(made.offset, 0)
        buffers[storage], offsets[storage] = made.buffer, made.offset
        if made.handle is not None:
            handles[storage] = made.handle


class Operands:
    """Makes the arguments of steps in one slot. Equal operands are one `Arg`, and values that take over each other's
    memory in one layout share an array, so that fewer arrays stay in the processor's cache."""

    __slots__ = ("_arenas", "_args", "_buffers", "_handles", "_made_of", "_offsets", "_views")

    def __init__(self, partition: Partition, bindings: Bindings) -> None:
        self._buffers, self._offsets, self._handles, _ = bindings
        self._arenas: Final = partition.arenas
        self._args: Final[list[Arg | None]] = [None] * len(partition.sizes)
        self._made_of: Final[list[StorageView | None]] = [None] * len(partition.sizes)
        self._views: Final[dict[tuple[int, int], Arg]] = {}  # buffer and offset -> what was bound there last

    def arg(self, operand: StorageView) -> Arg:
        """The operand where it lies."""
        storage, offset, dtype, shape, strides = operand
        known = self._args[storage]
        if known is not None and (self._made_of[storage] is operand or self._made_of[storage] == operand):
            return known
        offset += self._offsets[storage]
        buffer = self._buffers[storage]
        arg = Arg(buffer, offset, dtype, shape, strides, self._handles.get(storage), storage)
        if self._arenas[storage] >= 0:
            at = (id(buffer), offset)
            other = self._views.get(at)
            if other is not None and other.dtype is dtype and other.shape == shape and other.strides == strides:
                arg._view = other._view
            else:
                self._views[at] = arg
        if known is None:
            self._args[storage], self._made_of[storage] = arg, operand
        return arg
