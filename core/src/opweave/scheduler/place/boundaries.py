"""Which side of a device boundary a node belongs to: the one where fewer bytes move between memories in each run.

Nodes whose device was only taken from a neighbour lie between decided ones. Where these are on several devices, values
have to cross somewhere in between; `Boundaries.fewer_bytes` finds where that costs least.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final

from opweave.scheduler.place.optimize import Problem, solve

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.capabilities import Capabilities

__all__ = ["Boundaries"]


@dataclass(eq=False)
class Boundaries:
    """What crosses between memories in an assigned graph.

    Attributes:
        nodes: all computed nodes in order.
        readers: the nodes that read each value, in order, once for each time that they read it.
        able: what devices say of the nodes.
        target_of: their targets so far; a node without one can be made anywhere.
        decided: the nodes whose device was decided on their own account.
        movable: the targets that a node may move to, none for one that stays.
        reach: by the index of a reading target and that of another one, whether it reaches the other one's memory.
        brought: values that are copied between memories.
        seen: nodes of groups that were examined.
    """

    nodes: Sequence[Tensor]
    readers: Mapping[Tensor, Sequence[Tensor]]
    able: Capabilities
    target_of: Mapping[Tensor, int]
    decided: Set[Tensor]
    movable: Callable[[Tensor], Sequence[int]]

    def __post_init__(self) -> None:
        targets = self.able.targets
        self.reach = [[a.device.reaches(b.space) for b in targets] for a in targets]
        self.brought: set[Tensor] = set()
        self.seen: set[Tensor] = set()
        self._wanted: dict[Tensor, dict[int, tuple[int, int]]] = {}
        self._fixed_nodes: dict[Tensor, bool] = {}

    def fewer_bytes(self) -> dict[Tensor, int]:
        """The nodes that move so that each run copies fewer bytes between memories, and the targets they move to.

        A node only moves to the target of a decided node, or of a placed leaf, to which movable nodes connect it.
        """
        region: dict[Tensor, set[int]] = {}
        if not all(map(all, self.reach)):
            for start, now in self.crossing().items():
                if start not in self.seen and self._ties(start, now) < now:
                    region.update(self.group(start, now))
        return _Region(region, self).solved(self.nodes) if region else {}

    def crossing(self) -> dict[Tensor, int]:
        """The movable nodes at either end of something that crosses between memories, with the bytes that cross on the
        way to each and from it."""
        found: dict[Tensor, int] = {}
        target, decided, brought, count = self.target_of.get, self.decided, self.brought, self._count
        for node in self.nodes:
            at = target(node)
            if at is None:
                continue
            for source in node.srcs:
                root = source if source.base is None else source.base
                there = target(root)
                if there == at:
                    continue
                if there is not None:
                    if not self.reach[at][there]:
                        count(found, node, source.nbytes)
                        if root not in brought:
                            brought.add(root)
                            count(found, root, root.nbytes)
                elif root.leaf is not None and node not in decided and (size := self.leaf_bytes(source, node, at)):
                    count(found, node, size)
        return found

    def _count(self, found: dict[Tensor, int], end: Tensor, size: int) -> None:
        """Add the bytes of something that crosses to what crosses at one of its ends, if that is movable."""
        if end in found:
            found[end] += size
        elif self.movable(end):
            found[end] = size
            if end in self.decided:  # what it reads of leaves has not been counted
                at = self.target_of[end]
                leaves = [source for source in end.srcs if self.target_of.get(source.root) is None]
                found[end] += sum([self.leaf_bytes(source, end, at) for source in leaves])

    def wanted(self, value: Tensor) -> dict[int, tuple[int, int]]:
        """Target -> how many nodes read a value there, and at most how many bytes of it."""
        known = self._wanted.get(value)
        if known is None:
            known = self._wanted[value] = {}
            for reader in dict.fromkeys(self.readers.get(value, ())):
                at = self.target_of.get(reader)
                if at is not None:
                    count, size = known.get(at, (0, 0))
                    sizes = [source.nbytes for source in reader.srcs if source.root is value]
                    known[at] = count + len(sizes), max(size, *sizes)
        return known

    def leaf_bytes(self, source: Tensor, node: Tensor, at: int) -> int:
        """Bytes of a placed weight or state that a target copies in each run to read it for ``node``, 0 if it reads
        them where and as they lie."""
        leaf = source.memory.leaf
        if leaf is None or leaf.placement is None:
            return 0
        able, target = self.able, self.able.targets[at]
        if not target.device.reaches(leaf.placement.buffer.space):
            return source.nbytes
        unpacks = bool(able.prepared) and able.unpacks(source, able.support(target, node))
        return source.nbytes if unpacks and not able.is_constant(source) else 0

    def group(self, start: Tensor, now: int) -> dict[Tensor, set[int]]:
        """``start`` and the movable nodes that might move together with it, with the targets that each may move to.
        ``now`` are the bytes that cross on the way to ``start`` and from it.

        When a node moves, the values between it and neighbours that stay cross; nodes are left out for which these,
        with those of the nodes on the path to them, have at least as many bytes as all values that cross now. Empty if
        nothing can be gained.
        """
        found: dict[Tensor, Sequence[int]] = {}
        near: set[int] = set()
        number = 0
        waiting = [(self._ties(start, now), number, start)]
        while waiting and waiting[0][0] < now:
            cost, _, node = heappop(waiting)
            if node in found:
                continue
            found[node] = self.movable(node)
            near.update(self._anchors(node))
            now += self._crosses(node) if node is not start else 0
            for other in (*[source.root for source in node.srcs], *self.readers.get(node, ())):
                if other not in found and self.movable(other):
                    number += 1
                    heappush(waiting, (cost + self._ties(other), number, other))
        if not found:
            return {}
        self.seen.update(found)
        if not self._may_gain(found, near):
            return {}
        return {node: near.intersection(allowed) for node, allowed in found.items()}

    def _anchors(self, node: Tensor) -> set[int]:
        """The targets of a node and its neighbours where these were decided, and of the placed leaves that it reads."""
        roots = [source.root for source in node.srcs]
        found = {self.target_of[n] for n in (node, *roots, *self.readers.get(node, ())) if n in self.decided}
        for root in roots:
            if root.leaf is not None and root.leaf.placement is not None:
                device = root.leaf.placement.buffer.device
                found.update(target.index for target in self.able.computing if target.device is device)
        return found

    def _crosses(self, node: Tensor) -> int:
        """Bytes that cross on the way to a node, and from it."""
        at = self.target_of[node]
        total = node.nbytes if node in self.brought else 0
        for source in node.srcs:
            there = self.target_of.get(source if source.base is None else source.base)
            if there == at:
                continue
            if there is None:
                total += self.leaf_bytes(source, node, at)
            elif not self.reach[at][there]:
                total += source.nbytes
        return total

    def _ties(self, node: Tensor, enough: float = inf) -> int:
        """Bytes that would cross if a node moved and its decided neighbours on the same target did not; it may count no
        further than ``enough`` bytes."""
        at, target_of, fixed = self.target_of[node], self.target_of, self._fixed
        total = 0
        for reader in self.readers.get(node, ()):
            if target_of.get(reader) == at and fixed(reader):
                total = node.nbytes
                if total >= enough:
                    return total
                break
        kept: dict[Tensor, int] = {}  # a value crosses once, however often it is read
        for source in node.srcs:
            root = source if source.base is None else source.base
            if target_of.get(root) == at and root not in self.brought and fixed(root):
                size = source.nbytes
                kept[root] = min(kept.get(root, size), size)
        return total + sum(kept.values()) if kept else total

    def _fixed(self, node: Tensor) -> bool:
        """Whether a node's target was decided and does not change for the sake of fewer bytes."""
        known = self._fixed_nodes.get(node)
        if known is None:
            known = self._fixed_nodes[node] = node in self.decided and not self.movable(node)
        return known

    def _may_gain(self, group: Collection[Tensor], near: Collection[int]) -> bool:
        """Whether moving nodes of a group might copy fewer bytes: not if it is all on ``near``, the only target around
        it, nor, between several, if even the smallest of its values has as many bytes as cross now."""
        if all({self.target_of[node]}.issuperset(near) for node in group):
            return False
        if len(near) < 2:
            return True
        now, least = 0, -1
        inside: dict[Tensor, dict[int, int]] = {}  # value -> target -> how many of the group read it there
        for node in group:
            inside.setdefault(node, {})
            for source in node.srcs:
                now += self.leaf_bytes(source, node, self.target_of[node])
                counts = inside.setdefault(source.root, {})
                counts[self.target_of[node]] = counts.get(self.target_of[node], 0) + 1
        for value, counts in inside.items():
            at = self.target_of.get(value)
            for to, (count, size) in self.wanted(value).items():
                mine = value in group or to in counts
                if mine:
                    least = size if least < 0 else min(least, size)
                if at is not None and self.reach[to][at]:
                    continue
                if value not in group and count > counts.get(to, 0):
                    if at is not None or (value.leaf is not None and value.leaf.kind == "input"):
                        least = 0  # other nodes need it there anyway
                elif mine and at is not None:
                    now += size
        return 0 <= least < now


