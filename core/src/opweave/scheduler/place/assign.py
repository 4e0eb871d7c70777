"""Which device runs which node, and why: `AnnotatedGraph` to `Assignment`. Every pass takes linear time; the cause of
every decision is recorded.

1. Decided beforehand: pins; nodes that write placed memory or a pinned state; nodes that read placed weights, which
   stay with them unless no device there runs them, or a device brings the weights from host memory for them (offload).
   Small tables decide nothing, nor do small weights in host memory where a device brings others (`PlacedMemory`).
2. Grow: undecided nodes take the device of their neighbours in the order, the last device after all others.
3. Choose: a node that is still undecided runs on the device that reaches most of the bytes that it reads; among equals,
   on that of the highest priority.
4. States: where the largest value that a node of passes 2 and 3 reads is a state, or was made from one by this rule,
   and its device does not reach that, it moves to the first device that does.
5. Nodes without sources run on the device of their reader; a node moves to a device of higher priority that shares its
   memory and asks for it (``Device._wants``).
6. Views are on the device of their root, leaves without a device on that of their reader.

A device that only runs the references (`Kind.HOST`) runs nodes that no other device supports, unless all devices are of
that kind. It also runs nodes that write into host memory which no other device reaches, and nodes without sources that
only it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from opweave.contract.device import Kind
from opweave.runtime.device import Device
from opweave.scheduler.place.capabilities import Capabilities
from opweave.scheduler.place.target import Target

if TYPE_CHECKING:
    from opweave.contract.memory import MemorySpace
    from opweave.graph.leaf import Leaf, Location, Placement
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor
    from opweave.runtime.buffer import Buffer
    from opweave.scheduler.place.annotated_graph import AnnotatedGraph
    from opweave.scheduler.place.memory import PlacedMemory

__all__ = ["CAUSES", "Assignment", "assign", "target_at"]

CAUSES: Final[dict[str, str]] = {
    "pinned": "the caller pinned it there",
    "shard": "it belongs to the part of a weight that lies there",
    "storage": "it writes memory that lies there",
    "input": "fed values enter there",
    "weights": "it reads weights that lie there",
    "offload": "the device brings the weights from the host for it",
    "expand-down": "the node before it is there",
    "expand-up": "the node after it is there",
    "most-inputs": "most of the bytes that it reads are there",
    "state": "the largest value that it reads is a state that lies there, or was made from one there",
    "priority": "the first device in the order that supports it",
    "reader": "it needs nothing, and is made where it is read",
    "upgrade": "a device that shares the memory and wants it",
    "view": "a view lies where its root lies",
    "leaf": "an unplaced leaf goes to its first reader",
    "host": "no other device runs it; the host runs its reference",
    "dense": "its reader takes dense operands only",
    "cost": "the whole is predicted to take least time so",
}
"""Every cause that `Assignment.causes` holds, and that of packing steps, with its meaning."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The target of every node and leaf of a graph.

    Attributes:
        capabilities: what the devices say of the nodes.
        target_of: tensor -> index of its target, for computed nodes, leaves and views.
        causes: tensor -> key of `CAUSES`.
        fetched: nodes for which a target brings placed weights from host memory in each run.
    """

    capabilities: Capabilities
    target_of: Mapping[Tensor, int]
    causes: Mapping[Tensor, str]
    fetched: Set[Tensor]

    @property
    def targets(self) -> Sequence[Target]:
        """The targets by index."""
        return self.capabilities.targets

    def with_causes(self, causes: Mapping[Tensor, str]) -> Assignment:
        """The same with other causes for some tensors."""
        return replace(self, causes={**self.causes, **causes})


def assign(
    annotated: AnnotatedGraph, targets: Sequence[Target], op_offload: bool, precisions: Mapping[Tensor, Precision]
) -> Assignment:
    """Place every node of a graph. ``precisions`` are nodes that may be computed less than exactly.

    Raises:
        UnsupportedOpError: a pinned node on a device that does not run it, or a node that no device runs; with every
            device's reason.
    """
    graph, pins, placed = annotated.graph, annotated.pins, annotated.placed
    nodes = [t for t in graph.nodes if t.base is None]
    capabilities = Capabilities(targets, graph.leaves, nodes, precisions)
    assigning = _Assigning(capabilities, graph.leaves, nodes, {t: at for t, at in pins.items() if t.op is None})
    target_of, causes = assigning.target_of, assigning.causes
    if pins or placed or any(_has_place(t.leaf) for t in graph.leaves if t.leaf is not None):
        assigning.decide_beforehand(pins, placed, op_offload)
        if target_of and len(target_of) < len(nodes):
            assigning.grow()
    if len(target_of) < len(nodes):
        assigning.choose()
    if len(targets) > 1:
        assigning.follow_states()
        assigning.join_readers()
        assigning.upgrade(pins)
    fetched = assigning.memory.fetched(target_of, pins) if assigning.memory is not None else frozenset()
    for tensor in graph.nodes if len(nodes) < len(graph.nodes) else ():
        if tensor.base is not None and tensor.base.op is not None:
            target_of[tensor] = target_of[tensor.base]
            causes[tensor] = "view"
    assigning.place_leaves()
    return Assignment(capabilities, target_of, {**causes, **annotated.causes}, fetched)


def _has_place(leaf: Leaf) -> bool:
    return leaf.placement is not None and leaf.kind in ("weight", "state")


def target_at(targets: Sequence[Target], placement: Placement | Location) -> int | None:
    """The target whose device holds placed memory, else the first one that reaches it."""
    for target in targets:
        if target.device is placement.buffer.device:
            return target.index
    for target in targets:
        if target.device.reaches(placement.buffer.space):
            return target.index
    return None


@dataclass(eq=False)
class _Assigning:
    """The passes over the computed nodes of a graph; each one decides for nodes that are still open."""

    capabilities: Capabilities
    leaves: Sequence[Tensor]
    nodes: Sequence[Tensor]
    leaf_pins: Mapping[Tensor, int]  # inputs, and states without memory
    target_of: dict[Tensor, int] = field(default_factory=dict)
    causes: dict[Tensor, str] = field(default_factory=dict)
    memory: PlacedMemory | None = None  # set by `decide_beforehand`
    decided: Set[Tensor] = frozenset()  # the nodes that it has decided
    made: list[Tensor] = field(default_factory=list)  # nodes without sources, which run on the device that reads them

    def __post_init__(self) -> None:
        self.targets = self.capabilities.targets

    @cached_property
    def readers(self) -> Mapping[Tensor, Sequence[Tensor]]:
        """The nodes that read each value or a view of it, in order, once for each time that they read it."""
        readers: dict[Tensor, list[Tensor]] = {}
        for node in self.nodes:
            for source in node.srcs:
                root = source if source.base is None else source.base
                if root in readers:
                    readers[root].append(node)
                else:
                    readers[root] = [node]
        return readers

    @cached_property
    def writers(self) -> Mapping[Tensor, Tensor]:
        """The first node that writes each state: a state without memory takes the device of that node."""
        return {node.state: node for node in reversed(self.nodes) if node.state is not None}

    # --- decided beforehand -----------------------------------------------------------------------------------------

    def decide_beforehand(
        self, pins: Mapping[Tensor, int], placed: Mapping[Tensor, Placement], op_offload: bool
    ) -> None:
        """Pins, nodes that write placed memory, nodes that read placed weights."""
        from opweave.scheduler.place.memory import PlacedMemory  # importing opweave must not pay for it

        memory = self.memory = PlacedMemory(self.capabilities, self.leaves, self.readers, op_offload)
        target_of, causes = self.target_of, self.causes
        concerned = {*memory.weights, *pins, *placed}
        for node in self.nodes:
            if node not in concerned and node.state is None:
                continue
            pinned = pins.get(node)
            if pinned is not None:
                target = self.targets[pinned]
                if not self.capabilities.supports(target, node):
                    raise self.capabilities.refusal(
                        node, f"{node.describe()} is pinned to {target.name}, which refuses it"
                    )
                target_of[node], causes[node] = pinned, "pinned"
                continue
            home = None if node.state is None else self.leaf_pins.get(node.state)
            if home is not None and self.capabilities.supports(self.targets[home], node):
                target_of[node], causes[node] = home, "storage"
                continue
            leaf = None if node.state is None else node.state.leaf
            storage = placed.get(node) if leaf is None else leaf.placement
            found = memory.decide(node, storage)
            if found is not None:
                target_of[node], causes[node] = found
        if "offload" in causes.values():
            for node in memory.beside_offloaded():
                if causes.get(node) == "weights":
                    del target_of[node], causes[node]
        self.decided = frozenset(target_of)

    # --- neighbours -------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Open nodes take the device of the nodes before and after them in the order."""
        references = frozenset(target.index for target in self.capabilities.references)
        last = frozenset([len(self.targets) - 1])
        for skipped in (references | last, references):
            for order, cause in ((1, "expand-down"), (-1, "expand-up")):
                if len(self.target_of) < len(self.nodes):
                    self._sweep(self.nodes[::order], cause, skipped)

    def _sweep(self, nodes: Sequence[Tensor], cause: str, skipped: Set[int]) -> None:
        targets, target_of, causes = self.targets, self.target_of, self.causes
        supports = self.capabilities.supports
        current = -1
        for node in nodes:
            target = target_of.get(node)
            if target is not None:
                current = -1 if target in skipped else target
            elif current >= 0 and supports(targets[current], node):
                target_of[node], causes[node] = current, cause

    # --- what is still open -----------------------------------------------------------------------------------------

    def choose(self) -> None:
        """The device that reaches most of the bytes that a node reads, else the first that runs it."""
        target_of, causes, capabilities = self.target_of, self.causes, self.capabilities
        nodes = [node for node in self.nodes if node not in target_of] if target_of else self.nodes
        if len(self.targets) == 1:
            only = self.targets[0]
            asked = {node.signature for node in nodes}
            if capabilities.special:
                asked = set(map(capabilities.signature, nodes))
            if any(only.support(signature).reason is not None for signature in asked if signature is not None):
                refused = next(node for node in nodes if not capabilities.supports(only, node))
                raise capabilities.refusal(refused)
            target_of.update(dict.fromkeys(nodes, 0))
            causes.update(dict.fromkeys(nodes, "priority"))
            return
        for node in nodes:
            if not node.srcs:
                self.made.append(node)
                continue
            best, most = None, -1
            located = [(source, *where) for source in node.srcs if (where := self._location(source)) is not None]
            for target in capabilities.runners(node):
                read = located
                if capabilities.prepared:
                    support = capabilities.support(target, node)
                    read = [where for where in read if not capabilities.unpacks(where[0], support)]
                reached = 0
                for source, home, space in read:
                    if home == target.index or target.device.reaches(space):
                        reached += source.nbytes
                if reached > most:
                    best, most = target, reached
            if best is None:
                raise capabilities.refusal(node)
            near = most > 0 and best not in capabilities.references
            target_of[node], causes[node] = best.index, "most-inputs" if near else self._chosen(best)

    @staticmethod
    def _chosen(target: Target) -> str:
        return "host" if target.device.kind is Kind.HOST else "priority"

    def _location(self, source: Tensor) -> tuple[int, MemorySpace] | None:
        """The target whose memory holds a source, -1 for placed leaves, and the space. ``None`` for what can be placed
        on any device: inputs and unplaced leaves that nobody pinned, and states whose first writer is still open."""
        owner = source.memory  # versions lie where their state lies
        if owner.leaf is not None and owner.leaf.placement is not None:
            return -1, owner.leaf.placement.buffer.space
        home = self.leaf_pins.get(owner, self.target_of.get(self.writers.get(owner, owner)))
        return None if home is None else (home, self.targets[home].space)

    def _reaches(self, target: Target, source: Tensor) -> bool:
        """Whether the target's device reaches a source where it lies; ``False`` for what lies nowhere yet."""
        where = self._location(source)
        return where is not None and (where[0] == target.index or target.device.reaches(where[1]))

    def follow_states(self) -> None:
        """Nodes that were not decided beforehand move to where a state lies if they would copy it otherwise, and it is
        the largest value that they read; what is made from it so counts as the state does."""
        target_of, causes = self.target_of, self.causes
        held = {tensor for tensor in self.leaves if tensor.leaf is not None and tensor.leaf.kind == "state"}
        for node in self.nodes if held else ():
            read = [s for s in node.srcs if (leaf := s.memory.leaf) is None or leaf.kind in ("input", "state")]
            if node in self.decided or not read:
                continue
            largest = max(read, key=lambda s: (min(s.nbytes, s.root.nbytes), s.memory not in held))
            if largest.memory not in held:
                continue
            held.add(node)
            if not self._reaches(self.targets[target_of[node]], largest):
                near = [target for target in self.capabilities.computing if self._reaches(target, largest)]
                target = next((target for target in near if self.capabilities.supports(target, node)), None)
                if target is not None:
                    target_of[node], causes[node] = target.index, "state"

    def join_readers(self) -> None:
        """Nodes without sources run on the device of their first reader if it supports them, else on the first that
        does."""
        for node in self.made:
            reader = next(iter(self.readers.get(node, ())), None)
            if reader is not None and self.capabilities.supports(self.targets[self.target_of[reader]], node):
                self.target_of[node], self.causes[node] = self.target_of[reader], "reader"
                continue
            runner = next(self.capabilities.runners(node), None)
            if runner is None:
                raise self.capabilities.refusal(node)
            self.target_of[node], self.causes[node] = runner.index, self._chosen(runner)

    def upgrade(self, pins: Mapping[Tensor, int]) -> None:
        """A node moves to a device of higher priority that shares its memory and that of its weights and states, and
        asks for it."""
        if all(type(target.device)._wants is Device._wants for target in self.targets):
            return
        targets, capabilities = self.targets, self.capabilities
        for node in self.nodes:
            at = targets[self.target_of[node]]
            if node in pins:
                continue
            for target in targets[: at.index]:
                support = capabilities.support(target, node)
                if (
                    target.space is at.space
                    and support.reason is None
                    and not support.unpacked - capabilities.support(at, node).unpacked
                    and all(self._reaches(target, s) or not self._reaches(at, s) for s in node.srcs)
                    and target.device.wants(capabilities.step(target, node))
                ):
                    self.target_of[node], self.causes[node] = target.index, "upgrade"
                    break

    # --- leaves -----------------------------------------------------------------------------------------------------

    def place_leaves(self) -> None:
        """Inputs that nobody pinned are fed on the device of their readers if all are on one device, else on the last
        device; other leaves are on the device of a reader, or of the node that writes them."""
        target_of, causes, last = self.target_of, self.causes, len(self.targets) - 1
        readers = self.readers if last else {}  # with one device there is nothing to choose
        homes: dict[Buffer, int | None] = {}
        for tensor in self.leaves:
            leaf = tensor.leaf
            assert leaf is not None
            if tensor in self.leaf_pins:
                target_of[tensor], causes[tensor] = self.leaf_pins[tensor], "pinned"
                continue
            if leaf.placement is not None:
                buffer = leaf.placement.buffer
                if buffer not in homes:
                    homes[buffer] = target_at(self.targets, leaf.placement)
                home = homes[buffer]
                if home is not None:
                    target_of[tensor] = home
                causes[tensor] = "storage"
                continue
            read = [target_of[node] for node in readers.get(tensor, ())] or [last]
            if leaf.kind == "input":
                target_of[tensor] = read[0] if read.count(read[0]) == len(read) else last
                causes[tensor] = "input"
            else:
                target_of[tensor] = target_of.get(self.writers.get(tensor, tensor), read[0])
                causes[tensor] = "leaf"
