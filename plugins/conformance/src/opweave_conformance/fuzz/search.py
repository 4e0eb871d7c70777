"""`Search`: draws examples, runs them, shrinks those that fail, and counts what was reached."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from opweave.contract import Device
from opweave.graph.opdef import OPS
from opweave_conformance.fuzz.draw import LENGTHS, draw
from opweave_conformance.fuzz.example import Example, NodeEntry, script
from opweave_conformance.fuzz.process import Child, Outcome
from opweave_conformance.fuzz.shrink import shrink

__all__ = ["Finding", "Search", "search"]

SHRINKING: Final = 90.0
"""Seconds for shrinking one example."""

MOST_ENDED: Final = 10
"""Processes that shrinking may cost where they crash or hang."""

COUNT_EVERY: Final = 50
"""Buffers are counted after so many examples: that takes longer than most examples."""

KEPT: Final = 1 << 20
"""Bytes of buffers that may stay in each such interval: caches of the devices."""


class Finding(NamedTuple):
    """An example that failed.

    Attributes:
        number: of the example.
        kind, reason: as of `Outcome`, of the shrunk example.
        script: the shrunk example.
        alone: whether it fails in a process of its own; otherwise only after others.
        path: the file that it was written to, or ``""``.
    """

    number: int
    kind: str
    reason: str
    script: str
    alone: bool
    path: str


class Search:
    """Examples of one seed over devices, run one after the other.

    Args:
        seed: which sequence.
        out: the folder that scripts are written to; ``None``: they are not.
        seconds: how long one example may take.
        largest: about how many elements operands have at most.

    Attributes:
        cases, nodes: how many examples ran, and how many nodes they have.
        refused: reason -> how many.
        drawn: operation -> in how many nodes it was drawn.
        reached: (operation, device) -> how many nodes of that operation ran there.
        findings: what failed.
    """

    def __init__(
        self, devices: Sequence[Device], seed: int, *, out: Path | None, seconds: float, largest: int = LENGTHS[-1]
    ) -> None:
        self._largest: Final = largest
        self.devices: Final = tuple(devices)
        self.seed: Final = seed
        self._out: Final = out
        self._child: Final = Child(seconds)
        self._recent: Final[list[int]] = []
        self._buffers = -1
        self.cases = self.nodes = 0
        self.refused: Final[Counter[str]] = Counter()
        self.drawn: Final[Counter[str]] = Counter()
        self.reached: Final[Counter[tuple[str, str]]] = Counter()
        self.findings: Final[list[Finding]] = []

    def close(self) -> None:
        """End the other process."""
        self._child.close()

    def try_case(self, number: int) -> Finding | None:
        """Draw and run the example of this number."""
        example = draw(self.seed, number, self.devices, self._largest)
        self.cases += 1
        self.nodes += example.nodes
        self.drawn.update(e.op for g in example.graphs for e in g.entries if isinstance(e, NodeEntry))
        counting = self.cases % COUNT_EVERY == 0
        outcome = _run(self._child, example, count_buffers=counting)
        for op, device, n in outcome.reached:
            self.reached[op, device] += n
        if outcome.kind == "refused":
            self.refused[re.sub("[0-9][0-9,]*", "N", outcome.reason.partition("\n")[0][:100])] += 1
        self._recent.append(number)
        found = self._found(number, example, outcome) if outcome.failed else None
        if counting and not outcome.failed:
            found = self._grown(outcome.buffers)
        if counting or outcome.kind in ("crash", "hang"):
            self._recent.clear()
        return found

    def never_drawn(self) -> list[str]:
        """Operations that no example had."""
        return sorted(name for name, op in OPS.items() if name not in self.drawn and not op.is_view)

    def _found(self, number: int, example: Example, first: Outcome) -> Finding:
        child = Child(min(self._child.seconds, 20.0))
        last, ended = first, 0

        def fails(candidate: Example) -> bool:
            nonlocal last, ended
            if ended >= MOST_ENDED:
                return False
            outcome = _run(child, candidate)
            ended += outcome.kind in ("crash", "hang")
            if outcome.kind == first.kind:
                last = outcome
            return outcome.kind == first.kind

        try:
            alone = any(fails(example) for _ in range(3))
            small = shrink(example, fails, SHRINKING) if alone else example
        finally:
            child.close()
        return self._entered(number, small, last, alone)

    def _grown(self, buffers: int) -> Finding | None:
        """A finding if buffers were kept by the examples since the last count."""
        before, self._buffers = self._buffers, buffers
        if before < 0 or buffers <= before + KEPT:
            return None
        child = Child(self._child.seconds)
        try:
            for number in self._recent:
                example = draw(self.seed, number, self.devices, self._largest)
                kept = _kept(child, example)
                if kept > 0:
                    small = shrink(example, lambda e: _kept(child, e) > 0, SHRINKING)
                    return self._entered(number, small, Outcome("leak", f"{kept:,} bytes of buffers stay"), True)
        finally:
            child.close()
        return None

    def _entered(self, number: int, example: Example, outcome: Outcome, alone: bool) -> Finding:
        reason = outcome.reason
        head = f"{outcome.kind}: {reason}\n\nWritten by opweave fuzz --seed {self.seed} --case {number}"
        if not alone:
            head += "; it failed only after the cases before it"
        text, path = script(example, head + "."), ""
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            file = self._out / f"fuzz_{self.seed}_{number}.py"
            file.write_text(text, encoding="utf-8")
            path = str(file)
        finding = Finding(number, outcome.kind, reason, text, alone, path)
        self.findings.append(finding)
        return finding


def _run(child: Child, example: Example, *, count_buffers: bool = False) -> Outcome:
    """Run an example. One that has a limit of memory may be refused for it."""
    outcome = child.run(script(example), count_buffers=count_buffers)
    if outcome.kind == "AllocationError" and "memory_limit" in dict(example.options):
        return outcome._replace(kind="refused")
    return outcome


def _kept(child: Child, example: Example) -> int:
    """Bytes of buffers that are there after each further run of an example."""
    counts = [_run(child, example, count_buffers=True).buffers for _ in range(3)]
    return min(counts[2] - counts[1], counts[1] - counts[0]) if min(counts) >= 0 else 0


def search(
    found: Search, *, seconds: float, first: int = 0, show: Callable[[Finding | None], object] = lambda finding: None
) -> None:
    """Try examples from number ``first`` on for so many seconds; ``show`` is called after each."""
    end = perf_counter() + seconds
    number = first
    while perf_counter() < end:
        show(found.try_case(number))
        number += 1
