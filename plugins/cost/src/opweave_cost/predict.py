"""Predicting a partitioned graph: seconds by device and of transfers, and bytes of memory by the memory planner."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from opweave.contract import Kind, WorkerStream
from opweave.graph.layout import nbytes, round_up
from opweave.runtime.host.cores import usable_cores
from opweave.scheduler.place.prediction import MemoryUse, Prediction
from opweave.scheduler.plan.allocate import allocate, memory_use
from opweave.scheduler.plan.fuse import unfused
from opweave_cost.cost_model import CostModel
from opweave_cost.store import profile

if TYPE_CHECKING:
    from opweave.contract import Device, MemorySpace
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.splits import Partition, Split, StorageView

__all__ = ["memory_of", "predict", "queues", "room_of", "where_lies"]


def predict(partition: Partition, model: CostModel | None = None, *, memory: bool = True) -> Prediction:
    """Predict a partitioned graph.

    Args:
        model: the cost model; ``None``: made from the targets' profiles, which are measured if there are none yet.
        memory: plan the memory too.
    """
    targets = partition.assignment.targets
    if model is None:
        model = CostModel(targets, [profile(target.device) for target in targets])
    busy = {target.name: 0.0 for target in targets}
    nodes: dict[Tensor, float] = {}
    splits: list[float] = []
    moved = 0.0
    at_once = _FinishTimes(partition)
    # Runs follow one another: the last split of one comes before the first of the next.
    before = partition.splits[-1].target if partition.splits else None
    for split in partition.splits:
        at = split.target.index
        steps = model.profiles[at].again if split.target is before else model.profiles[at].switch
        before = split.target
        for item in split.steps:
            if item.node is None:
                steps += model.pack(at, item.out.dtype, item.out.shape)
                continue
            signature = partition.assignment.capabilities.signature(item.node)
            took = nodes[item.node] = model.step(item.node, signature, at)
            steps += took
        busy[split.target.name] += steps
        copies = _copies(partition, split, model)
        splits.append(steps + copies)
        at_once.add(split, steps + copies)
        moved += copies
    spared = sum(splits) - at_once.end
    for tensor, storage in partition.inputs.items():
        moved += model.feed(partition.arena_of[storage], tensor.nbytes)
    for output, tensor in zip(partition.outputs, partition.graph.outputs, strict=True):
        if output is not None:
            moved += model.fetch(where_lies(partition, output)[0], tensor.nbytes)
    use = memory_of(partition) if memory else {}
    short = {}
    for target in targets if memory else ():
        missing = sum(use[target.name]) - room_of(target.device)
        if missing > 0:
            short[target.name] = int(missing)
    return Prediction(sum(busy.values()) + moved - spared, busy, moved, nodes, splits, use, short)


def _copies(partition: Partition, split: Split, model: CostModel) -> float:
    """Seconds of the copies before and after the steps of a split."""
    at, copies = split.target.index, 0.0
    for copy in split.copies:
        if copy.kind is not None:
            # A collective is predicted as if its device copied every part to itself.
            for view in (copy.src, *copy.terms):
                copies += model.move(*where_lies(partition, view), at, nbytes(view.shape, view.dtype))
            continue
        device, space = where_lies(partition, copy.src)
        size = copy.nbytes
        if copy.ids is not None:
            rows = copy.dst.shape[0]
            size = size // max(rows, 1) * min(rows, _count(copy.ids))
        if copy.cause in ("pack", "unpack"):
            copies += model.feed(at, size) + model.fetch(split.target.device, size)
        else:
            copies += model.move(device, space, at, size)
    for copy in split.write_backs:
        device, space = where_lies(partition, copy.dst)
        back = next((target.index for target in partition.assignment.targets if target.device is device), at)
        copies += model.move(split.target.device, split.target.space, back, copy.nbytes)
    return copies


def queues(targets: Sequence[Target], *, sharded: bool = False) -> list[int]:
    """For each target the number of its queue: targets with the same one work one after the other, others at once.

    Synchronous targets share one, because the thread of the caller computes there; not where weights are in shards,
    since schedulers then give each target a thread. Targets that compute on the processors share one if they use more
    of them than there are.
    """
    queue = [i if sharded or target.stream.is_async else -1 for i, target in enumerate(targets)]
    if len(set(queue)) > 1 and not sharded:
        used = [_processors(target) for target in targets]
        if sum(used) > usable_cores().usable:
            queue = [-1 if count else i for i, count in zip(queue, used, strict=True)]
    return queue


def _processors(target: Target) -> int:
    """How many processors a target computes on."""
    device, stream = target.device, target.stream
    if device.kind is not Kind.CPU:
        return 0
    if not device.threaded:
        return int(device.features().get("compute_units", 1))
    threads = (stream.inner if isinstance(stream, WorkerStream) else stream).opened_with.get("threads")
    return usable_cores().usable if threads is None else int(getattr(threads, "size", threads))


class _FinishTimes:
    """When the splits of a run end. Each begins after the one before it on its device, those that computed what it
    reads or copies, and those before it that the host itself computes.

    Attributes:
        end: seconds from the beginning of the first split to the end of the last one.
    """

    def __init__(self, partition: Partition) -> None:
        self.end = 0.0
        self._host = 0.0
        targets = partition.assignment.targets
        self._queue = queues(targets, sharded=bool(partition.annotated.sharded))
        self._waits = [not (target.stream.is_async or partition.annotated.sharded) for target in targets]
        self._free = dict.fromkeys(self._queue, 0.0)
        self._made: dict[int, float] = {}  # storage id -> when its value is computed

    def add(self, split: Split, seconds: float) -> None:
        """Add the next split, which takes so many seconds with its copies."""
        at = split.target.index
        read = [storage for copy in split.copies for storage in copy.reads]
        read += [view.storage for item in split.steps for view in item.srcs]
        queue = self._queue[at]
        end = max([self._host, self._free[queue], *[self._made.get(storage, 0.0) for storage in read]]) + seconds
        self._free[queue] = end
        if self._waits[at]:
            self._host = end
        self.end = max(self.end, end)
        written = [view.storage for copy in split.copies for view in copy.writes]
        for storage in (*[item.out.storage for item in split.steps], *written):
            self._made[storage] = end


def room_of(device: Device) -> float:
    """Bytes that a device has for a program: its free memory, or all of a simulated device's; infinite if unknown."""
    free, total = device.mem_info()
    return (total if hasattr(device, "declared") else free) if total else inf


def _count(ids: StorageView) -> int:
    count = 1
    for n in ids.shape:
        count *= n
    return count


def memory_of(partition: Partition) -> dict[str, MemoryUse]:
    """As `Program.memory`, without allocating and without fusing, which would need less."""
    targets = partition.assignment.targets
    plan = allocate(partition, unfused(partition), [()] * len(targets))
    temporaries = {}
    for target, chunks in zip(targets, plan.arenas, strict=True):
        planned = 0 if chunks is None else chunks.nbytes
        temporaries[target.index] = round_up(planned, target.buffer_type.alignment)
    return memory_use(partition, temporaries)


def where_lies(partition: Partition, operand: StorageView) -> tuple[Device | None, MemorySpace]:
    """The device and the space of the memory that an operand lies in."""
    arena = partition.arena_of[operand.storage]
    if arena >= 0:
        target = partition.assignment.targets[arena]
        return target.device, target.space
    tensor, space = partition.owners[operand.storage]
    leaf = tensor.leaf
    if leaf is not None and leaf.placement is not None:
        return leaf.placement.buffer.device, space
    owner = next((target.device for target in partition.assignment.targets if target.space is space), None)
    return owner, space
