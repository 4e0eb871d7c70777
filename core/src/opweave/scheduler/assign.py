"""Which device runs which node, and why: `Graph` to `Assignment`. Every pass is linear; every decision keeps its cause.

1. Decided beforehand: pins; nodes that write placed memory; nodes that read placed weights, which stay with them unless
   no device there runs them, or a device brings the weights from host memory for them (offload).
2. Grow: open nodes take the device of their neighbours in the order, first of the devices that are not the last.
3. Choose: what is still open goes where most of the bytes that it reads already are; ties and free choices by priority.
4. Boundaries: between what was decided, values cross where that moves the fewest bytes (`fewer_bytes`).
5. What needs nothing goes to its reader; a node moves up to a device that shares its memory and wants it.
6. Views follow their root, open leaves their reader.

A device that only runs the references (`Kind.HOST`) computes what no other one can: it neither grows nor is chosen
where another device runs the node, unless all devices are of that kind. It does write into memory of the host that no
other device reaches, and makes what only it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.capabilities import Kind
from opweave.contract.device import Device
from opweave.errors import UnsupportedOpError
from opweave.graph.tensor import Signature
from opweave.scheduler.boundaries import PlacedWeights, fewer_bytes
from opweave.scheduler.target import Support, Target, unbound_step

if TYPE_CHECKING:
    from opweave.contract.memory import BufferType
    from opweave.contract.step import Step
    from opweave.graph.graph import Graph
    from opweave.graph.leaf import Leaf, Location, Placement
    from opweave.graph.tensor import Tensor

__all__ = ["CAUSES", "Assignment", "Capabilities", "assign", "target_at"]

CAUSES: Final[dict[str, str]] = {
    "pinned": "the caller pinned it there",
    "storage": "it writes memory that lies there",
    "input": "fed values enter there",
    "weights": "it reads weights that lie there",
    "offload": "the device brings the weights from the host for it",
    "expand-down": "the node before it is there",
    "expand-up": "the node after it is there",
    "most-inputs": "most of the bytes that it reads are there",
    "fewest-bytes": "between its neighbours on several devices the fewest bytes move so",
    "priority": "the first device in the order that supports it",
    "reader": "it needs nothing, and is made where it is read",
    "upgrade": "a device that shares the memory and wants it",
    "view": "a view lies where its root lies",
    "leaf": "an unplaced leaf goes to its first reader",
    "host": "no other device runs it; the host runs its reference",
    "cost": "the whole is predicted to take least time so",
}
"""Every cause that `Assignment.causes` holds, with its meaning."""

DECIDED: Final = frozenset(("pinned", "storage", "weights", "offload"))
"""The causes of what is decided beforehand, for a node's own sake."""

GROWN: Final = frozenset(("expand-down", "expand-up"))
"""The causes of what is taken from a neighbour."""