class _Region:
    """Movable nodes with what they read and what reads that, as a `Problem` whose costs are bytes."""

    def __init__(self, region: Mapping[Tensor, Collection[int]], boundaries: Boundaries) -> None:
        self.region: Final = region
        self.boundaries: Final = boundaries
        self.able: Final = boundaries.able
        self.target_of: Final = boundaries.target_of
        self.values = {*region, *[source.root for node in region for source in node.srcs]}
        self.stay: Final = 0.5 / len(region)  # moving for no gain costs a little, less than a byte in all
        self.index: dict[Tensor, int] = {}
        self.own: list[list[float]] = []
        self.sources: list[list[int]] = []
        self.sizes: list[int] = []
        self.now: list[int] = []

    def solved(self, nodes: Iterable[Tensor]) -> dict[Tensor, int]:
        """The nodes of the region that move, and where to."""
        for node in [node for node in nodes if node in self.values]:
            if node in self.target_of:
                self._add(node)
        self._add_readers()
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

    def _add_readers(self) -> None:
        """One node on each target that reads all values which nodes outside of the region read there."""
        read: dict[int, list[int]] = {}
        inside: dict[Tensor, dict[int, int]] = {}
        for node in self.region:
            for source in node.srcs:
                counts = inside.setdefault(source.root, {})
                counts[self.target_of[node]] = counts.get(self.target_of[node], 0) + 1
        for value, index in self.index.items():
            for to, (count, size) in self.boundaries.wanted(value).items():
                if count > inside.get(value, {}).get(to, 0):
                    read.setdefault(to, []).append(index)
                    self.sizes[index] = max(self.sizes[index], size)
        for to, values in read.items():
            self.own.append([0.0 if d == to else inf for d in range(len(self.able.targets))])
            self.sources.append(values)
            self.sizes.append(0)
            self.now.append(to)

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
        for source in node.srcs if node in self.region else ():
            value = self._value(source.root, at)
            if value is not None:
                read[value] = None
                self.sizes[value] = max(self.sizes[value], source.nbytes)
        if node in self.region:
            may = {at, *[d for d in self.region[node] if able.supports(able.targets[d], node)]}
            own = [inf] * len(targets)
            for d in may:
                own[d] = sum([self.boundaries.leaf_bytes(s, node, d) for s in node.srcs]) + (
                    0.0 if d == at else self.stay
                )
        else:
            own = [0.0 if d == at else inf for d in targets]
        self._new(node, own, list(read), at)

    def _value(self, root: Tensor, reader: int) -> int | None:
        """The index of a value, ``None`` for one that does not matter here or needs no copy."""
        known = self.index.get(root)
        if known is None and root in self.values and root.leaf is not None and root.leaf.kind == "input":
            return self._new(root, [0.0] * len(self.able.targets), [], reader)
        if root.state is not None and root.state.leaf is not None and root.state.leaf.placement is not None:
            return None  # a version lies where its state lies
        return known

    def _moves(self, size: int) -> list[list[float]]:
        """Bytes that cross between each two targets for a value of ``size``."""
        targets = range(len(self.able.targets))
        return [[0.0 if a == b or self.boundaries.reach[b][a] else float(size) for b in targets] for a in targets]
