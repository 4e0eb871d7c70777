"""`tune`: finds by measuring which devices a graph runs fastest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from opweave.errors import AllocationError, SchedulerError
from opweave.graph.graph import Graph
from opweave.scheduler import Program, Scheduler
from opweave.scheduler.place.arguments import checked_outputs
from opweave.units import human_time
from opweave_cost.graph_copy import copy_graph
from opweave_cost.run_parts import step_times
from opweave_cost.step_times import note_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opweave.contract import Device
    from opweave.graph.tensor import Tensor
    from opweave_cost.step_times import StepTimes

__all__ = ["Candidate", "Tuning", "tune"]

ROUNDS: Final = 3
"""How often a placement is chosen by what was measured so far, each time measuring the one that was chosen."""
RUN_SECONDS: Final = 0.2
"""Further runs are made until a placement has taken so many seconds: other load makes runs longer, never shorter."""
MOST_RUNS: Final = 200
CLOSE: Final = 1.02
"""A placement over several devices has to be faster than every single device by this factor."""

Where = tuple["Device | None", ...]
"""The device of each computed node, in the order of the graph; ``None``: where the scheduler places it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that was tried.

    Attributes:
        name: ``"priority"``: by the rules of priority, ``"only X"``: device X runs what it supports, ``"cost"``: as it
            is predicted to take least time, by the profiles and by what was measured before it.
        seconds: the least of its runs.
        predicted: seconds as predicted when it was chosen.
        nodes: device -> how many nodes it runs.
    """

    name: str
    seconds: float
    predicted: float
    nodes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of `tune`.

    Attributes:
        pins: computed tensor -> device, of the fastest placement: for ``scheduler.build(outputs, pins=tuning.pins)``.
        candidates: what was tried, fastest first.
    """

    pins: Mapping[Tensor, Device]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        rows = [
            f"{human_time(c.seconds):>9}  predicted {human_time(c.predicted):>9}  {c.name}: "
            + ", ".join(f"{count} nodes on {name}" for name, count in c.nodes.items())
            for c in self.candidates
        ]
        return "\n".join(rows)


def tune(
    scheduler: Scheduler, outputs: Any, feeds: Mapping[Any, Any] | None = None, /, *, runs: int = 10, **named: Any
) -> Tuning:
    """Find by measuring which of a scheduler's devices each node of a graph is fastest on.

    The graph runs on each device alone, and the time of each step is measured inside the program: with its caches, its
    fused steps and its repacked weights. By these times, and those of the profiles (`profile`) for transfers,
    the placement of least predicted time is chosen, run and measured too, up to three times. In the end all of them run
    alternately. The fastest wins; one over several devices only if it is at least 2 % faster than every single device.

    The steps' times stay with the process: `Program.predicted`, ``placement="cost"`` and simulated devices with the
    figures of a device use them for steps of the same operation, shapes and dtypes. Pins of the scheduler are kept.
    States keep their values: each placement runs on copies of them. Seconds to minutes, by the size of the graph.

    Args:
        scheduler: its devices and options count; its programs stay as they are.
        outputs: as of `Scheduler.build`.
        feeds, named: as of `Program.run`; the routing of experts, for one, makes times depend on values.
        runs: how many runs of each placement are measured at least.

    Returns:
        The fastest placement as pins, and all that were tried with their seconds.

    Raises:
        SchedulerError: not a scheduler, a number of runs below 1, weights in shards, whose parts say where they run.
        UnsupportedOpError, HazardError: as `Scheduler.build`.
        AllocationError: no placement fits the memory.
        ShapeError, DTypeError, UnknownNameError, ExecutionError: as `Program.run`.
    """
    if not isinstance(scheduler, Scheduler):
        raise SchedulerError(f"tune takes a scheduler, not {type(scheduler).__name__}")
    if not isinstance(runs, int) or runs < 1:
        raise SchedulerError(f"runs is a number of runs, at least 1, not {runs!r}")
    graph = Graph(checked_outputs(outputs)[0])
    if any(leaf.leaf is not None and leaf.leaf.shards is not None for leaf in graph.leaves):
        raise SchedulerError("weights in shards say where their parts are computed: place them whole to tune")
    with scheduler.alike("priority") as rules, scheduler.alike("cost") as chooser:
        return _Tuner(rules, chooser, outputs, graph, runs, lambda program: program.run(feeds, **named)).tuned()