class Capabilities:
    """What the devices of a scheduler say of a graph's nodes.

    Attributes:
        targets: the targets by index, in order of priority.
        special: signatures of nodes that read leaves in special memory (pinned, split, repacked).
        prepared: leaves in memory that keeps whole tensors in a form of its own -> that kind.
        computing: the targets that compute, in order: all but those that only run the references, if there are others.
        references: the others.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        special: Mapping[Tensor, Signature],
        prepared: Mapping[Tensor, BufferType],
    ) -> None:
        self.targets: Final = targets
        self.special: Final = special
        self.prepared: Final = prepared
        references = [target for target in targets if target.device.kind is Kind.HOST]
        if len(references) == len(targets):
            references = []
        self.references: Final = references
        self.computing: Final = [target for target in targets if target not in references]

    def signature(self, node: Tensor) -> Signature:
        """What devices are asked about ``node``."""
        found = self.special.get(node, node.signature) if self.special else node.signature
        assert found is not None
        return found

    def support(self, target: Target, node: Tensor) -> Support:
        """What a device says of ``node``."""
        signature = self.signature(node)
        known: Support | None = signature.support.get(target.device)
        return target.support(signature) if known is None else known

    def supports(self, target: Target, node: Tensor) -> bool:
        """Whether a device runs ``node``."""
        return self.support(target, node).reason is None

    def step(self, target: Target, node: Tensor) -> Step:
        """``node`` as a step, the way the target's device would get it."""
        support = self.support(target, node)
        return unbound_step(self.signature(node), target.device, packed=support.packed, unpacked=support.unpacked)

    def unpacks(self, source: Tensor, support: Support) -> bool:
        """Whether a source that the device reaches has to be copied to plain memory for a node all the same: kernels
        are given whole tensors in the form in which they were prepared, where they accept it, and no parts of them."""
        kind = self.prepared.get(source.memory)
        return kind is not None and (source.base is not None or kind in support.unpacked)

    def able(self, node: Tensor) -> Iterator[Target]:
        """The targets that may run ``node``, in order of priority: those with references only where no other can."""
        found = False
        for target in self.computing:
            if self.supports(target, node):
                found = True
                yield target
        if not found:
            yield from [target for target in self.references if self.supports(target, node)]

    def refusal(self, node: Tensor, message: str) -> UnsupportedOpError:
        """The error that says why no device runs ``node``."""
        reasons = {target.name: self.support(target, node).reason or "supported" for target in self.targets}
        return UnsupportedOpError(message, reasons)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The target of every node and leaf of a graph.

    Attributes:
        capabilities: what the devices said.
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
    graph: Graph,
    targets: Sequence[Target],
    pins: Mapping[Tensor, int],
    op_offload: bool,
    placed: Mapping[Tensor, Placement] = MappingProxyType({}),
) -> Assignment:
    """Place every node of ``graph``. ``placed`` are computed tensors whose memory the caller decided.

    Raises:
        UnsupportedOpError: a pinned node on a device that does not run it, or a node that no device runs; with every
            device's reason.
    """
    nodes = [t for t in graph.nodes if t.base is None]
    memories = {t: kind for t in graph.leaves if (kind := _special_memory(t.leaf)) is not None}
    special = _special_signatures(nodes, memories) if memories else {}
    prepared = {t: kind for t, kind in memories.items() if not kind.is_raw}
    assigning = _Assigning(Capabilities(targets, special, prepared), nodes, op_offload)
    target_of, causes = assigning.target_of, assigning.causes
    if pins or placed or any(_has_place(t.leaf) for t in graph.leaves if t.leaf is not None):
        assigning.decide_beforehand(pins, placed)
        if target_of and len(target_of) < len(nodes):
            assigning.grow()
    if len(target_of) < len(nodes):
        assigning.choose()
    if len(targets) > 1:
        assigning.cross_boundaries()
        assigning.join_readers()
        assigning.upgrade(pins)
    fetched = assigning.fetched(pins)
    for tensor in graph.nodes:
        if tensor.base is not None and tensor.base.op is not None:
            target_of[tensor] = target_of[tensor.base]
            causes[tensor] = "view"
    _place_leaves(graph, targets, target_of, causes)
    return Assignment(assigning.able, target_of, causes, fetched)


def _special_memory(leaf: Leaf | None) -> BufferType | None:
    """The buffer type of a leaf that does not lie in its device's ordinary memory."""
    if leaf is None or leaf.placement is None:
        return None
    kind = leaf.placement.buffer.type
    return None if kind is kind.device.default_buffer_type else kind


def _special_signatures(nodes: Iterable[Tensor], memories: Mapping[Tensor, BufferType]) -> dict[Tensor, Signature]:
    """For every node that reads special memory its signature with that memory in it; equal ones are one object."""
    made: dict[Any, Signature] = {}
    result = {}
    for node in nodes:
        kinds = tuple([_kind_of(source, memories) for source in node.srcs])
        plain = node.signature
        if plain is not None and any(kind is not None for kind in kinds):
            result[node] = made.setdefault(
                (plain, kinds), Signature(plain.op, plain.attrs, plain.out, plain.srcs, kinds)
            )
    return result


def _kind_of(source: Tensor, memories: Mapping[Tensor, BufferType]) -> BufferType | None:
    """The special memory that a kernel would be given a source in. Parts of tensors in a form of its own come as copies
    in ordinary memory."""
    kind = memories.get(source.memory)
    return None if kind is not None and source.base is not None and not kind.is_raw else kind


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


