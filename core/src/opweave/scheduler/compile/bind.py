"""`bind`: memory for a plan, and where every operand lies in it. `MemoryPlan` to `Bindings`, one for each slot.

This is the first pass that allocates memory, but for rounded weights: chunks of the arenas, and memory of leaves.
With several slots, runs may be under way at once: what more than one queue touches then has memory of its own in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from opweave.contract.memory import HOST_SPACE
from opweave.contract.step import Arg
from opweave.graph.dtypes import u8
from opweave.leaf_memory import place_state, repack, upload, upload_plain
from opweave.runtime.buffer import Buffer

if TYPE_CHECKING:
    from opweave.contract.memory import MemorySpace
    from opweave.graph.leaf import Location, Placement
    from opweave.graph.tensor import Tensor
    from opweave.runtime.device import Device
    from opweave.scheduler.compile.arena import Arena, Lease
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.allocate import MemoryPlan
    from opweave.scheduler.plan.splits import Partition, StorageView

__all__ = ["Bindings", "bind", "operands"]


class Bindings(NamedTuple):
    """Where everything lies in one slot.

    Attributes:
        buffers, offsets: of every storage id; no buffer for values that live only inside of a fused group.
        handles: what `BufferType._init` returned for leaves in special memory, by storage id.
        workspaces: (index of the split, index of the group) -> its scratch memory.
        args: by storage id the first view of it that was bound, with its operand; see `operands`.
    """

    buffers: Sequence[Buffer | None]
    offsets: Sequence[int]
    handles: Mapping[int, Any]
    workspaces: Mapping[tuple[int, int], Arg]
    args: list[tuple[StorageView, Arg] | None]


def bind(
    partition: Partition,
    plan: MemoryPlan,
    arenas: Sequence[Arena],
    host: Device,
    earlier: tuple[Bindings, Set[int]] | None = None,
    *,
    tight: bool = False,
) -> tuple[list[Bindings], list[Lease]]:
    """Take the memory that a plan asks for.

    Args:
        arenas: of every target; the plan was made for their present capacities.
        host: the device whose memory holds read-only leaves that no other device holds.
        earlier: the bindings of a current program that is alike, and the leaves that both read: these lie as in it.
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
            for arena, chunk in zip(partition.arena_of, plan.chunks, strict=True)
        ]
        same: Set[int] = frozenset()
        if earlier is not None:
            known, same = earlier
            handles.update((storage, handle) for storage, handle in known.handles.items() if storage in same)
            for storage in same:
                buffers[storage], offsets[storage] = known.buffers[storage], known.offsets[storage]
        if len(same) < len(partition.owners):
            _bind_leaves(partition, same, host, buffers, offsets, handles)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    scratch = {
        key: Arg(chunks[target][chunk], offset, u8, (size,), (1,))
        for key, (target, chunk, offset, size) in plan.workspaces.items()
    }
    first = Bindings(buffers, offsets, handles, scratch, [None] * len(offsets))
    return [_bindings_in_slot(first, slot, partition, chunks) for slot in plan.slots], leases


def _bindings_in_slot(
    first: Bindings,
    slot: Mapping[int, tuple[int, int]],
    partition: Partition,
    chunks: Sequence[Mapping[int, Buffer]],
) -> Bindings:
    """``first`` for a slot in which some storages lie elsewhere: storage id -> chunk and offset."""
    buffers, offsets = first.buffers, first.offsets
    if slot:
        buffers, offsets = list(buffers), list(offsets)
        for storage, (chunk, offset) in slot.items():
            buffers[storage] = chunks[partition.arena_of[storage]][chunk]
            offsets[storage] = offset
    return first._replace(buffers=buffers, offsets=offsets, args=[None] * len(offsets))


def _bind_leaves(
    partition: Partition,
    known: Set[int],
    host: Device,
    buffers: list[Buffer | None],
    offsets: list[int],
    handles: dict[int, Any],
) -> None:
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
            buffers[storage] = host.alloc(1)
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
            if found is None:
                absent.append(storage)
                if leaf.kind == "state":
                    place_state(tensor, targets[partition.assignment.target_of[tensor]].device)
                else:
                    # Weights of one mapping share buffers, and so do all constants (whose group is None).
                    missing.setdefault((devices[space], id(leaf.group)), []).append(tensor)
                continue
        _enter(found, storage, buffers, offsets, handles)
    for (device, _), tensors in missing.items():
        upload(tensors, device, copies=True)
    for storage in absent:
        tensor, space = partition.owners[storage]
        assert tensor.leaf is not None
        _enter(tensor.leaf.placement or tensor.leaf.copies[space], storage, buffers, offsets, handles)


def _enter(
    found: Placement | Location,
    storage: int,
    buffers: list[Buffer | None],
    offsets: list[int],
    handles: dict[int, Any],
) -> None:
    """Note where a storage lies; raises `LifetimeError` if that memory is gone."""
    found.buffer.check(found.offset, 0)
    buffers[storage], offsets[storage] = found.buffer, found.offset
    if found.handle is not None:
        handles[storage] = found.handle


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
    earlier: Bindings | None = None,
    *,
    numbered: bool = True,
    leaves: Iterable[int] = (),
) -> Callable[[StorageView], Arg]:
    """A function that makes the arguments of steps in one slot.

    Equal operands are one `Arg`, and values that take over each other's memory in one layout share an array, so that
    fewer arrays stay in the processor's cache. Operands that were the same in an ``earlier`` program of the same
    storage ids are taken from there.

    Args:
        leaves: storages of leaves that lie where they lie in the earlier program.
        numbered: each value has an `Arg` of its own, with its number. If not, values that take over each other's
            memory in one layout are one `Arg`.
    """
    buffers, offsets, handles, _, args = bindings
    arena_of = partition.arena_of
    old = None if earlier is None else earlier.args
    if old is not None:
        for storage in leaves:
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
