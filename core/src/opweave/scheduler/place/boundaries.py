"""Which side of a device boundary a node belongs to: the one where fewer bytes move between memories in each run.

Nodes whose device was only taken from a neighbour lie between decided ones. Where these are on several devices, values
have to cross somewhere in between. From each node next to which something crosses, `Boundaries` moves it and the nodes
that hang together with it to the other device, one after the other in the order of the graph, and stops where the
fewest bytes cross: in chains that is the narrowest place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.capabilities import Capabilities

__all__ = ["Boundaries"]

PATIENCE: Final = 64
"""Nodes that are moved on trial beyond the place where the fewest bytes cross."""


class _Readers(NamedTuple):
    """How many nodes read a value on each target, and at most how many bytes of it."""

    on_target: dict[int, int]
    nbytes: int


@dataclass(eq=False)
class Boundaries:
    """What crosses between memories in an assigned graph.

    Attributes:
        nodes: all computed nodes in order.
        readers: the nodes that read each value, in order, once for each time that they read it.
        capabilities: what devices say of the nodes.
        target_of: their targets so far, which `fewer_bytes` changes; a node without one can be made anywhere.
        decided: the nodes whose device was decided on their own account.
        movable: the targets that a node may move to, none for one that stays.
        reach: by the index of a reading target and that of another one, whether it reaches the other one's memory.
    """

    nodes: Sequence[Tensor]
    readers: Mapping[Tensor, Sequence[Tensor]]
    capabilities: Capabilities
    target_of: dict[Tensor, int]
    decided: Set[Tensor]
    movable: Callable[[Tensor], Sequence[int]]

    def __post_init__(self) -> None:
        targets = self.capabilities.targets
        self.reach = [[a.device.reaches(b.space) for b in targets] for a in targets]
        self._targets_of = cache(self.movable)  # each node is asked about once
        self._position: dict[Tensor, int] = {}
        self._readers: dict[Tensor, _Readers] = {}

    def fewer_bytes(self) -> Set[Tensor]:
        """Move nodes so that each run copies fewer bytes between memories; returns those that have moved.

        A node only moves to a target on which a node was decided, or that holds a placed leaf.
        """
        moved: set[Tensor] = set()
        if all(map(all, self.reach)):
            return moved
        before = dict(self.target_of)
        tried: set[tuple[Tensor, int]] = set()
        ends: dict[tuple[Tensor, int], int] = {}
        for start, to, size in self._ends():
            ends[start, to] = ends.get((start, to), 0) + size
        self._position = {node: i for i, node in enumerate(self.nodes)} if ends else {}
        for (start, to), size in ends.items():
            if (start, to) not in tried and self._may_move(start, to) and self._ties(start) < size:
                moved |= self._shift(start, to, tried)
        return {node for node in moved if self.target_of[node] != before[node]}

    def _ends(self) -> Iterator[tuple[Tensor, int, int]]:
        """The nodes at either end of something that crosses between memories, with the target at the other end and the
        bytes that cross."""
        target, reach, decided = self.target_of.get, self.reach, self.decided
        drawn = {self.target_of[node] for node in decided}
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
                    if not reach[at][there]:
                        if at in drawn:
                            yield root, at, source.nbytes
                        if there in drawn:
                            yield node, there, source.nbytes
                elif root.leaf is not None and node not in decided and (size := self.leaf_bytes(source, node, at)):
                    assert root.leaf.placement is not None
                    device = root.leaf.placement.buffer.device
                    yield from [(node, t.index, size) for t in self.capabilities.computing if t.device is device]

    def leaf_bytes(self, source: Tensor, node: Tensor, at: int) -> int:
        """Bytes of a placed weight or state that a target copies in each run to read it for ``node``, 0 if it reads
        them where and as they lie."""
        leaf = source.memory.leaf
        if leaf is None or leaf.placement is None:
            return 0
        capabilities, target = self.capabilities, self.capabilities.targets[at]
        if not target.device.reaches(leaf.placement.buffer.space):
            return source.nbytes
        unpacks = bool(capabilities.prepared) and capabilities.unpacks(source, capabilities.support(target, node))
        return source.nbytes if unpacks and not capabilities.is_constant(source) else 0

    def _may_move(self, node: Tensor, to: int) -> bool:
        return (
            self.target_of[node] != to
            and to in self._targets_of(node)
            and self.capabilities.supports(self.capabilities.targets[to], node)
        )

    def _ties(self, node: Tensor) -> int:
        """Bytes that would cross if a node left neighbours on its target that cannot move."""
        at = self.target_of[node]
        total = 0
        for reader in self.readers.get(node, ()):
            if self.target_of.get(reader) == at and not self._targets_of(reader):
                total = node.nbytes
                break
        for source in node.srcs:
            if self.target_of.get(source.root) == at and not self._targets_of(source.root):
                total += source.nbytes
        return total

    def _shift(self, start: Tensor, to: int, tried: set[tuple[Tensor, int]]) -> set[Tensor]:
        """Move ``start`` and nodes that hang together with it to a target, as many as save most; returns those."""
        at, position = self.target_of[start], self._position
        forwards = any(self.target_of.get(source.root) == to for source in start.srcs)
        order = 1 if forwards else -1
        moved: list[Tensor] = []
        kept = saved = most = 0
        waiting = [(order * position[start], start)]
        known = {start}
        while waiting and len(moved) - kept <= PATIENCE:
            node = heappop(waiting)[1]
            saved += self._move(node, to)
            moved.append(node)
            if saved > most:
                most, kept = saved, len(moved)
            for other in (*[source.root for source in node.srcs], *self.readers.get(node, ())):
                if other not in known and self.target_of.get(other) == at and self._may_move(other, to):
                    known.add(other)
                    heappush(waiting, (order * position[other], other))
        for node in reversed(moved[kept:]):
            self._move(node, at)
        tried.update((node, to) for node in moved)
        return set(moved[:kept])

    def _move(self, node: Tensor, to: int) -> int:
        """Move a node to a target; returns how many bytes fewer cross then."""
        at, reach, saved = self.target_of[node], self.reach, 0
        read = self._read(node)
        for target in read.on_target:
            saved += read.nbytes * (reach[target][to] - reach[target][at])
        for source in node.srcs:
            saved += self.leaf_bytes(source, node, at) - self.leaf_bytes(source, node, to)
        for root in {source.root for source in node.srcs}:
            read, home = self._read(root), self.target_of.get(root)
            before = self._crossing(read, home)
            read.on_target[to] = read.on_target.get(to, 0) + 1
            read.on_target[at] -= 1
            if not read.on_target[at]:
                del read.on_target[at]
            if root.memory.leaf is None or root.memory.leaf.placement is None:
                saved += before - self._crossing(read, home)
        self.target_of[node] = to
        return saved

    def _crossing(self, read: _Readers, home: int | None) -> int:
        """Bytes of a value that are copied from the target where it is made; inputs are fed to one of their readers."""
        if home is None:
            return read.nbytes * (len(read.on_target) - 1)
        return read.nbytes * sum([not self.reach[target][home] for target in read.on_target])

    def _read(self, value: Tensor) -> _Readers:
        known = self._readers.get(value)
        if known is None:
            count: dict[int, int] = {}
            size = 0
            for reader in dict.fromkeys(self.readers.get(value, ())):
                at = self.target_of.get(reader)
                if at is not None:
                    count[at] = count.get(at, 0) + 1
                    size = max([size, *[source.nbytes for source in reader.srcs if source.root is value]])
            known = self._readers[value] = _Readers(count, size)
        return known