class _Assigning:
    """The passes over the computed nodes of a graph; each one decides for nodes that are still open."""

    def __init__(self, able: Capabilities, nodes: Sequence[Tensor], op_offload: bool) -> None:
        self.able: Final = able
        self.targets: Final = able.targets
        self.nodes: Final = nodes
        self.op_offload: Final = op_offload
        self.offloading: Final = [t for t in able.computing if t.device.caps.offload]
        self.target_of: dict[Tensor, int] = {}
        self.causes: dict[Tensor, str] = {}
        self.weights: PlacedWeights = PlacedWeights(())
        self.made: list[Tensor] = []  # nodes without sources, which can be made wherever they are wanted
        self._near: dict[object, list[Target]] = {}

    # --- decided beforehand -----------------------------------------------------------------------------------------

    def decide_beforehand(self, pins: Mapping[Tensor, int], placed: Mapping[Tensor, Placement]) -> None:
        """Pins, nodes that write placed memory, nodes that read placed weights."""
        target_of, causes = self.target_of, self.causes
        self.weights = PlacedWeights(self.nodes)
        for node in self.nodes:
            pinned = pins.get(node)
            if pinned is not None:
                target = self.targets[pinned]
                if not self.able.supports(target, node):
                    raise self.able.refusal(node, f"{node.describe()} is pinned to {target.name}, which refuses it")
                target_of[node], causes[node] = pinned, "pinned"
                continue
            leaf = node.memory.leaf
            storage = placed.get(node) if leaf is None else leaf.placement
            at = self._where_written(node, storage) if storage is not None else None
            if at is not None:
                target_of[node], causes[node] = at.index, "storage"
                continue
            for weight in self.weights.of.get(node, ()):
                decided = self._by_weight(node, weight)
                if decided is not None:
                    target_of[node], causes[node] = decided
                    break

    def _by_reach(self, placement: Placement | Location) -> list[Target]:
        """The targets that reach placed memory: the one that holds it first, those with references last."""
        buffer = placement.buffer
        found = self._near.get(buffer)
        if found is None:
            found = [t for t in self.targets if t.device is buffer.device or t.device.reaches(buffer.space)]
            found.sort(key=lambda t: (t in self.able.references, t.device is not buffer.device))
            self._near[buffer] = found
        return found

    def _where_written(self, node: Tensor, storage: Placement | Location) -> Target | None:
        """The target that computes ``node`` right into its placed memory; ``None``: its result is written back."""
        target = next((t for t in self._by_reach(storage) if self.able.supports(t, node)), None)
        if target in self.able.references and node.state is None:
            return None  # a result that the caller placed in the host's memory; a state would go there and back
        return target

    def _by_weight(self, node: Tensor, weight: Tensor) -> tuple[int, str] | None:
        """Target and cause that a placed weight decides for a node that reads it, if it does."""
        able = self.able
        placement = weight.leaf.placement if weight.leaf is not None else None
        assert placement is not None
        near = self._by_reach(placement)
        home: Target | None = None
        for target in near:
            if able.supports(target, node):
                home = target
                break
        if weight in able.prepared:
            home = self._reader(near, node, weight) or home
        if self.op_offload and placement.buffer.is_host:
            only_references = home is None or home in able.references
            for target in self.offloading:
                if not only_references and home is not None and target.index >= home.index:
                    break
                far = target not in near and able.supports(target, node)
                if far and target.device.offloads(able.step(target, node)):
                    return target.index, "offload"
            if only_references:
                return None  # brought to whichever device computes it
        return (home.index, "weights") if home is not None else None

    def _reader(self, near: Sequence[Target], node: Tensor, weight: Tensor) -> Target | None:
        """The first target that reads a prepared weight as it lies."""
        kind = self.able.prepared[weight]
        for target in near:
            if target.device.reads(kind):
                support = self.able.support(target, node)
                if support.reason is None and kind not in support.unpacked:
                    return target
        return None

    def fetched(self, pins: Mapping[Tensor, int]) -> set[Tensor]:
        """The nodes that begin a split because weights come from host memory for them; vectors are no reason to."""
        result: set[Tensor] = set()
        for weight, readers in self.weights.readers.items():
            placement = weight.leaf.placement if weight.leaf is not None else None
            if placement is None or not placement.buffer.is_host or weight.ndim < 2:
                continue
            near = {target.index for target in self._by_reach(placement)}
            result.update(node for node in readers if self.target_of[node] not in near and node not in pins)
        return result

    # --- neighbours -------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Open nodes take the device of the nodes before and after them in the order."""
        references = frozenset(target.index for target in self.able.references)
        last = frozenset([len(self.targets) - 1])
        for skipped in (references | last, references):
            for order, cause in ((1, "expand-down"), (-1, "expand-up")):
                self._sweep(self.nodes[::order], cause, skipped)

    def _sweep(self, nodes: Sequence[Tensor], cause: str, skipped: Set[int]) -> None:
        targets, target_of, causes = self.targets, self.target_of, self.causes
        supports = self.able.supports
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
        target_of, causes, able = self.target_of, self.causes, self.able
        first, special = self.targets[0], self.able.special
        alone = len(self.targets) == 1
        device = first.device
        for node in self.nodes:
            if node in target_of:
                continue
            if alone:
                # One device: the common case deserves the short way.
                signature = special.get(node, node.signature) if special else node.signature
                assert signature is not None
                support = signature.support.get(device) or first.support(signature)
                if support.reason is not None:
                    raise able.refusal(node, f"no device runs {node.describe()}")
                target_of[node] = 0
                causes[node] = "priority"
                continue
            if not node.srcs:
                self.made.append(node)
                continue
            best, most = None, -1
            for target in able.able(node):
                read = node.srcs
                if able.prepared:
                    support = able.support(target, node)
                    read = tuple([source for source in read if not able.unpacks(source, support)])
                reached = sum([self._reached(target, source) for source in read])
                if reached > most:
                    best, most = target, reached
            if best is None:
                raise able.refusal(node, f"no device runs {node.describe()}")
            target_of[node] = best.index
            near = most > 0 and best not in able.references
            causes[node] = "most-inputs" if near else self._chosen(best)

    @staticmethod
    def _chosen(target: Target) -> str:
        return "host" if target.device.kind is Kind.HOST else "priority"

    def _reached(self, target: Target, source: Tensor) -> int:
        """The bytes of a source if the target's device reaches them already, else 0. Inputs and unplaced leaves are
        wherever they are wanted."""
        root = source.root
        home = self.target_of.get(root) if root.state is None else None  # versions lie where their state lies
        if home is not None:
            near = home == target.index or target.device.reaches(self.targets[home].space)
            return source.nbytes if near else 0
        placement = root.memory.leaf.placement if root.memory.leaf is not None else None
        return source.nbytes if placement is not None and target.device.reaches(placement.buffer.space) else 0

    def cross_boundaries(self) -> None:
        """Nodes between decided ones on several devices move to where the fewest bytes cross."""
        causes, weights = self.causes, self.weights
        computing = [target.index for target in self.able.computing]
        offloading = {self.target_of[node] for node, cause in causes.items() if cause == "offload"}

        def movable(node: Tensor) -> Sequence[int]:
            cause = causes.get(node)
            if cause in GROWN:
                return computing
            return weights.movable(node, self.able, offloading) if cause == "weights" else ()

        def decided(node: Tensor) -> bool:
            return causes.get(node) in DECIDED

        for node, at in fewer_bytes(self.nodes, self.able, self.target_of, decided, movable).items():
            self.target_of[node], causes[node] = at, "fewest-bytes"

    def join_readers(self) -> None:
        """Nodes without sources go where their first reader is if that supports them, else to the first that does."""
        wanted = dict.fromkeys(self.made, -1)
        for node in self.nodes if wanted else ():
            for source in node.srcs:
                if wanted.get(source.root) == -1:
                    wanted[source.root] = self.target_of[node]
        for node, at in wanted.items():
            if at >= 0 and self.able.supports(self.targets[at], node):
                self.target_of[node], self.causes[node] = at, "reader"
                continue
            able = next(self.able.able(node), None)
            if able is None:
                raise self.able.refusal(node, f"no device runs {node.describe()}")
            self.target_of[node] = able.index
            self.causes[node] = self._chosen(able)

    def upgrade(self, pins: Mapping[Tensor, int]) -> None:
        """A node moves up to a device that shares its memory, and that of its weights and states, and wants it."""
        if all(type(target.device)._wants is Device._wants for target in self.targets):
            return
        targets, able = self.targets, self.able
        for node in self.nodes:
            at = targets[self.target_of[node]]
            if node in pins:
                continue
            for target in targets[: at.index]:
                support = able.support(target, node)
                if (
                    target.space is at.space
                    and support.reason is None
                    and not support.unpacked - able.support(at, node).unpacked
                    and all(self._reached(target, s) or not self._reached(at, s) for s in node.srcs)
                    and target.device.wants(able.step(target, node))
                ):
                    self.target_of[node], self.causes[node] = target.index, "upgrade"
                    break


def _place_leaves(
    graph: Graph, targets: Sequence[Target], target_of: dict[Tensor, int], causes: dict[Tensor, str]
) -> None:
    """Inputs are fed where their readers are if they agree, else on the last device; other leaves join a reader."""
    last = len(targets) - 1
    first: dict[Tensor, int] = {}
    shared: set[Tensor] = set()  # read on several targets
    writers: dict[Tensor, int] = {}
    for node in graph.nodes:
        if node.base is not None:
            continue
        at = target_of[node]
        if node.state is not None:
            writers.setdefault(node.state, at)
        for source in node.srcs:
            root = source if source.base is None else source.base
            if root.leaf is not None and first.setdefault(root, at) != at:
                shared.add(root)
    for tensor in graph.leaves:
        leaf = tensor.leaf
        assert leaf is not None
        if leaf.kind == "input":
            target_of[tensor] = last if tensor in shared else first.get(tensor, last)
            causes[tensor] = "input"
        elif leaf.placement is not None:
            home = target_at(targets, leaf.placement)
            if home is not None:
                target_of[tensor] = home
            causes[tensor] = "storage"
        else:
            target_of[tensor] = writers.get(tensor, first.get(tensor, last))
            causes[tensor] = "leaf"
