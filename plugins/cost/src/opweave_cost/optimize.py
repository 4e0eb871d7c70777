"""Choosing a target for each of many nodes so that the sum of their costs and of their copies is least.

A node costs what it takes on its target; its value costs one copy for every further target that reads it. Finding the
least sum is NP-hard in general. Two dynamic programmes over the topological order, each exact for trees in its
direction (towards one sink, or out of one source; chains are both), share the cost of a value among its readers or
sources where there are several. Then sweeps move single nodes and connected groups of nodes of one target while that
saves time. Everything is linear in nodes and edges; `Solution.steps` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import inf
from typing import Final, NamedTuple

__all__ = ["Problem", "Solution", "solve"]

SWEEPS: Final = 4
SUBSETS_UP_TO: Final = 4
"""With up to so many targets, every set of targets that a value may be copied to is considered."""


class Problem(NamedTuple):
    """Nodes in topological order.

    Attributes:
        own: ``own[v][d]`` seconds of node ``v`` on target ``d``, ``inf`` where it cannot run.
        sources: the nodes whose values each one reads, each once.
        moves: ``moves[v][a][b]`` seconds of copying the value of ``v`` from target ``a`` to target ``b``.
    """

    own: Sequence[Sequence[float]]
    sources: Sequence[Sequence[int]]
    moves: Sequence[Sequence[Sequence[float]]]

    @property
    def readers(self) -> list[list[int]]:
        result: list[list[int]] = [[] for _ in self.own]
        for v, sources in enumerate(self.sources):
            for u in sources:
                result[u].append(v)
        return result

    def seconds(self, targets: Sequence[int]) -> float:
        """The total cost of an assignment."""
        reached: list[set[int]] = [set() for _ in self.own]
        for v, sources in enumerate(self.sources):
            for u in sources:
                reached[u].add(targets[v])
        total = 0.0
        for v, target in enumerate(targets):
            total += self.own[v][target]
            for d in reached[v]:
                total += self.moves[v][target][d]
        return total


class Solution(NamedTuple):
    """The target of every node, the total cost, and the number of additions and comparisons it took to find."""

    targets: list[int]
    seconds: float
    steps: int


def solve(problem: Problem) -> Solution:
    """An assignment of low cost, optimal for chains and trees. Every node has to be able to run on some target."""
    if not problem.own:
        return Solution([], 0.0, 0)
    solver = _Solver(problem)
    starts = [solver.towards_sinks(), solver.out_of_sources()]
    results = [solver.refine(start) for start in (starts if starts[0] != starts[1] else starts[:1])]
    best = min(results, key=problem.seconds) if len(results) > 1 else results[0]
    return Solution(best, problem.seconds(best), solver.steps)


class _Solver:
    def __init__(self, problem: Problem) -> None:
        self.own, self.sources, self.moves = problem
        self.readers: Final = problem.readers
        self.targets: Final = range(len(self.own[0]))
        self.steps = 0

    # --- dynamic programmes -----------------------------------------------------------------------------------------

    def towards_sinks(self) -> list[int]:
        """Exact where every value has one reader."""
        targets, moves = self.targets, self.moves
        best: list[list[float]] = []  # seconds of everything up to a node, by its target
        for v, own in enumerate(self.own):
            row = list(own)
            for u in self.sources[v]:
                share = len(self.readers[u])
                before = [s / share for s in best[u]]
                for d in targets:
                    if row[d] < inf:
                        row[d] += min([before[e] + moves[u][e][d] for e in targets])
                self.steps += len(targets) ** 2
            best.append(row)
        result = [0] * len(best)
        for v in range(len(best) - 1, -1, -1):
            wanted = {result[w] for w in self.readers[v]}
            result[v] = min(targets, key=[s + sum([moves[v][d][e] for e in wanted]) for d, s in enumerate(best[v])]
                            .__getitem__)  # fmt: skip
            self.steps += len(targets) * (1 + len(wanted))
        return result

    def out_of_sources(self) -> list[int]:
        """Exact where every node has one source."""
        targets = self.targets
        best: list[list[float]] = [[] for _ in self.own]  # seconds of everything from a node on, by its target
        shared: list[list[float]] = [[] for _ in self.own]  # the share of that for each of its sources
        for v in range(len(self.own) - 1, -1, -1):
            best[v] = [s if s == inf else s + self._meet(v, d, shared)[0] for d, s in enumerate(self.own[v])]
            share = max(len(self.sources[v]), 1)
            shared[v] = [s / share for s in best[v]]
        result = [0] * len(best)
        copied: list[frozenset[int]] = []  # the targets that a value is copied to
        for v, after in enumerate(best):

            def total(d: int, after: list[float] = after, v: int = v) -> float:
                return after[d] + sum([self.moves[u][result[u]][d] for u in self.sources[v] if d not in copied[u]])

            result[v] = min(targets, key=total)
            self.steps += len(targets) * (1 + len(self.sources[v]))
            copied.append(self._meet(v, result[v], shared)[1])
        return result

    def _meet(self, v: int, target: int, shared: Sequence[Sequence[float]]) -> tuple[float, frozenset[int]]:
        """Seconds of the readers of ``v`` and of copying it to them from ``target``, and the targets to copy it to."""
        readers, cost = self.readers[v], self.moves[v][target]
        self.steps += len(readers) * len(self.targets)
        if not readers:
            return 0.0, frozenset()
        if len(readers) == 1 or len(self.targets) > SUBSETS_UP_TO:
            total, used = 0.0, set()
            for w in readers:
                d = min(self.targets, key=[s + c for s, c in zip(shared[w], cost, strict=True)].__getitem__)
                total += shared[w][d] + cost[d]
                used.add(d)
            return total, frozenset(used)
        best, chosen = inf, frozenset(self.targets)
        for subset in _subsets(self.targets):
            self.steps += len(readers)
            total = sum([cost[d] for d in subset]) + sum([min([shared[w][d] for d in subset]) for w in readers])
            if total < best:
                best, chosen = total, frozenset(subset)
        return best, chosen

    # --- sweeps -----------------------------------------------------------------------------------------------------

    def refine(self, targets: list[int]) -> list[int]:
        """Move nodes, and connected groups of nodes of one target, while that saves time."""
        state = _State(self, targets)
        order = range(len(targets))
        for _ in range(SWEEPS):
            moved = False
            for nodes in chain(((v,) for v in order), ((v,) for v in reversed(order)), state.components()):
                moved |= state.improve(nodes)
            if not moved:
                break
        self.steps += state.steps
        return state.at


def _subsets(targets: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(targets, n) for n in range(1, len(targets) + 1))


class _State:
    """An assignment that changes, and how many readers each value has on each target."""

    def __init__(self, solver: _Solver, targets: list[int]) -> None:
        self.own, self.sources, self.moves, self.readers = solver.own, solver.sources, solver.moves, solver.readers
        self.targets, self.at = solver.targets, targets
        self.steps = 0
        self.count = [[0] * len(self.targets) for _ in targets]
        for v, sources in enumerate(self.sources):
            for u in sources:
                self.count[u][targets[v]] += 1

    def components(self) -> Iterator[tuple[int, ...]]:
        """Connected nodes with the same target, the smallest components first."""
        parent = list(range(len(self.at)))

        def find(v: int) -> int:
            while parent[v] != v:
                parent[v] = v = parent[parent[v]]
            return v

        for v, sources in enumerate(self.sources):
            for u in sources:
                if self.at[u] == self.at[v]:
                    parent[find(u)] = find(v)
        members: dict[int, list[int]] = {}
        for v in range(len(parent)):
            members.setdefault(find(v), []).append(v)
        for group in sorted(members.values(), key=len):
            if len(group) > 1 and len({self.at[v] for v in group}) == 1:
                yield tuple(group)

    def improve(self, nodes: tuple[int, ...]) -> bool:
        """Move nodes together from one target to another, if that saves time."""
        a = self.at[nodes[0]]
        inside: dict[int, int] = {}  # value -> how many of the nodes read it
        for v in nodes:
            for u in self.sources[v]:
                inside[u] = inside.get(u, 0) + 1
        group = frozenset(nodes)
        gain, best = 1e-15, a
        for b in self.targets:
            if b != a:
                saved = self._saved(nodes, group, inside, a, b)
                if saved > gain:
                    gain, best = saved, b
        if best == a:
            return False
        for v in nodes:
            self.at[v] = best
        for u, n in inside.items():
            self.count[u][a] -= n
            self.count[u][best] += n
        return True

    def _saved(self, nodes: tuple[int, ...], group: frozenset[int], inside: dict[int, int], a: int, b: int) -> float:
        saved = 0.0
        for v in nodes:
            saved += self.own[v][a] - self.own[v][b]
            if saved == -inf:
                return saved
            count, moves = self.count[v], self.moves[v]
            own = inside.get(v, 0)
            for d in self.targets:
                if count[d]:
                    saved += moves[a][d]
                if (count[d] - own if d == a else count[d]) > 0:
                    saved -= moves[b][d]
            self.steps += len(self.targets)
        for u, n in inside.items():
            self.steps += 1
            if u not in group:
                brought = self.moves[u][self.at[u]]
                if self.count[u][a] == n:
                    saved += brought[a]
                if self.count[u][b] == 0:
                    saved -= brought[b]
        return saved
