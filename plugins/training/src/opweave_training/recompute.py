"""`less_memory`: a graph that computes some values twice, so that its plan takes less memory. `Graph` to `Graph`.

A value that is read early and again much later, as activations are by the backward graph, takes memory in between. If
it is computed again before its late readers, only its sources take memory: Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016. What is computed again waits for the node before its first late reader (`opweave.after`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Final

from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor, with_sources
from opweave.ops.movement import after

__all__ = ["less_memory"]

SMALLEST: Final = 4096
"""Values with fewer bytes are not computed again."""

PEAK_SHARE: Final = 0.9
"""Values are computed again if they are not read while at least this share of the most memory is in use."""

SEGMENTS: Final = (32, 24, 16, 12, 8, 6, 4, 3, 2)
"""Into how many segments a graph is divided where computing single values again is not enough."""


def less_memory(
    graph: Graph, limit: int, planned: Callable[[Graph, Mapping[Tensor, Tensor], Mapping[Tensor, Tensor]], int]
) -> tuple[Graph, dict[Tensor, Tensor], dict[Tensor, Tensor], int]:
    """The graph, changed to compute as little as possible again for a plan that takes at most ``limit`` bytes.

    Values are tried in the order of what computing them again costs for each byte that it saves, by bisection. Where
    all of them save too little, the values are divided into segments of about equally many bytes, of which only the
    last value is kept (Chen et al., algorithm 3): into as many as fit the limit.

    Args:
        graph: the graph as it was built.
        limit: bytes of temporaries.
        planned: bytes that the plan of such a graph takes, of which the other arguments say what replaces what, and
            what is computed again.

    Returns:
        The graph whose plan takes no more than the limit, else the one that takes least; for each node that reads
        something that is computed again, what is in its place; for each node that computes something again, what that
        is; and the bytes of that plan.
    """
    best: tuple[Graph, dict[Tensor, Tensor], dict[Tensor, Tensor]] = graph, {}, {}
    least = planned(*best)
    if least <= limit:
        return *best, least
    values = _Values(graph)

    def fits(chosen: Collection[Tensor]) -> bool:
        nonlocal best, least
        tried = _rewritten(graph, values.with_sources(chosen))
        size = planned(*tried)
        if size <= limit or size < least:
            best, least = tried, size
        return size <= limit

    rated = values.rated()
    low, high = 1, len(rated)
    while low <= high:
        number = (low + high) // 2
        if fits(rated[:number]):
            high = number - 1
        else:
            low = number + 1
    if least > limit:
        any(fits(chosen) for chosen in values.segments())
    return *best, least


class _Values:
    """The values of a graph that can be computed again, and when they are read.

    Attributes:
        late: value that nobody reads while nearly the most memory is in use -> position of its first reader after it.
    """

    def __init__(self, graph: Graph) -> None:
        self._position: Final = {node: i for i, node in enumerate(graph.nodes)}
        self._nodes: Final = graph.nodes
        self._kept: Final = {output.root for output in graph.outputs}
        self._read: Final[dict[Tensor, list[int]]] = {}
        self._overwritten: Final[dict[Tensor, int]] = {}
        for node, at in self._position.items():
            assert node.op is not None
            if node.op.writes:
                self._overwritten[node.srcs[0].root] = at
            if not node.is_view:
                for source in node.srcs:
                    self._read.setdefault(source.root, []).append(at)
        sizes = self._sizes()
        peak = sizes.index(max(sizes))
        full = [at for at, size in enumerate(sizes) if size >= PEAK_SHARE * sizes[peak]]
        self.late: Final[dict[Tensor, int]] = {}
        self._over_peak: Final[list[Tensor]] = []
        for node, at in self._position.items():
            moments = [at, *self._read.get(node, ())]
            for first, then in pairwise(moments):
                # What is read just before is still there in any case.
                spans = then - first >= 3 and bisect_left(full, then) > bisect_right(full, first)
                if spans and node.nbytes >= SMALLEST and self._is_recomputable(node, then):
                    self.late[node] = then
                    if first < peak < then:
                        self._over_peak.append(node)
                    break

    def _sizes(self) -> list[int]:
        """The bytes of the values that are in use at each position."""
        changes = [0] * (len(self._nodes) + 1)
        for node, at in self._position.items():
            assert node.op is not None
            if not node.is_view and not node.op.writes:
                changes[at] += node.nbytes
                if node not in self._kept:
                    changes[self._read.get(node, [at])[-1] + 1] -= node.nbytes
        return list(accumulate(changes))

    def _is_recomputable(self, node: Tensor, at: int) -> bool:
        """Whether a node can be computed again at a position: from versions of states that are still there."""
        assert node.op is not None
        return not (
            node.is_view or node.op.writes or node.op.name == "custom" or not node.srcs or node in self._kept
            or any(self._overwritten.get(source.root, at) < at for source in node.srcs)
        )  # fmt: skip

    def with_sources(self, chosen: Collection[Tensor]) -> dict[Tensor, int]:
        """Values to compute again, with the position from which readers read the new ones: the chosen ones and those of
        their sources that are no longer in memory by then."""
        again = {node: self.late[node] for node in chosen}
        queue = sorted(again, key=self._position.__getitem__)
        while queue:
            node = queue.pop()
            at = again[node]
            for root in {source.root for source in node.srcs}:
                if root in again:
                    again[root] = min(again[root], at)
                elif root.op is not None and self._read[root][-1] < at and self._is_recomputable(root, at):
                    again[root] = at
                    insort(queue, root, key=self._position.__getitem__)
        return again

    def rated(self) -> list[Tensor]:
        """Values that save memory each for itself, the cheapest for each byte first."""
        rows = []
        for node, end in self.late.items():
            again = self.with_sources((node,))
            roots = {source.root for value in again for source in value.srcs} - set(again)
            # Sources that would otherwise be gone by then live longer.
            saved = node.nbytes - sum(r.nbytes for r in roots if r.op is not None and self._read[r][-1] < end)
            if saved > 0:
                rows.append((sum(map(_work, again)) / saved, self._position[node], node))
        return [node for _, _, node in sorted(rows, key=lambda row: row[:2])]

    def segments(self) -> Iterator[list[Tensor]]:
        """Values that are computed again if the last one of each segment is kept, for fewer and fewer segments."""
        total = sum(node.nbytes for node in self._over_peak)
        for number in SEGMENTS:
            chosen, size = [], 0
            for node in self._over_peak:
                size += node.nbytes
                if size * number < total:
                    chosen.append(node)
                else:
                    size = 0
            yield chosen


def _work(node: Tensor) -> int:
    """What computing a node costs, in bytes that are moved: products take less time for each operation."""
    assert node.op is not None
    flops = node.op.flops(node) * (1 if node.op.product else 4)
    return flops + sum(source.nbytes for source in node.srcs) + node.nbytes


def _rewritten(graph: Graph, chosen: Mapping[Tensor, int]) -> tuple[Graph, dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """The graph in which late readers of the chosen values read what is computed again; what is in place of a node; and
    for each node that computes something again, what that is.

    Every node that is made depends only on nodes before the reader for which it is made, so that there is no cycle.
    """
    changed: dict[Tensor, Tensor] = {}  # node -> what is in its place
    again: dict[Tensor, Tensor] = {}  # chosen value -> what is computed again
    before = None  # the last node that computes something
    for at, node in enumerate(graph.nodes):
        views: dict[Tensor, Tensor] = {}

        def now(source: Tensor) -> Tensor:
            """What the present node reads instead of a source."""
            if source.is_view:
                if source not in views:  # noqa: B023
                    others = [changed.get(s, s) for s in source.srcs[1:]]
                    views[source] = with_sources(source, (now(source.srcs[0]), *others))  # noqa: B023
                return views[source]  # noqa: B023
            if at < chosen.get(source, len(graph.nodes)):  # noqa: B023
                return changed.get(source, source)
            if source not in again:
                assert before is not None  # noqa: B023
                srcs = [after(now(s), [changed.get(before, before)]) for s in source.srcs]  # noqa: B023
                again[source] = with_sources(source, tuple(srcs)).named(f"{source.name} again")
            return again[source]

        srcs = _sources(node, now, changed)
        if srcs != node.srcs:
            changed[node] = with_sources(node, srcs)
        before = before if node.is_view else node
    made = Graph([changed.get(output, output) for output in graph.outputs])
    left = {*again} - {*made.nodes}  # all readers are late ones
    changed |= {source: again[source] for source in left}
    for node in graph.nodes:  # views, made again in their order
        if node.root in left and node.is_view:
            changed[node] = with_sources(node, _sources(node, now, changed))
    return made, changed, {made_again: source for source, made_again in again.items()}


def _sources(node: Tensor, now: Callable[[Tensor], Tensor], changed: Mapping[Tensor, Tensor]) -> tuple[Tensor, ...]:
    if node.is_view:  # in case it is an output; readers get views of their own
        return tuple([changed.get(source, source) for source in node.srcs])
    return tuple([now(source) for source in node.srcs])
