"""Level 4: graphs split over the device and a second one, in all ways in which a scheduler may do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.errors import SchedulerError, UnsupportedOpError
from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave_conformance.checklist import Check, Mismatch, Subject, expect, inapplicable
from opweave_conformance.companions import SeparateMemory
from opweave_conformance.comparison import compare
from opweave_conformance.graphs import MODELS, LeafDevices, Model
from opweave_conformance.tolerances import Limits, limits

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.scheduler import Program

__all__ = ["CHECKS", "checks_with"]

Array = np.ndarray[Any, Any]
Results = tuple[Array, ...]

RUNS: Final = 3
OVERLAPPING: Final = 6
FEW: Final = 4
"""The number of nodes up to which every placement is tried."""

PLACED: Final = 4
"""How many placements are tried with runs that overlap, or with an observer."""


class TwoDevices:
    """A model split over the device under test and a second one.

    Attributes:
        devices: the device under test, the second one, and the host unless the second one is the host.
        feeds: inputs of `OVERLAPPING` successive runs.
        wanted: the results of those runs on the host alone.
        values: the value of every computed node in those runs, by run and number.
    """

    def __init__(self, subject: Subject, model: Model, second: Device) -> None:
        self.model, self.device, self.second, self.rng = model, subject.device, second, subject.rng
        self.devices: Final[list[Device]] = [self.device, second]
        if not isinstance(second, HostDevice):
            self.devices.append(HostDevice())
        self._find_able()
        self._run_references()

    def _find_able(self) -> None:
        """Find the nodes that each of the two devices supports."""
        outputs = self.model.build(LeafDevices(None, None))
        nodes = _nodes(outputs)
        with Scheduler(self.devices) as scheduler:

            def able(node: Tensor, where: Device) -> bool:
                try:
                    scheduler.partition(outputs, {node: where})
                except (UnsupportedOpError, SchedulerError):
                    return False
                return True

            # Nodes that write a state run where the state is.
            movable = [i for i, node in enumerate(nodes) if node.op is not None and not node.op.writes]
            self.here = [i for i in movable if able(nodes[i], self.device)]
            self.there = {i for i in movable if able(nodes[i], self.second)}
        if not self.here:
            names = dict.fromkeys(node.op.name for node in nodes if node.op is not None)
            inapplicable(f"it runs none of {', '.join(names)}")

    def _run_references(self) -> None:
        host = HostDevice()
        outputs = self.model.build(LeafDevices(None, host))
        nodes = _nodes(outputs)
        self.limit = _limit(nodes)
        self.feeds = [self.model.feeds(outputs, self.rng) for _ in range(OVERLAPPING)]
        self.wanted: list[Results] = []
        self.values: list[list[Array]] = []
        with Scheduler(host) as scheduler:
            program = scheduler.build(outputs)
            for feed in self.feeds:
                seen: dict[Tensor, Array] = {}
                with program.observe(seen.__setitem__):
                    self.wanted.append(program.run(feed))
                self.values.append([seen[node] for node in nodes])

    # --- placements -------------------------------------------------------------------------------------------------

    def placements(self, most: int | None = None) -> Iterator[tuple[LeafDevices, dict[int, Device] | None]]:
        """Devices of the leaves, and node number -> device (``None``: the scheduler decides)."""
        n = len(self.here)
        if n <= FEW:
            patterns = list(product((True, False), repeat=n))
        else:
            halves = [tuple(i < n // 2 for i in range(n)), tuple(i >= n // 2 for i in range(n))]
            turns = [tuple(i % 2 == 0 for i in range(n)), tuple(i % 2 == 1 for i in range(n))]
            chance = [tuple(map(bool, self.rng.integers(0, 2, n))) for _ in range(6)]
            patterns = [(True,) * n, (False,) * n, *halves, *turns, *chance]
        leaves = list(product((None, self.device, self.second), (self.device, self.second)))
        found: list[tuple[LeafDevices, dict[int, Device] | None]] = [(LeafDevices(*leaf), None) for leaf in leaves]
        for i, pattern in enumerate(patterns):
            placed = {k: self.device for k, mine in zip(self.here, pattern, strict=True) if mine}
            elsewhere = {k: self.second for k in self.there if k not in placed}
            found.append((LeafDevices(*leaves[i % len(leaves)]), {**placed, **elsewhere}))
        if most is not None and len(found) > most:
            found = [found[k] for k in sorted(self.rng.permutation(len(found))[:most])]
        yield from found

    def program(
        self, scheduler: Scheduler, places: LeafDevices, placed: dict[int, Device] | None
    ) -> tuple[Program, Sequence[Tensor]]:
        """The program, and its nodes by number."""
        outputs = self.model.build(places)
        nodes = _nodes(outputs)
        pins = {nodes[i]: device for i, device in (placed or {}).items()}
        return scheduler.build(outputs, pins), nodes

    # --- judging ----------------------------------------------------------------------------------------------------

    def judge(self, run: int, got: Sequence[Array], program: Program) -> None:
        """Raises `Mismatch` unless the results of a run equal the host's, within the sum of all operations' limits."""
        for i, (a, b) in enumerate(zip(got, self.wanted[run], strict=True)):
            self._judge(a, b, f"run {run}, output {i}", program)

    def judge_node(self, run: int, number: int, got: Array, program: Program) -> None:
        self._judge(got, self.values[run][number], f"run {run}, node {number}", program)

    def _judge(self, got: Array, want: Array, what: str, program: Program) -> None:
        expect(got.shape == want.shape and got.dtype == want.dtype, f"{what} is {got.dtype}{got.shape}")
        reason = compare(got, want, self.limit).reason
        if reason:
            raise Mismatch(f"{what}: {reason}; {_placement(program)}")


def _nodes(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [node for node in Graph(outputs).nodes if not node.is_view]


def _limit(nodes: Sequence[Tensor]) -> Limits:
    """The limits of all nodes together: each may add its error."""
    each = [limits(node) for node in nodes]
    root = sum(limit.nmse**0.5 for limit in each)
    return Limits(root * root, sum(limit.error for limit in each))


def _bits(runs: Sequence[Results]) -> list[bytes]:
    return [array.tobytes() for results in runs for array in results]


def _placement(program: Program) -> str:
    """Which nodes ran where."""
    return ", then ".join(
        f"{' '.join(item.node.op.name for item in split.steps if item.node is not None and item.node.op)} on "
        f"{split.target.name}"
        for split in program.splits
    )


# --- ways of running ------------------------------------------------------------------------------------------------


def _split(two: TwoDevices) -> None:
    with Scheduler(two.devices) as scheduler:
        for places, placed in two.placements():
            first: list[Results] = []
            for again in (False, True):
                program, _ = two.program(scheduler, places, placed)
                got = [program.run(feed) for feed in two.feeds[:RUNS]]
                for run, results in enumerate(got):
                    two.judge(run, results, program)
                if again and two.model.repeatable:
                    expect(_bits(got) == _bits(first), f"running it again gives other bits; {_placement(program)}")
                first = got
            scheduler.reset()


def _overlapping(two: TwoDevices) -> None:
    for slots in (2, 3):
        with Scheduler(two.devices, parallel=slots) as scheduler:
            for places, placed in two.placements(PLACED):
                program, _ = two.program(scheduler, places, placed)
                futures = []
                for feed in two.feeds:
                    given = {name: array.copy() for name, array in feed.items()}
                    futures.append(program.submit(given))
                    for array in given.values():
                        array.fill(0)  # fed arrays may be used anew at once
                for run, future in enumerate(futures):
                    two.judge(run, future.result(), program)
                scheduler.reset()


def _observed(two: TwoDevices) -> None:
    for parallel in (False, True):
        with Scheduler(two.devices, parallel=parallel) as scheduler:
            for places, placed in two.placements(PLACED):
                program, nodes = two.program(scheduler, places, placed)
                for run, feed in enumerate(two.feeds[:2]):
                    seen: dict[Tensor, Array] = {}
                    with program.observe(seen.__setitem__):
                        two.judge(run, program.run(feed), program)
                    missing = [i for i, node in enumerate(nodes) if node not in seen]
                    expect(not missing, f"the observer is not shown nodes {missing}; {_placement(program)}")
                    for i, node in enumerate(nodes):
                        two.judge_node(run, i, seen[node], program)
                scheduler.reset()


MODES: Final[dict[str, tuple[str, Callable[[TwoDevices], None]]]] = {
    "split": ("Split over two devices in every way, weights and states on either, it gives one device's results.",
              _split),
    "overlap": ("Overlapping runs, with two and with three slots, give the results of runs one after the other.",
                _overlapping),
    "observe": ("An observer gets the value of every node, and the results do not change.", _observed),
}  # fmt: skip


def ask_split(model: Model, second: Device, subject: Subject) -> None:
    """Run a graph split over the device and a second one in all ways; raises as `Check.ask`."""
    _split(TwoDevices(subject, model, second))


def _ask(model: Model, mode: Callable[[TwoDevices], None], second: Callable[[], Device], subject: Subject) -> None:
    mode(TwoDevices(subject, model, second()))


def checks_with(name: str, second: Callable[[], Device]) -> tuple[Check, ...]:
    """The checks with one second device, which the function ``second`` returns."""
    return tuple([
        Check(f"{mode}-{name}-{graph}", 4, about, partial(_ask, model, run, second))
        for mode, (about, run) in MODES.items()
        for graph, model in MODELS.items()
    ])  # fmt: skip


CHECKS: Final = (*checks_with("host", HostDevice), *checks_with("separate", SeparateMemory))
