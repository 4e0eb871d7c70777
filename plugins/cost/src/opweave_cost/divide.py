"""Placing a graph on a cluster of up to thousands of devices.

The devices of a group are identical, so nodes are placed on groups first, by cost. The nodes of a group are then
divided into consecutive parts, one for each device: as few parts as its memory allows, or, for pipelining, so many that
the slowest part is as fast as possible. Both are linear in nodes, whatever the number of devices. A combined group is
not divided so: all of its devices compute parts of each node that reads a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from opweave.errors import LayoutError
from opweave.graph.graph import Graph
from opweave.scheduler.place.arguments import Outputs, checked_outputs
from opweave.scheduler.program import PlannedGraph
from opweave.scheduler.scheduler import Scheduler
from opweave.sharding.axes import axes_of
from opweave.sharding.placing import Sharded, shards_of
from opweave_cost.place import live_bytes
from opweave_cost.predict import predict

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Tensor
    from opweave_cost.cluster import Cluster
    from opweave_cost.cost_model import Profile
    from opweave_cost.simulation import SimulatedDevice

__all__ = ["Load", "Measure", "divide", "what_if"]

Measure = Callable[["Iterable[Tensor]", "Device"], None]


def what_if(
    outputs: Outputs, cluster: Cluster, *, pipeline: bool = False, measure: Measure | None = None
) -> PlannedGraph:
    """Place a graph on a cluster.

    Args:
        outputs, cluster: what `Scheduler.build` takes; what `read_cluster` returns.
        pipeline: minimize the time between the ends of overlapping runs, instead of the time of one run.
        measure: measures what nodes take on the device that a group is like, if that one is here and the group has no
            figures of its own: called before nodes are placed, and again for the parts of those that are split.

    Returns:
        The plan, with a prediction. Its targets are the devices of the cluster that are used.

    Raises:
        UnsupportedOpError: no group supports a node.
    """
    profiles = [cluster.profile(group) for group in cluster.groups]
    if measure is not None:
        graph = Graph(checked_outputs(outputs)[0])
        for like in dict.fromkeys(group.device.same_speed for group in cluster.groups):
            if like is not None:
                measure(graph.nodes, like)
    whole = [
        group.device.renamed(group.name, profile, memory=group.device.mem_info()[1] * group.count)
        for group, profile in zip(cluster.groups, profiles, strict=True)
    ]
    with Scheduler(whole, placement="cost") as scheduler:
        first = scheduler.partition(outputs)
    members, pins, split = _members(cluster, profiles, first, pipeline=pipeline)
    try:
        with Scheduler(members) as scheduler:
            plan = scheduler.partition(outputs, pins)
    finally:
        for weight in split:
            assert weight.leaf is not None
            weight.leaf.shards = None  # the weights belong to the caller
    if measure is not None and split:
        for member in members:
            if member.same_speed is not None:
                measure([n for n, at in plan.partition.assignment.target_of.items()
                         if plan.partition.assignment.targets[at].device is member], member.same_speed)  # fmt: skip
    assignment = plan.partition.assignment.with_causes(dict.fromkeys(pins, "cost"))
    return PlannedGraph(replace(plan.partition, assignment=assignment, prediction=predict(plan.partition)))


def _members(
    cluster: Cluster, profiles: Sequence[Profile], first: PlannedGraph, *, pipeline: bool
) -> tuple[list[SimulatedDevice], dict[Tensor, SimulatedDevice], list[Tensor]]:
    """The devices that a graph, planned for whole groups, is placed on, where nodes go on them, and the weights that
    are split over those of a combined group."""
    seconds, graph = first.predicted.nodes, first.partition.graph
    of_group: dict[int, list[Tensor]] = {}
    for node in graph.nodes:
        if node.base is None:
            of_group.setdefault(first.partition.assignment.target_of[node], []).append(node)
    live = live_bytes(graph.nodes, graph.outputs)
    members: list[SimulatedDevice] = []
    pins: dict[Tensor, SimulatedDevice] = {}
    split: list[Tensor] = []
    for index, nodes in sorted(of_group.items()):
        group = cluster.groups[index]
        if group.combined and group.count > 1:
            together = [group.member(number, profiles[index]) for number in range(group.count)]
            split += _split_weights(graph, nodes, together)
            members += together
            continue
        loads = [
            Load(seconds.get(n, 0.0), live[n], {r: r.nbytes for s in n.srcs if (r := s.memory).leaf}) for n in nodes
        ]
        ends = divide(loads, group.count, group.device.mem_info()[1], pipeline=pipeline)
        start = 0
        for number, stop in enumerate(ends):
            members.append(group.member(number, profiles[index]))
            pins.update(dict.fromkeys(nodes[start:stop], members[-1]))
            start = stop
    return members or [cluster.groups[0].member(0, profiles[0])], pins, split


def _split_weights(graph: Graph, nodes: Collection[Tensor], devices: Sequence[SimulatedDevice]) -> list[Tensor]:
    """Split the weights that some nodes of a graph read over devices, without memory; returns those that are."""
    names, split = tuple([device.name for device in devices]), []
    read = {source for node in nodes for source in node.srcs}
    whole = {t for t in read if t.leaf is not None and t.leaf.kind == "weight" and t.leaf.shards is None}
    for weight, axis in axes_of(graph, whole).items():
        assert weight.leaf is not None
        try:
            weight.leaf.shards = shards_of(weight, Sharded(devices, axis), [1.0] * len(devices), names)
        except LayoutError:
            continue  # too few whole blocks: it stays whole
        split.append(weight)
    return split


class Load(NamedTuple):
    """What a node costs its device: seconds, bytes of temporaries while it runs, and the leaves it reads (-> bytes)."""

    seconds: float
    live: int
    leaves: Mapping[Tensor, int]


def divide(loads: Sequence[Load], count: int, memory: int, *, pipeline: bool) -> list[int]:
    """Divide loads into at most ``count`` consecutive parts; returns the end index of each.

    A new part begins where the memory of one device (bytes, 0: unlimited) would be exceeded; with ``pipeline`` the
    slowest part is also as fast as possible. The last part takes all that remains, even if it exceeds the memory.
    """
    total = sum(load.seconds for load in loads)
    if not pipeline:
        return _fill(loads, count, memory, total * 2 + 1)
    low, high = max((load.seconds for load in loads), default=0.0), total
    for _ in range(40):
        middle = (low + high) / 2
        if len(_fill(loads, len(loads) + 1, memory, middle)) <= count:
            high = middle
        else:
            low = middle
    return _fill(loads, count, memory, high * (1 + 1e-9))


def _fill(loads: Sequence[Load], count: int, memory: int, most: float) -> list[int]:
    """Fill parts one after the other, each up to ``memory`` bytes and ``most`` seconds."""
    ends: list[int] = []
    seconds, live, leaves = 0.0, 0, set[Any]()
    size = 0
    for i, load in enumerate(loads):
        more = sum(n for leaf, n in load.leaves.items() if leaf not in leaves)
        full = memory and size + more + max(live, load.live) > memory
        begun = i > (ends[-1] if ends else 0)
        if begun and len(ends) + 1 < count and (full or seconds + load.seconds > most):
            ends.append(i)
            seconds, live, size = 0.0, 0, 0
            leaves.clear()
            more = sum(load.leaves.values())
        leaves.update(load.leaves)
        seconds, live, size = seconds + load.seconds, max(live, load.live), size + more
    return [*ends, len(loads)] if loads else []
