"""`less_memory`: a graph that computes some values twice, so that its plan takes less memory. `Graph` to `Graph`.

A value that is read early and again much later, as activations are by the backward graph, takes memory in between. If
it is computed again before its late readers, only its sources take memory: Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016. What is computed again waits for the node before its first late reader (`opweave.after`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor, with_sources
from opweave.ops.movement import after

__all__ = ["less_memory"]

SMALLEST: Final = 4096
"""Bytes of values that are worth computing again."""


def less_memory(graph: Graph, limit: int, planned: Callable[[Graph], int]) -> tuple[Graph, dict[Tensor, Tensor]]:
    """The graph, changed to compute as little as possible again for a plan that takes at most ``limit`` bytes.

    Values are tried in the order of what computing them again costs for each byte that it saves, by bisection.

    Args:
        graph: the graph as it was built.
        limit: bytes of temporaries.
        planned: bytes that the plan of a graph takes.

    Returns:
        The graph whose plan takes no more than the limit, else the one that takes least; and for each node that reads
        something that is computed again, what is in its place.
    """
    best: tuple[Graph, dict[Tensor, Tensor]] = graph, {}
    least = planned(graph)
    chosen = _candidates(graph) if least > limit else []
    low, high = 1, len(chosen)
    while low <= high:
        number = (low + high) // 2
        tried = _rewritten(graph, dict(chosen[:number]))
        size = planned(tried[0])
        if size <= limit or size < least:
            best, least = tried, size
        if size <= limit:
            high = number - 1
        else:
            low = number + 1
    return best


def _candidates(graph: Graph) -> list[tuple[Tensor, int]]:
    """Values to compute again with the position after which their readers read that, the cheapest first."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    read: dict[Tensor, list[int]] = {}
    overwritten: dict[Tensor, int] = {}
    for node, at in position.items():
        assert node.op is not None
        if node.op.writes:
            overwritten[node.srcs[0].root] = at
        if not node.is_view:
            for source in node.srcs:
                read.setdefault(source.root, []).append(at)
    kept = {output.root for output in graph.outputs}
    late: dict[Tensor, int] = {}  # value -> position of its first late reader
    rated = []
    for node, at in position.items():
        op = node.op
        assert op is not None
        if node.is_view or op.writes or op.name == "custom" or not node.srcs or node in kept or node.nbytes < SMALLEST:
            continue
        moments = [at, *read.get(node, ())]
        gap, end = max((b - a, b) for a, b in zip(moments, moments[1:] or moments, strict=False))
        roots = {source.root for source in node.srcs}
        if gap < 3 or any(overwritten.get(root, end) < end for root in roots):
            continue
        # Sources that would otherwise be gone by then live longer.
        longer = [r for r in roots if r.op is not None and r not in late and read[r][-1] < end]
        saved = node.nbytes - sum(r.nbytes for r in longer)
        if saved > 0:
            late[node] = end
            work = op.flops(node) * (1 if op.product else 4) + sum(s.nbytes for s in node.srcs) + node.nbytes
            rated.append((work / saved, at, node))
    rated.sort(key=lambda row: row[:2])
    return [(node, late[node]) for _, _, node in rated]


def _rewritten(graph: Graph, chosen: Mapping[Tensor, int]) -> tuple[Graph, dict[Tensor, Tensor]]:
    """The graph in which late readers of the chosen values read what is computed again.

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
    outputs = tuple([changed.get(output, output) for output in graph.outputs])
    return Graph(outputs), changed


def _sources(node: Tensor, now: Callable[[Tensor], Tensor], changed: Mapping[Tensor, Tensor]) -> tuple[Tensor, ...]:
    if node.is_view:  # in case it is an output; readers get views of their own
        return tuple([changed.get(source, source) for source in node.srcs])
    return tuple([now(source) for source in node.srcs])
