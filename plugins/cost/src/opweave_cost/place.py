"""Placement by cost: chooses the assignment whose run is predicted to take the least time.

Candidates are the assignment that `solve` finds, with devices that work at once also that of `list_schedule`, the one
by the rules of priority, and for each device the one that places on it every node that it supports; so the choice is
never predicted to be worse than any of these. Of those that do not fit the devices' memory, nodes are moved to other
devices. Pins, and nodes that write placed states, are fixed. Nodes that read placed weights are not: running them
elsewhere costs a copy per run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from opweave.scheduler.place.assign import target_at
from opweave.scheduler.plan.partition import partition
from opweave_cost.cost_model import CostModel
from opweave_cost.optimize import Problem, solve
from opweave_cost.predict import predict, queues, room_of
from opweave_cost.store import profile

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.place.strategy import PlacementProblem
    from opweave.scheduler.place.target import Target
    from opweave_cost.cost_model import Profile

__all__ = ["list_schedule", "live_bytes", "place_by_cost"]

CHOICES: Final = frozenset(
    ("weights", "expand-down", "expand-up", "most-inputs", "state", "priority", "reader", "upgrade", "host")
)  # fmt: skip
"""Causes that are replaced by ``cost`` if the rules of priority give the best candidate."""


def place_by_cost(problem: PlacementProblem) -> tuple[Assignment, Prediction]:
    """The assignment that is predicted to take the least time, among those that fit the memory if there are any.

    Devices without a profile are measured first, which takes seconds.

    Raises:
        UnsupportedOpError: as `assign`.
    """
    graph, targets, rules = problem.graph, problem.targets, problem.by_priority
    model = CostModel(targets, [profile(target.device) for target in targets])
    assignments = [rules]
    if len(targets) > 1:
        choices = [*_solved(graph, rules, problem.fixed, model), *_single(rules, model)]
        assignments += [problem.assigned(choice, "cost") for choice in choices]
    partitions = [partition(problem.annotated, assignment) for assignment in assignments]
    seconds = [predict(parts, model, memory=False).seconds for parts in partitions]
    found: list[tuple[Assignment, Prediction]] = []
    for index in sorted(range(len(partitions)), key=seconds.__getitem__):
        found.append((assignments[index], predict(partitions[index], model)))
        if not found[-1][1].short:
            break  # it fits, and all others take longer
        if len(targets) > 1:
            spilled = problem.assigned(_spilled(graph, assignments[index], problem.fixed, model), "cost")
            found.append((spilled, predict(partition(problem.annotated, spilled), model)))
    best, prediction = min(found, key=lambda each: (sum(each[1].short.values()), each[1].seconds))
    if best is rules and len(targets) > 1:
        best = rules.with_causes({node: "cost" for node, cause in rules.causes.items() if cause in CHOICES})
    return best, prediction


def list_schedule(problem: Problem, queues: Sequence[int]) -> list[int]:
    """An assignment for targets that work at once, except those with the same number in ``queues``. Each node, in the
    order in which targets run them, goes to the target where it ends earliest, after the earlier nodes of that queue
    and the copies of what it reads: list scheduling for unlike processors (HEFT: Topcuoglu, Hariri and Wu, 2002).
    """
    free = dict.fromkeys(queues, 0.0)
    chosen: list[int] = []
    ends: list[float] = []
    for own, sources in zip(problem.own, problem.sources, strict=True):
        when = [
            max([free[queues[d]], *[ends[u] + problem.moves[u][chosen[u]][d] for u in sources]]) + s
            for d, s in enumerate(own)
        ]
        at = min(range(len(when)), key=when.__getitem__)
        free[queues[at]] = when[at]
        chosen.append(at)
        ends.append(when[at])
    return chosen


def _single(rules: Assignment, model: CostModel) -> Iterator[dict[Tensor, int]]:
    """For each target all nodes that it supports; identical targets are tried once, except where leaves are placed."""
    nodes = [node for node in rules.target_of if node.op is not None and node.base is None]
    homes = {at for tensor, at in rules.target_of.items() if tensor.op is None}
    tried: list[tuple[Profile, list[Tensor]]] = []
    for target in rules.targets:
        runs = [node for node in nodes if rules.capabilities.supports(target, node)]
        known = model.profiles[target.index]._replace(device="")
        if target.index in homes or (known, runs) not in tried:
            tried.append((known, runs))
            yield dict.fromkeys(runs, target.index)


class _FreeMemory:
    """The memory that a device has left while nodes are placed on it one after the other."""

    def __init__(self, device: Device) -> None:
        self._left = room_of(device)
        self._leaves: set[Tensor] = set()

    def _more(self, leaves: Collection[Tensor]) -> int:
        return sum([leaf.nbytes for leaf in leaves if leaf not in self._leaves])

    def fits(self, leaves: Collection[Tensor], live: int) -> bool:
        return self._more(leaves) + live <= self._left

    def reserve(self, leaves: Collection[Tensor]) -> None:
        self._left -= self._more(leaves)
        self._leaves.update(leaves)


def _spilled(graph: Graph, chosen: Assignment, fixed: Mapping[Tensor, int], model: CostModel) -> dict[Tensor, int]:
    """``chosen``, but from the first node on that does not fit a device's memory, that device's nodes go to the fastest
    one with enough memory."""
    live = live_bytes(graph.nodes, graph.outputs)
    memories = [_FreeMemory(target.device) for target in chosen.targets]
    instead = list(range(len(memories)))  # target in `chosen` -> the target that now gets its nodes
    result: dict[Tensor, int] = {}
    for node in graph.nodes:
        if node.base is not None:
            continue
        leaves = {source.memory for source in node.srcs if source.memory.leaf is not None}
        wanted = chosen.target_of[node]
        at = fixed.get(node, instead[wanted])
        if node not in fixed and not memories[at].fits(leaves, live[node]):
            signature = chosen.capabilities.signature(node)
            others = [
                (model.step(node, signature, target.index), target.index)
                for target, memory in zip(chosen.targets, memories, strict=True)
                if memory.fits(leaves, live[node]) and chosen.capabilities.supports(target, node)
            ]
            if others:
                at = instead[wanted] = min(others)[1]
        memories[at].reserve(leaves)
        result[node] = at
    return result


def live_bytes(nodes: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[Tensor, int]:
    """For each node the bytes of the computed values that are alive when it runs, its own included."""
    order = [n for n in nodes if n.base is None]
    last = {n: i for i, n in enumerate(order)}
    for i, node in enumerate(order):
        for source in node.srcs:
            if source.root in last:
                last[source.root] = i
    for output in outputs:
        if output.root in last:
            last[output.root] = len(order)
    ends: dict[int, int] = {}
    result = {}
    alive = 0
    for i, node in enumerate(order):
        size = node.nbytes if node.state is None else 0
        alive += size
        ends[last[node]] = ends.get(last[node], 0) + size
        result[node] = alive
        alive -= ends.pop(i, 0)
    return result


def _solved(
    graph: Graph, rules: Assignment, fixed: Mapping[Tensor, int], model: CostModel
) -> Iterator[dict[Tensor, int]]:
    """The targets by `solve`, as if devices took turns; where some work at once also those by `list_schedule`."""
    builder = _ProblemBuilder(rules, fixed, model)
    for node in graph.nodes:
        if node.base is None:
            builder.add(node)
    builder.add_results(graph)
    problem = builder.problem
    found = [solve(problem).targets]
    at_once = queues(rules.targets)
    if len(set(at_once)) > 1:
        found.append(list_schedule(problem, at_once))
    for chosen in found:
        yield {node: chosen[index] for node, index in builder.index.items() if node.op is not None}


class _ProblemBuilder:
    """Turns a graph into a `Problem`. Inputs and placed leaves are nodes too: reading them from another device costs a
    copy."""

    def __init__(self, rules: Assignment, fixed: Mapping[Tensor, int], model: CostModel) -> None:
        self.rules: Final = rules
        self.fixed: Final = fixed
        self.model: Final = model
        self.targets: Final = rules.targets
        self.index: dict[Tensor, int] = {}
        self.own: list[list[float]] = []
        self.sources: list[tuple[int, ...]] = []
        self.sizes: list[int] = []  # bytes that readers elsewhere would copy
        self.home: dict[Tensor, int] = {}  # a state without memory -> the node that decides where it will lie

    @property
    def problem(self) -> Problem:
        return Problem(self.own, self.sources, [self.model.table(size) for size in self.sizes])

    def _new(self, tensor: Tensor, own: list[float], sources: tuple[int, ...]) -> int:
        self.index[tensor] = index = len(self.own)
        self.own.append(own)
        self.sources.append(sources)
        self.sizes.append(0)
        return index

    def add(self, node: Tensor) -> None:
        """Add a computed node, and the leaves that it is the first to read."""
        signature = self.rules.capabilities.signature(node)
        own = [self.model.step(node, signature, target.index) for target in self.targets]
        if self.rules.capabilities.prepared:
            own = [seconds + self._unpacking(node, target) for seconds, target in zip(own, self.targets, strict=True)]
        at = self.fixed.get(node)
        if at is not None:
            own = [seconds if d == at else inf for d, seconds in enumerate(own)]
        read: dict[int, None] = {}
        for source in node.srcs:
            value = self._value(source.root, own)
            if value is not None:
                read[value] = None
                writes = node.op is not None and node.op.writes and source is node.srcs[0]
                # A state that is written on another device is copied there and back.
                self.sizes[value] = max(self.sizes[value], source.nbytes * (2 if writes else 1))
        index = self._new(node, own, tuple(read))
        if node.state is not None:
            self.home.setdefault(node.state, index)

    def _unpacking(self, node: Tensor, target: Target) -> float:
        """Seconds of copying to plain memory, in each run, the sources that the target reaches but cannot read."""
        able, seconds = self.rules.capabilities, 0.0
        support = able.support(target, node)
        for source in node.srcs:
            each_run = able.unpacks(source, support) and not able.is_constant(source)
            if each_run and target.device.reaches(able.prepared[source.memory].space):
                seconds += self.model.fetch(target.device, source.nbytes) + self.model.feed(target.index, source.nbytes)
        return seconds

    def _value(self, root: Tensor, own: list[float]) -> int | None:
        """The number of the problem's node for a value; ``None`` for leaves that are uploaded where they are used."""
        known = self.index.get(root)
        if known is not None or root.leaf is None:
            return known
        leaf = root.leaf
        if leaf.kind == "input":
            pinned = self.rules.target_of[root] if self.rules.causes[root] == "pinned" else None
            feeds = [self.model.feed(target.index, root.nbytes) for target in self.targets]
            return self._new(root, [s if pinned in (None, d) else inf for d, s in enumerate(feeds)], ())
        if leaf.placement is None:
            return self.home.get(root)
        home = target_at(self.targets, leaf.placement)
        if home is None:
            if self.rules.capabilities.is_constant(root):
                return None  # copied once
            buffer = leaf.placement.buffer
            for target in self.targets:
                own[target.index] += self.model.move(buffer.device, buffer.space, target.index, root.nbytes)
            return None
        return self._new(root, [0.0 if d == home else inf for d in range(len(self.targets))], ())

    def add_results(self, graph: Graph) -> None:
        """Add the cost of copying the results to the host."""
        for output in graph.outputs:
            index = self.index.get(output.root)
            if index is not None and output.op is not None:
                for target in self.targets:
                    self.own[index][target.index] += self.model.fetch(target.device, output.nbytes)