class _Trial:
    """A placement, its program on states of its own, and its least seconds so far."""

    def __init__(self, name: str, where: Where, program: Program, predicted: float) -> None:
        self.name: Final = name
        self.where: Final = where
        self.program: Final = program
        self.predicted: Final = predicted
        self.seconds = inf
        self.steps: StepTimes = ()


class _Tuner:
    def __init__(
        self,
        rules: Scheduler,
        chooser: Scheduler,
        outputs: Any,
        graph: Graph,
        runs: int,
        run: Callable[[Program], Any],
    ) -> None:
        self.rules, self.chooser, self.outputs, self.runs, self.run = rules, chooser, outputs, runs, run
        self.nodes: Final = _computed(graph)
        self.stateful: Final = any(leaf.leaf is not None and leaf.leaf.kind == "state" for leaf in graph.leaves)
        self.trials: Final[dict[Where, _Trial]] = {}
        self.refused: AllocationError | None = None

    def tuned(self) -> Tuning:
        self._try("priority", self._chosen_by(self.rules))
        for device in self.rules.devices:
            self._try(f"only {device.name}", tuple(self._alone(device)))
        if len(self.rules.devices) > 1:
            for _ in range(ROUNDS):
                if not self._try("cost", self._chosen_by(self.chooser)):
                    break
        trials = list(self.trials.values())
        if not trials:
            assert self.refused is not None
            raise self.refused
        for _ in self._repetitions(min(trials, key=lambda trial: trial.seconds)):
            for trial in trials:
                self._time(trial)
        # By the least seconds of all repetitions. Devices alone come last: their figures hold for other placements too.
        for trial in sorted(trials, key=lambda trial: len(set(trial.where)), reverse=True):
            note_steps(trial.program, trial.seconds, trial.steps)
        trials.sort(key=lambda trial: trial.seconds * (CLOSE if len(set(trial.where)) > 1 else 1.0))
        pins = {node: at for node, at in zip(self.nodes, trials[0].where, strict=True) if at is not None}
        return Tuning(pins, tuple(
            Candidate(t.name, t.seconds, t.predicted, Counter(at.name for at in t.where if at is not None))
            for t in trials
        ))  # fmt: skip

    def _repetitions(self, trial: _Trial) -> range:
        """How often the program should be run once more, as a range: by `runs`, and for `RUN_SECONDS`."""
        self._time(trial)
        return range(max(self.runs, min(int(RUN_SECONDS / trial.seconds), MOST_RUNS)))

    def _time(self, trial: _Trial) -> None:
        start = perf_counter()
        self.run(trial.program)
        trial.seconds = min(trial.seconds, perf_counter() - start)

    def _chosen_by(self, scheduler: Scheduler) -> Where:
        """Where a scheduler places the nodes."""
        parts = scheduler.partition(self.outputs).partition
        targets = parts.assignment.targets
        return tuple(targets[parts.assignment.target_of[node]].device for node in self.nodes)

    def _alone(self, device: Device) -> Iterator[Device | None]:
        by_rules = self._chosen_by(self.rules)
        for node, otherwise in zip(self.nodes, by_rules, strict=True):
            free = not self.rules.is_pinned(node) and self.rules.supports(device, node)
            yield device if free else otherwise

    def _try(self, name: str, where: Where) -> bool:
        """Build and measure a placement; returns whether it is a new one that fits the memory."""
        if where in self.trials:
            return False
        outputs = copy_graph(self.outputs).outputs if self.stateful else self.outputs
        nodes = _computed(Graph(checked_outputs(outputs)[0])) if self.stateful else self.nodes
        pins = {node: at for node, at in zip(nodes, where, strict=True) if at is not None}
        try:
            program = self.rules.build(outputs, pins=pins)
            trial = self.trials[where] = _Trial(name, where, program, program.predicted.seconds)
            self.run(program)  # uploads weights, compiles kernels
            for _ in self._repetitions(trial):
                self._time(trial)
            self._note(trial)
        except AllocationError as error:
            self.trials.pop(where, None)
            self.refused = error
            return False
        return True

    def _note(self, trial: _Trial) -> None:
        """Measure what each step takes, so that the next placement is chosen by it."""
        trial.steps = step_times(trial.program, len(self._repetitions(trial)) // 2 + 1, self.run)
        note_steps(trial.program, trial.seconds, trial.steps)


def _computed(graph: Graph) -> Sequence[Tensor]:
    return [node for node in graph.nodes if node.op is not None and node.base is None]
