"""`Builder`: makes programs of one scheduler, pass by pass.

Passes: AnnotatedGraph -> Assignment -> Partition -> Groups -> MemoryPlan -> Bindings -> RunList -> Program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from opweave.errors import AllocationError
from opweave.graph.graph import Graph
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.compile.arena import Arena, Lease
from opweave.scheduler.compile.bind import bind
from opweave.scheduler.compile.lower import lower
from opweave.scheduler.compile.reuse import EarlierProgram
from opweave.scheduler.compile.run_list import Bindings
from opweave.scheduler.place.annotated_graph import AnnotatedGraph
from opweave.scheduler.place.arguments import Outputs
from opweave.scheduler.place.assign import assign
from opweave.scheduler.place.capabilities import Capabilities
from opweave.scheduler.place.precision import Allowed, precisions_of
from opweave.scheduler.place.target import Target
from opweave.scheduler.plan.allocate import MemoryPlan, allocate
from opweave.scheduler.plan.fuse import Groups, fuse
from opweave.scheduler.plan.partition import partition
from opweave.scheduler.plan.splits import Partition
from opweave.scheduler.program import Program
from opweave.scheduler.run.executor import Executor
from opweave.scheduler.run.runs import ProgramState

if TYPE_CHECKING:
    from opweave.scheduler.compile.lower import Show
    from opweave.scheduler.place.strategy import Strategy

__all__ = ["Builder"]


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """Makes programs. The caller holds the executor's lock.

    Attributes:
        targets: the scheduler's devices, in order of priority.
        arenas: the memory for temporaries of each target.
        executor: runs the programs.
        strategy: places nodes; ``None``: by priority.
        op_offload, parallel, n_slots, memory_limit: as of `opweave.Scheduler`.
        forget: called with a program that is closed.
        host: the device whose memory holds read-only leaves that no other device holds.
    """

    targets: Sequence[Target]
    arenas: Sequence[Arena]
    executor: Executor
    strategy: Strategy | None
    op_offload: bool
    parallel: bool
    n_slots: int
    memory_limit: int | None
    forget: Callable[[Program], None]
    host: HostDevice = field(default_factory=HostDevice)

    def partition(self, annotated: AnnotatedGraph, allowed: Allowed) -> Partition:
        """The graph placed and divided into splits."""
        if any(t.leaf is not None and t.leaf.shards is not None for t in annotated.graph.leaves):
            annotated = self._with_shards(annotated, allowed)
        if self.memory_limit is not None and not annotated.placed:  # what was placed by hand stays as it is
            annotated = self._within_limit(annotated, allowed, self.memory_limit)
        return self._place_and_partition(annotated, precisions_of(annotated.graph.nodes, allowed))

    def _with_shards(self, annotated: AnnotatedGraph, allowed: Allowed) -> AnnotatedGraph:
        """The graph with a node for each part of weights in shards, on the device of the part if that runs it."""
        from opweave.scheduler.plan.collectives import links_of  # most programs have no weights in shards
        from opweave.sharding.sharded_graph import shard_graph

        targets, index = self.targets, {target.name: target.index for target in self.targets}
        kept = dict.fromkeys(annotated.placed) | {tensor: targets[at].name for tensor, at in annotated.pins.items()}
        result = shard_graph(annotated.graph, kept, links_of(targets, allowed))
        made = annotated.rewritten(result.graph, result.stand_ins)
        pins = dict(made.pins)
        for tensor, name in result.devices.items():
            at = index.get(name)
            if at is not None and tensor.signature is not None and targets[at].support(tensor.signature).reason is None:
                pins.setdefault(tensor, at)
        causes = {tensor: "shard" for tensor in result.devices if tensor in pins}
        return replace(made, pins=pins, causes=causes, sharded=result.sharded, collectives=result.collectives)

    def _within_limit(self, annotated: AnnotatedGraph, allowed: Allowed, limit: int) -> AnnotatedGraph:
        """The graph with as much computed again as the limit of memory asks for."""
        from opweave.scheduler.place.strategy import rewrite  # most schedulers have no limit

        def planned(tried: Graph, changed: Mapping[Tensor, Tensor], again: Mapping[Tensor, Tensor]) -> int:
            made = annotated.rewritten(tried, changed, again)
            parts = self._place_and_partition(made, precisions_of(tried.nodes, allowed))
            plan = allocate(parts, fuse(parts), [[] for _ in self.targets], self.n_slots)
            return sum(plan.nbytes.values())

        graph, changed, again, least = rewrite("memory_limit")(annotated.graph, limit, planned)
        if least > limit:
            remedy = "computing again saves no more; take smaller batches"
            raise AllocationError(f"a plan within memory_limit={limit:,}", least, limit, remedy)
        return annotated.rewritten(graph, changed, again)

    def _place_and_partition(
        self, annotated: AnnotatedGraph, precisions: Mapping[Tensor, Precision], observed: Collection[Tensor] = ()
    ) -> Partition:
        """The partition of a graph that no pass makes anew any more."""
        predicted = None
        if self.strategy is None:
            assignment = assign(annotated, self.targets, self.op_offload, precisions)
        else:
            from opweave.scheduler.place.strategy import PlacementProblem  # most schedulers place by priority

            problem = PlacementProblem(annotated, self.targets, self.op_offload, precisions)
            assignment, predicted = self.strategy(problem)
        parts = partition(annotated, assignment, observed)
        return parts if predicted is None else replace(parts, prediction=predicted)

    def compile(
        self,
        parts: Partition,
        form: Outputs,
        show: Show | None = None,
        candidates: Iterable[Program] = (),
    ) -> Program:
        """The program of a partition, with memory; ``show`` is called with the values of observed nodes. The first
        of the ``candidates``, programs of this scheduler, that is like it may have calls that can be used again."""
        groups = fuse(parts)
        earlier = next((program.earlier for program in candidates if program.earlier.is_like(parts)), None)
        plan, bindings, leases = self._take_memory(parts, groups, 1 if show is not None else self.n_slots, earlier)
        executor = self.executor
        lists = lower(
            parts, groups, bindings, overlapping=self.parallel, count=executor.count_copied, show=show, earlier=earlier
        )
        state = ProgramState(parts, lists, leases, form)
        variant = partial(self._with_observed, parts, form)
        return Program(executor, state, groups, plan.nbytes, variant, self.forget)

    def rebuild(self, program: Program) -> Program:
        """The program of another scheduler over the same devices, each node on its device."""
        parts = program.partition
        nodes = [node for node in parts.graph.nodes if node.base is None]
        precisions = parts.assignment.capabilities.precisions
        capabilities = Capabilities(self.targets, parts.graph.leaves, nodes, precisions)
        assignment = replace(parts.assignment, capabilities=capabilities)
        return self.compile(partition(parts.annotated, assignment), program.internals.form)

    def _with_observed(self, parts: Partition, form: Outputs, observed: Collection[Tensor], show: Show) -> Program:
        """The program again, with calls of ``show`` behind the observed nodes."""
        with self.executor.lock:
            planned = self._place_and_partition(parts.annotated, parts.assignment.capabilities.precisions, observed)
            return self.compile(planned, form, show)

    def _take_memory(
        self, parts: Partition, groups: Groups, slots: int, earlier: EarlierProgram | None
    ) -> tuple[MemoryPlan, list[Bindings], list[Lease]]:
        """Memory for as many slots as are wanted, or for one where there is too little."""
        tight = False
        while True:
            capacities = [arena.capacities() for arena in self.arenas]
            plan = allocate(parts, groups, capacities, slots, tight=tight)
            try:
                return plan, *bind(parts, plan, self.arenas, self.host, earlier, tight=tight)
            except AllocationError as error:
                if not tight and any(capacities):
                    tight = True
                    continue
                if slots == 1:
                    raise
                warnings.warn(f"too little memory for {slots} slots, so that runs will not overlap: {error}",
                              RuntimeWarning, stacklevel=4)  # fmt: skip
                slots, tight = 1, False
