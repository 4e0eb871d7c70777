"""`bind`: memory for a plan, and where every operand lies in it. `MemoryPlan` to `Bindings`, one for each slot.

This is the first pass that allocates memory, but for rounded weights: chunks of the arenas, and memory of leaves.
With several slots, runs may be under way at once: what more than one queue touches then has memory of its own in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from opweave.contract.memory import HOST_SPACE
from opweave.contract.step import Arg
from opweave.graph.dtypes import u8
from opweave.leaf_memory import place_state, repack, upload, upload_plain
from opweave.scheduler.compile.run_list import Bindings

if TYPE_CHECKING:
    from opweave.contract.memory import MemorySpace
    from opweave.graph.leaf import Location, Placement
    from opweave.graph.tensor import Tensor
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.device import Device
    from opweave.scheduler.compile.arena import Arena, Lease
    from opweave.scheduler.compile.reuse import EarlierProgram, EarlierSlot
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.allocate import MemoryPlan
    from opweave.scheduler.plan.splits import Partition, StorageView

__all__ = ["bind", "operands"]


def bind(
    partition: Partition,
    plan: MemoryPlan,
    arenas: Sequence[Arena],
    host: Device,
    earlier: EarlierProgram | None = None,
    *,
    tight: bool = False,
) -> tuple[list[Bindings], list[Lease]]:
    """Take the memory that a plan asks for.

    Args:
        arenas: of every target; the plan was made for their present capacities.
        host: the device whose memory holds read-only leaves that no other device holds.
        earlier: a current program that is like this one: the leaves that both read lie as in it.
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
        buffers = [
            chunks[arena][chunk] if chunk >= 0 else None
            for arena, chunk in zip(partition.arena_of, plan.chunks, strict=True)
        ]
        scratch = {
            key: Arg(chunks[target][chunk], offset, u8, (size,), (1,))
            for key, (target, chunk, offset, size) in plan.workspaces.items()
        }
        first = Bindings(buffers, list(plan.offsets), {}, scratch, [])
        same: Set[int] = frozenset()
        if earlier is not None and (old := earlier.lists[0].bindings) is not None:
            same = earlier.leaves_of(partition)
            first.handles.update((storage, handle) for storage, handle in old.handles.items() if storage in same)
            for storage in same:
                first.buffers[storage], first.offsets[storage] = old.buffers[storage], old.offsets[storage]
        if len(same) < len(partition.owners):
            _bind_leaves(partition, same, host, first)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    arenas_of = partition.arena_of
    slots = [{s: (chunks[arenas_of[s]][chunk], at) for s, (chunk, at) in slot.items()} for slot in plan.slots]
    return [first.in_slot(places) for places in slots], leases


def _bind_leaves(partition: Partition, known: Set[int], host: Device, bindings: Bindings) -> None:
    """Memory of leaves but for ``known`` storages: placed states and weights, and read-only leaves in the spaces in
    which they are read."""
    missing: dict[tuple[Device, int], list[Tensor]] = {}
    targets = partition.assignment.targets
    devices = {space: _device_for(space, targets, host) for space in {s for _, s in partition.owners.values()}}
    absent: list[int] = []
    for storage, (tensor, space) in partition.owners.items():
        if storage in known:
            continue
        leaf = tensor.leaf
        found: Placement | Location | None = partition.placed.get(tensor)
        if 0 in tensor.shape:
            bindings.buffers[storage] = host.alloc(1)
            continue
        if storage in partition.repacked:
            repack(tensor, partition.repacked[storage])
            assert leaf is not None
            found = leaf.copies[partition.repacked[storage]]
        elif storage in partition.unpacked:
            found = _copied(tensor, space, devices[space])
        elif found is None:
            assert leaf is not None
            found = leaf.placement or leaf.copies.get(space)
        if found is not None:
            bindings.enter(storage, found)
            continue
        absent.append(storage)
        assert leaf is not None
        if leaf.kind == "state":
            place_state(tensor, targets[partition.assignment.target_of[tensor]].device)
        else:
            # Weights of one mapping share buffers, and so do all constants (whose group is None).
            missing.setdefault((devices[space], id(leaf.group)), []).append(tensor)
    for (device, _), tensors in missing.items():
        upload(tensors, device, copies=True)
    for storage in absent:
        tensor, space = partition.owners[storage]
        assert tensor.leaf is not None
        bindings.enter(storage, tensor.leaf.placement or tensor.leaf.copies[space])


def _copied(tensor: Tensor, space: MemorySpace, device: Device) -> Location:
    """The copy of a placed leaf in ordinary memory; programs share it until the usage of the leaf's buffer changes."""
    leaf = tensor.leaf
    assert leaf is not None
    assert leaf.placement is not None
    key = (space, leaf.placement.buffer.usage_changes)
    if key not in leaf.copies:
        leaf.copies[key] = upload_plain(tensor, device)
    return leaf.copies[key]


def _device_for(space: MemorySpace, targets: Sequence[Target], host: Device) -> Device:
    """The device that keeps read-only leaves in ``space``."""
    device = next((target.device for target in targets if target.device.space is space), host)
    return host if space is HOST_SPACE and not device.caps.import_host else device


def operands(
    partition: Partition,
    bindings: Bindings,
    earlier: EarlierSlot | None = None,
    *,
    numbered: bool = True,
) -> Callable[[StorageView], Arg]:
    """A function that makes the arguments of steps in one slot.

    Equal operands are one `Arg`, and values that take over each other's memory in one layout share an array, so that
    fewer arrays stay in the processor's cache. Operands that were the same in an ``earlier`` program of the same
    storage ids are taken from there.

    Args:
        numbered: each value has an `Arg` of its own, with its number. If not, values that take over each other's
            memory in one layout are one `Arg`.
    """
    buffers, offsets, handles, _, args = bindings
    arena_of = partition.arena_of
    old = None
    if earlier is not None:
        old = earlier.bindings.args
        for storage in earlier.earlier.leaves_of(partition):
            args[storage] = old[storage]
    there: dict[tuple[Any, ...], Arg] = {}  # buffer, offset and layout of a temporary -> what was bound there

    def arg(operand: StorageView) -> Arg:
        """The operand where it lies."""
        known = args[operand.storage]
        if known is not None and (known[0] is operand or known[0] == operand):
            return known[1]
        storage, offset, dtype, shape, strides = operand
        offset += offsets[storage]
        buffer = buffers[storage]
        temporary = buffer is not None and arena_of[storage] >= 0
        at = (id(buffer), offset, dtype, shape, strides) if temporary else None
        other = None if at is None else there.get(at)
        if other is not None and not numbered:
            made = other
        else:
            handle = handles.get(storage)
            before = None if old is None else old[storage]
            if before is not None and before[0] == operand and before[1].lies_at(buffer, offset, handle):
                made = before[1]
            else:
                made = Arg(buffer, offset, dtype, shape, strides, handle, storage)
            if other is not None:
                made.share_view(other)
            elif at is not None:
                there[at] = made
        if known is None:
            args[storage] = operand, made
        return made

    return arg
