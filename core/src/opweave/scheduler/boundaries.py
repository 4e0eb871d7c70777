"""Which side of a device boundary a node belongs to: the one where fewer bytes move between memories in each run.

Nodes whose device was only taken from a neighbour lie between decided ones. Where these are on several devices, values
have to cross somewhere in between; `fewer_bytes` finds where that costs least. `PlacedWeights` knows the weights that
nodes read where they lie, and which of them are so small that moving them is a matter of bytes too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from opweave.contract.space import Usage

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.assign import Capabilities

__all__ = ["PlacedWeights", "fewer_bytes"]


class PlacedWeights:
    """The placed weights that nodes read.

    Attributes:
        of: node -> its placed weights, the largest first; only nodes that read some.
    """

    def __init__(self, nodes: Iterable[Tensor]) -> None:
        self.of: dict[Tensor, list[Tensor]] = {}
        self._readers: dict[Tensor, int] = {}
        self._least: dict[Tensor, int] = {}  # weight -> bytes of the smallest value that it is combined with
        for node in nodes:
            found = [source.root for source in node.srcs if _is_placed_weight(source.root)]
            if not found:
                continue
            weights = sorted(dict.fromkeys(found), key=lambda weight: -weight.nbytes)
            self.of[node] = weights
            read = [s.nbytes for s in node.srcs if s.root.leaf is None or s.root.leaf.kind == "input"]
            value = max([node.nbytes, *read])
            for weight in weights:
                self._readers[weight] = self._readers.get(weight, 0) + 1
                self._least[weight] = min(self._least.get(weight, value), value)

    def movable(self, node: Tensor, able: Capabilities, offloading: Collection[int]) -> list[int]:
        """The targets to which small weights let their reader ``node`` go for the sake of fewer bytes; else none.

        A weight is small where it has fewer bytes than the values that it is combined with, and its place says little
        about the node: a table (of frequencies, say) that several nodes read, which no device but one can hold; or a
        weight in host memory, for targets that bring weights from there for other nodes.
        """
        allowed = [target.index for target in able.computing]
        for weight in self.of[node]:
            leaf = weight.leaf
            assert leaf is not None
            assert leaf.placement is not None
            if weight.nbytes >= self._least[weight]:
                return []
            if self._readers[weight] == 1:
                bring = offloading if leaf.placement.buffer.is_host else ()
                space = leaf.placement.buffer.space
                allowed = [d for d in allowed if d in bring or able.targets[d].device.reaches(space)]
        return allowed


def _is_placed_weight(tensor: Tensor) -> bool:
    leaf = tensor.leaf
    if leaf is None or leaf.kind != "weight" or leaf.placement is None:
        return False
    return leaf.placement.buffer.usage is Usage.WEIGHTS


def fewer_bytes(
    nodes: Sequence[Tensor],
    able: Capabilities,
    target_of: Mapping[Tensor, int],
    decided: Collection[Tensor],
    movable: Mapping[Tensor, Collection[int]],
) -> dict[Tensor, int]:
    """The nodes that move so that each run copies fewer bytes between memories, and the targets they move to.

    A node only moves to where a decided node, or a placed leaf, is that it is connected with through movable nodes.

    Args:
        nodes: all computed nodes in order.
        target_of: their targets so far; a node without one can be made anywhere.
        decided: nodes whose device was decided on their own account.
        movable: the nodes that may move -> the targets that they may move to.
    """
    if not movable:
        return {}
    reach = [[a.device.reaches(b.space) for b in able.targets] for a in able.targets]  # [reader][where the value lies]
    starts = _crossing(nodes, able, target_of, movable, reach)
    if not starts:
        return {}
    readers: dict[Tensor, list[Tensor]] = {}
    for node in nodes:
        for source in node.srcs:
            readers.setdefault(source.root, []).append(node)
    region: dict[Tensor, set[int]] = {}
    for start in starts:
        if start not in region:
            group = _connected(start, movable, readers)
            near = _anchors(group, able, target_of, decided, readers)
            region.update((node, near.intersection(movable[node])) for node in group)
    if all(near <= {target_of[node]} for node, near in region.items()):
        return {}
    return _Region(region, readers, able, target_of, reach).solved(nodes)


def _crossing(
    nodes: Sequence[Tensor],
    able: Capabilities,
    target_of: Mapping[Tensor, int],
    movable: Mapping[Tensor, Collection[int]],
    reach: Sequence[Sequence[bool]],
) -> dict[Tensor, None]:
    """The movable nodes at either end of something that crosses between memories."""
    found: dict[Tensor, None] = {}
    for node in nodes:
        at = target_of.get(node)
        if at is None:
            continue
        row = reach[at]
        for source in node.srcs:
            root = source if source.base is None else source.base
            there = target_of.get(root)
            if there == at:
                continue
            if there is not None:
                if not row[there]:
                    found.update((end, None) for end in (node, root) if end in movable)
            elif node in movable and _leaf_bytes(root, able, at):
                found[node] = None
    return found


def _leaf_bytes(root: Tensor, able: Capabilities, target: int) -> int:
    """Bytes of a placed weight or state that a target copies in each run to read it, 0 if it reaches them."""
    leaf = root.memory.leaf
    if leaf is None or leaf.placement is None or able.targets[target].device.reaches(leaf.placement.buffer.space):
        return 0
    return root.nbytes


def _connected(
    start: Tensor, movable: Collection[Tensor], readers: Mapping[Tensor, Sequence[Tensor]]
) -> dict[Tensor, None]:
    """``start`` and the movable nodes that are connected with it through movable nodes."""
    group = {start: None}
    stack = [start]
    while stack:
        node = stack.pop()
        for other in (*[source.root for source in node.srcs], *readers.get(node, ())):
            if other in movable and other not in group:
                group[other] = None
                stack.append(other)
    return group


def _anchors(
    group: Collection[Tensor],
    able: Capabilities,
    target_of: Mapping[Tensor, int],
    decided: Collection[Tensor],
    readers: Mapping[Tensor, Sequence[Tensor]],
) -> set[int]:
    """The targets of the decided nodes in or beside a group, and those that hold placed leaves which it reads."""
    found: set[int] = set()
    for node in group:
        roots = [source.root for source in node.srcs]
        found.update(target_of[other] for other in (node, *roots, *readers.get(node, ())) if other in decided)
        for root in roots:
            leaf = root.memory.leaf
            if leaf is not None and leaf.placement is not None:
                found.update(t.index for t in able.computing if t.device is leaf.placement.buffer.device)
    return found


class _Region:
    """Movable nodes with what they read and what reads that, as a `Problem` whose costs are bytes."""

    def __init__(
        self,
        region: Mapping[Tensor, Collection[int]],
        readers: Mapping[Tensor, Sequence[Tensor]],
        able: Capabilities,
        target_of: Mapping[Tensor, int],
        reach: Sequence[Sequence[bool]],
    ) -> None:
        self.region: Final = region
        self.able: Final = able
        self.target_of: Final = target_of
        self.reach: Final = reach
        self.values = {*region, *[source.root for node in region for source in node.srcs]}
        self.members = {*self.values, *[reader for value in self.values for reader in readers.get(value, ())]}
        self.stay: Final = 0.5 / len(region)  # moving for no gain costs a little, less than a byte in all
        self.index: dict[Tensor, int] = {}
        self.own: list[list[float]] = []
        self.sources: list[list[int]] = []
        self.sizes: list[int] = []
        self.now: list[int] = []

    def solved(self, nodes: Iterable[Tensor]) -> dict[Tensor, int]:
        from opweave.cost.optimize import Problem, solve  # most graphs cross nowhere

        for node in nodes:
            if node in self.members and node in self.target_of:
                self._add(node)
        tables = {size: self._moves(size) for size in set(self.sizes)}
        problem = Problem(self.own, self.sources, [tables[size] for size in self.sizes])
        solution = solve(problem)
        if problem.seconds(self.now) - solution.seconds < self.stay:
            return {}
        return {
            node: solution.targets[i]
            for node, i in self.index.items()
            if node in self.region and solution.targets[i] != self.now[i]
        }

    def _new(self, tensor: Tensor, own: list[float], sources: list[int], now: int) -> int:
        self.index[tensor] = index = len(self.own)
        self.own.append(own)
        self.sources.append(sources)
        self.sizes.append(0)
        self.now.append(now)
        return index

    def _add(self, node: Tensor) -> None:
        able, at = self.able, self.target_of[node]
        targets = range(len(able.targets))
        read: dict[int, None] = {}
        for source in node.srcs:
            value = self._value(source.root, at)
            if value is not None:
                read[value] = None
                self.sizes[value] = max(self.sizes[value], source.nbytes)
        if node in self.region:
            may = {at, *[d for d in self.region[node] if able.supports(able.targets[d], node)]}
            own = [inf] * len(targets)
            for d in may:
                own[d] = sum([_leaf_bytes(s.root, able, d) for s in node.srcs]) + (0.0 if d == at else self.stay)
        else:
            own = [0.0 if d == at else inf for d in targets]
        self._new(node, own, list(read), at)

    def _value(self, root: Tensor, reader: int) -> int | None:
        """The index of a value, ``None`` for what does not matter here or lies everywhere it is wanted."""
        known = self.index.get(root)
        if known is None and root in self.values and root.leaf is not None and root.leaf.kind == "input":
            return self._new(root, [0.0] * len(self.able.targets), [], reader)
        if root.state is not None and root.state.leaf is not None and root.state.leaf.placement is not None:
            return None  # a version lies where its state lies
        return known

    def _moves(self, size: int) -> list[list[float]]:
        """Bytes that cross between each two targets for a value of ``size``."""
        targets = range(len(self.able.targets))
        return [[0.0 if a == b or self.reach[b][a] else float(size) for b in targets] for a in targets]
