"""Placing a graph on a cluster of up to thousands of devices.

Devices of a group are equal, so nodes are placed on groups first, by cost. What a group gets is then cut into
consecutive pieces, one for each device: as few as its memory needs, or, to overlap successive runs, so many that the
longest piece is as short as possible. Both are linear in nodes, whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from opweave.cost.place import live_bytes
from opweave.cost.predict import predict
from opweave.scheduler.scheduler import PlannedGraph, Scheduler

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.program import Outputs
    from opweave.whatif.cluster import Cluster
    from opweave.whatif.simulate import SimulatedDevice

__all__ = ["Load", "cut", "what_if"]


def what_if(outputs: Outputs, cluster: Cluster, *, pipeline: bool = False) -> PlannedGraph:
    """A graph placed on a cluster. Its scheduler has the devices that it uses.

    Args:
        pipeline: spread it so that overlapping runs end as fast as possible one after the other, instead of one run.

    Raises:
        UnsupportedOpError: a node that no group runs.
    """
    profiles = [cluster.profile(group) for group in cluster.groups]
    whole = [
        group.device.twin(group.name, profile, memory=group.device.mem_info()[1] * group.count)
        for group, profile in zip(cluster.groups, profiles, strict=True)
    ]
    with Scheduler(whole, placement="cost") as scheduler:
        first = scheduler.partition(outputs)
    seconds = first.predicted.nodes
    of_group: dict[int, list[Tensor]] = {}
    for node in first.partition.graph.nodes:
        if node.base is None:
            of_group.setdefault(first.partition.assignment.target_of[node], []).append(node)
    live = live_bytes(first.partition.graph.nodes, first.partition.graph.outputs)
    members: list[SimulatedDevice] = []
    pins: dict[Tensor, SimulatedDevice] = {}
    for index, nodes in sorted(of_group.items()):
        group = cluster.groups[index]
        loads = [
            Load(seconds.get(n, 0.0), live[n], {r: r.nbytes for s in n.srcs if (r := s.memory).leaf}) for n in nodes
        ]
        pieces = cut(loads, group.count, group.device.mem_info()[1], pipeline=pipeline)
        start = 0
        for number, stop in enumerate(pieces):
            members.append(group.member(number, profiles[index]))
            pins.update(dict.fromkeys(nodes[start:stop], members[-1]))
            start = stop
    if not members:
        members.append(cluster.groups[0].member(0, profiles[0]))
    with Scheduler(members) as scheduler:
        plan = scheduler.partition(outputs, pins)
    assignment = plan.partition.assignment.with_causes(dict.fromkeys(pins, "cost"))
    return PlannedGraph(replace(plan.partition, assignment=assignment, prediction=predict(plan.partition)))


class Load(NamedTuple):
    """What a node asks of its device: seconds, bytes of temporaries while it runs, leaves that must lie there."""

    seconds: float
    live: int
    leaves: Mapping[Tensor, int]


def cut(loads: Sequence[Load], count: int, memory: int, *, pipeline: bool) -> list[int]:
    """The end of each of at most ``count`` consecutive pieces.

    A piece begins where memory (0: unlimited) would not suffice; with ``pipeline`` also so that the longest piece takes
    as little time as possible. What remains at the last device is its own, whether it fits or not.
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
    """Pieces filled one after the other, each up to ``memory`` bytes and ``most`` seconds."""
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
