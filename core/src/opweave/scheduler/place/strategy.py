"""Strategies of placement for ``Scheduler(placement=...)``: ``"priority"`` is the core's own (`assign`), plugins offer
others by the hook ``opweave_placements``, imported when one is asked for; some also predict (`Predictor`). Rewrites of
graphs (``opweave_rewrites``) come the same way; ``Scheduler(memory_limit=...)`` needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

from opweave import registry
from opweave.contract.device import Kind
from opweave.errors import SchedulerError
from opweave.packages import pip_install
from opweave.scheduler.place.assign import Assignment, assign
from opweave.scheduler.place.prediction import Prediction

if TYPE_CHECKING:
    from opweave.graph.graph import Graph
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.annotated_graph import AnnotatedGraph
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.splits import Partition

__all__ = ["PlacementProblem", "Predictor", "Rewrite", "Strategy", "predictor", "remarks_on", "rewrite", "strategy"]


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """What a strategy is given.

    Attributes:
        annotated: the graph whose nodes are to be placed, with pins and what else was decided of it before.
        targets: the scheduler's devices, in order of priority; ``target.support(node.signature)`` says what each runs.
        op_offload: as of `opweave.Scheduler`.
        precisions: nodes that may be computed less than exactly.
    """

    annotated: AnnotatedGraph
    targets: Sequence[Target]
    op_offload: bool
    precisions: Mapping[Tensor, Precision]

    @property
    def graph(self) -> Graph:
        return self.annotated.graph

    @cached_property
    def by_priority(self) -> Assignment:
        """The assignment by the rules of priority.

        Raises:
            UnsupportedOpError: as `assign`.
        """
        return self._by_rules(self.annotated.pins)

    @cached_property
    def fixed(self) -> Mapping[Tensor, int]:
        """Computed tensors whose target is decided beforehand -> its index: those that are pinned, or write memory that
        lies there. No strategy moves them."""
        rules = self.by_priority
        return {
            t: at for t, at in rules.target_of.items() if rules.causes[t] in ("pinned", "storage", "shard") and t.op
        }

    def assigned(self, choice: Mapping[Tensor, int], cause: str) -> Assignment:
        """The assignment with nodes on the targets of ``choice``, for that cause; those that it leaves out are where
        the rules of priority place them.

        Raises:
            UnsupportedOpError: a node on a target that does not run it.
        """
        rules, fixed = self.by_priority, self.fixed
        nodes = [node for node in rules.target_of if node.op is not None and node.base is None]
        wanted = {node: fixed.get(node, choice.get(node, rules.target_of[node])) for node in nodes}
        leaf_pins = {tensor: at for tensor, at in self.annotated.pins.items() if tensor.op is None}
        causes = {node: rules.causes[node] if node in fixed else cause for node in wanted}
        return self._by_rules(wanted | leaf_pins).with_causes(causes)

    def _by_rules(self, pins: Mapping[Tensor, int]) -> Assignment:
        return assign(replace(self.annotated, pins=pins), self.targets, self.op_offload, self.precisions)


Strategy = Callable[[PlacementProblem], tuple[Assignment, Prediction | None]]
"""Places every node of a graph; the prediction is that of the assignment, if it makes one."""


def strategy(name: str) -> Strategy:
    """The strategy of that name which a plugin offers.

    Raises:
        SchedulerError: there is none; of ``"cost"`` it says what to install.
    """
    offered = registry.REGISTRY.placements()
    if name == "cost" and name not in offered:
        raise _without("placement='cost' and predictions come", "opweave-cost")
    if name not in offered:
        raise SchedulerError(f"placement is {' or '.join(map(repr, ['priority', *offered]))}, not {name!r}")
    return cast("Strategy", offered[name])


class Predictor(Protocol):
    """A strategy that also predicts what was placed otherwise."""

    def __call__(self, problem: PlacementProblem, /) -> tuple[Assignment, Prediction | None]: ...

    def predict(self, partition: Partition) -> Prediction:
        """What a run of a partitioned graph takes."""
        ...

    def remarks(self, partition: Partition) -> list[str]:
        """A sentence for each device that computes what a faster one of this machine would run."""
        ...


def predictor() -> Predictor:
    """The first strategy that predicts.

    Raises:
        SchedulerError: there is none; it says what to install.
    """
    return _find_predictor() or cast("Predictor", strategy("cost"))


def remarks_on(partition: Partition) -> list[str]:
    """What a package that predicts remarks on products of quantized weights on processors; it is not imported without
    such products."""
    slow = [split for split in partition.splits if split.target.device.kind in (Kind.CPU, Kind.HOST)]
    products = [node for split in slow for node in split.nodes if node.op is not None and node.op.product]
    if not any(weight.dtype.block > 1 for node in products for weight in node.srcs[1:2]):
        return []
    found = _find_predictor()
    return [] if found is None else found.remarks(partition)


def _find_predictor() -> Predictor | None:
    """The first strategy that predicts, ``None`` without a package that offers one."""
    return next((offered for offered in registry.REGISTRY.placements().values() if hasattr(offered, "predict")), None)


Rewrite = Callable[
    ["Graph", int, Callable[["Graph", Mapping["Tensor", "Tensor"], Mapping["Tensor", "Tensor"]], int]],
    tuple["Graph", Mapping["Tensor", "Tensor"], Mapping["Tensor", "Tensor"], int],
]
"""Makes a graph with the same values, for a limit in bytes. It is given the graph, the limit, and a function that says
how many bytes the plan of such a graph takes, of which the other arguments say what replaces what, and for new nodes
what they compute again. It returns the graph whose plan takes no more than the limit, else the one that takes least;
what replaces what; what is computed again; and the bytes of that plan."""


def rewrite(name: str) -> Rewrite:
    """The rewrite of graphs of that name which a plugin offers.

    Raises:
        SchedulerError: there is none; it says what to install.
    """
    offered = registry.REGISTRY.rewrites()
    if name not in offered:
        raise _without(f"{name} comes", "opweave-training")
    return cast("Rewrite", offered[name])


def _without(what: str, package: str) -> SchedulerError:
    return SchedulerError(
        f"{what} with {package}, which is not installed or cannot be loaded: {pip_install(package)}; "
        "`opweave plugins` shows why a plugin is not loaded"
    )
