"""Which device runs which node, and why. Five passes over the graph, each linear; every decision keeps its cause.

1. Decided beforehand: pins, nodes that write a placed state, nodes that read placed weights, offload.
2. Grow: open nodes take the device of their neighbours in the order, first of the devices that are not the last.
3. Choose: what is still open goes where most of its sources already are; ties and free choices by priority. What has no
   sources goes to its reader.
4. Upgrade: a node moves up to a device that shares its memory and wants it.
5. Views follow their root, open leaves their reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.capabilities import Kind
from opweave.contract.device import Device
from opweave.contract.space import Usage
from opweave.errors import UnsupportedOpError
from opweave.graph.tensor import Signature
from opweave.scheduler.target import Target, Verdict, unbound_step

if TYPE_CHECKING:
    from opweave.contract.memory import BufferType
    from opweave.contract.step import Step
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Leaf, Location, Placement, Tensor

__all__ = ["CAUSES", "Assignment", "assign", "target_at"]

CAUSES: Final[dict[str, str]] = {
    "pinned": "the caller pinned it there",
    "storage": "it writes memory that lies there",
    "input": "fed values enter there",
    "weights": "it reads weights that lie there",
    "offload": "the device brings the weights from the host for it",
    "expand-down": "the node before it is there",
    "expand-up": "the node after it is there",
    "most-inputs": "most of its sources are there",
    "priority": "the first device in the order that supports it",
    "reader": "it needs nothing, and is made where it is read",
    "upgrade": "a device that shares the memory and wants it",
    "view": "a view lies where its root lies",
    "leaf": "an unplaced leaf goes to its first reader",
    "host": "the last device, which runs the references",
    "cost": "the whole is predicted to take least time so",
}
"""Every cause that `Assignment.causes` holds, with its meaning."""


class Assignment:
    """The target of every node and leaf of a graph.

    Attributes:
        targets: the targets by index.
        target_of: tensor -> index of its target, for computed nodes, leaves and views.
        causes: tensor -> key of `CAUSES`.
        streamed: nodes for which a target brings placed weights from the host for each run.
        special: signatures of nodes that read leaves in special memory (pinned, split, repacked).
        prepared: leaves in memory that keeps whole tensors in a form of its own -> that kind.
    """

    __slots__ = ("causes", "prepared", "special", "streamed", "target_of", "targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets: Final = targets
        self.target_of: dict[Tensor, int] = {}
        self.causes: dict[Tensor, str] = {}
        self.streamed: set[Tensor] = set()
        self.special: dict[Tensor, Signature] = {}
        self.prepared: dict[Tensor, BufferType] = {}

    def signature(self, node: Tensor) -> Signature:
        """What devices are asked about ``node``."""
        found = self.special.get(node, node.signature)
        assert found is not None
        return found

    def verdict(self, target: Target, node: Tensor) -> Verdict:
        """What a device says of ``node``."""
        return target.verdict(self.signature(node))

    def step(self, target: Target, node: Tensor) -> Step:
        """``node`` as a step, the way the target's device would get it."""
        verdict = self.verdict(target, node)
        return unbound_step(self.signature(node), target.device, packed=verdict.packed, unpacked=verdict.unpacked)

    def unpacks(self, source: Tensor, verdict: Verdict) -> bool:
        """Whether a source that the device reaches has to be copied to plain memory for a node all the same: kernels
        are given whole tensors in the form in which they were prepared, where they accept it, and no parts of them."""
        kind = self.prepared.get(source.memory)
        return kind is not None and (source.base is not None or kind in verdict.unpacked)

    def supports(self, target: Target, node: Tensor) -> bool:
        return self.verdict(target, node).reason is None


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
    result = Assignment(targets)
    nodes = [t for t in graph.nodes if t.base is None]
    memories = {t: kind for t in graph.leaves if (kind := _special_memory(t.leaf)) is not None}
    if memories:
        result.special = _special_signatures(nodes, memories)
        result.prepared = {t: kind for t, kind in memories.items() if not kind.is_raw}
    target_of: dict[Tensor, int] = result.target_of
    causes = result.causes
    if pins or placed or any(_has_place(t.leaf) for t in graph.leaves if t.leaf is not None):
        _decide_beforehand(nodes, result, pins, op_offload, placed)
        if target_of and len(target_of) < len(nodes):
            _grow(nodes, result)
    if len(target_of) < len(nodes):
        _choose(nodes, result)
    if any(type(target.device)._wants is not Device._wants for target in targets):
        _upgrade(nodes, result, pins)
    for tensor in graph.nodes:
        if tensor.base is not None and tensor.base.op is not None:
            target_of[tensor] = target_of[tensor.base]
            causes[tensor] = "view"
    _place_leaves(graph, result)
    return result


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


def _refuse(node: Tensor, result: Assignment, message: str) -> UnsupportedOpError:
    reasons = {target.name: result.verdict(target, node).reason or "supported" for target in result.targets}
    return UnsupportedOpError(message, reasons)


def _decide_beforehand(
    nodes: Sequence[Tensor],
    result: Assignment,
    pins: Mapping[Tensor, int],
    op_offload: bool,
    placed: Mapping[Tensor, Placement],
) -> None:
    targets, target_of, causes = result.targets, result.target_of, result.causes
    for node in nodes:
        pinned = pins.get(node)
        if pinned is not None:
            if not result.supports(targets[pinned], node):
                raise _refuse(node, result, f"{node.describe()} is pinned to {targets[pinned].name}, which refuses it")
            target_of[node], causes[node] = pinned, "pinned"
            continue
        state = node.memory.leaf
        storage = placed.get(node) if state is None else state.placement
        if storage is not None:
            home = target_at(targets, storage)
            if home is not None and result.supports(targets[home], node):
                target_of[node], causes[node] = home, "storage"
                continue
        weight = _deciding_weight(node)
        if weight is None:
            continue
        assert weight.leaf is not None
        assert weight.leaf.placement is not None
        home = target_at(targets, weight.leaf.placement)
        if weight in result.prepared:
            home = _reader(targets, node, weight, home, result)
        if op_offload and weight.leaf.placement.buffer.is_host:
            for target in targets[: len(targets) if home is None else home]:
                far = not target.device.reaches(weight.leaf.placement.buffer.space)
                if far and result.supports(target, node) and target.device.offloads(result.step(target, node)):
                    target_of[node], causes[node] = target.index, "offload"
                    result.streamed.add(node)
                    break
        if node not in target_of and home is not None and result.supports(targets[home], node):
            target_of[node], causes[node] = home, "weights"


def _reader(
    targets: Sequence[Target], node: Tensor, weight: Tensor, home: int | None, result: Assignment
) -> int | None:
    """The target that reads a prepared weight as it lies: ``home`` or the first one; ``home`` where none does."""
    first = [] if home is None else [targets[home]]
    for target in (*first, *targets):
        if weight.leaf is None or weight.leaf.placement is None:
            break
        if target.device.reads(weight.leaf.placement.buffer.type):
            verdict = result.verdict(target, node)
            if verdict.reason is None and result.prepared[weight] not in verdict.unpacked:
                return target.index
    return home


def _deciding_weight(node: Tensor) -> Tensor | None:
    """The largest placed weight that the node reads. Vectors (norm scales, frequency tables) do not decide."""
    best: Tensor | None = None
    for source in node.srcs:
        leaf = source.root.leaf
        if (
            leaf is not None
            and leaf.kind == "weight"
            and leaf.placement is not None
            and leaf.placement.buffer.usage is Usage.WEIGHTS
            and len(source.root.shape) > 1
            and (best is None or source.root.nbytes > best.nbytes)
        ):
            best = source.root
    return best


def target_at(targets: Sequence[Target], placement: Placement | Location) -> int | None:
    """The target whose device holds placed memory, else the first one that reaches it."""
    for target in targets:
        if target.device is placement.buffer.device:
            return target.index
    for target in targets:
        if target.device.reaches(placement.buffer.space):
            return target.index
    return None


def _grow(nodes: Sequence[Tensor], result: Assignment) -> None:
    last = len(result.targets) - 1
    for order, cause in ((1, "expand-down"), (-1, "expand-up")):
        _sweep(nodes[::order], result, cause, skip=last)
    for order, cause in ((1, "expand-down"), (-1, "expand-up")):
        _sweep(nodes[::order], result, cause, skip=-1)


def _sweep(nodes: Sequence[Tensor], result: Assignment, cause: str, skip: int) -> None:
    targets, target_of, causes = result.targets, result.target_of, result.causes
    current = -1
    for node in nodes:
        target = target_of.get(node)
        if target is not None:
            current = -1 if target == skip else target
        elif current >= 0 and result.supports(targets[current], node):
            target_of[node], causes[node] = current, cause


def _choose(nodes: Sequence[Tensor], result: Assignment) -> None:
    targets, target_of, causes = result.targets, result.target_of, result.causes
    first = targets[0]
    alone = len(targets) == 1
    device, special = first.device, result.special
    made: list[Tensor] = []  # values out of nothing can be made wherever they are wanted
    for node in nodes:
        if node in target_of:
            continue
        if alone:
            # One device: the common case deserves the short way.
            signature = special.get(node, node.signature) if special else node.signature
            assert signature is not None
            verdict = signature.verdicts.get(device) or first.verdict(signature)
            if verdict.reason is not None:
                raise _refuse(node, result, f"no device runs {node.describe()}")
            target_of[node] = 0
            causes[node] = "priority"
            continue
        if not node.srcs:
            made.append(node)
            continue
        best, best_score, cause = -1, -1, "priority"
        for target in targets:
            verdict = result.verdict(target, node)
            if verdict.reason is not None:
                continue
            score = 0
            for source in node.srcs:
                if not result.prepared or not result.unpacks(source, verdict):
                    score += _reached(target, source.root, result)
            if score > best_score:
                best, best_score = target.index, score
        if best < 0:
            raise _refuse(node, result, f"no device runs {node.describe()}")
        if best_score > 0:
            cause = "most-inputs"
        elif targets[best].device.kind is Kind.HOST:
            cause = "host"
        target_of[node], causes[node] = best, cause
    if made:
        _join_readers(made, nodes, result)


def _join_readers(made: Sequence[Tensor], nodes: Sequence[Tensor], result: Assignment) -> None:
    """Nodes without sources go where their first reader is if that supports them, else to the first that does."""
    targets, target_of = result.targets, result.target_of
    wanted = dict.fromkeys(made, -1)
    for node in nodes:
        for source in node.srcs:
            if wanted.get(source.root) == -1:
                wanted[source.root] = target_of[node]
    for node, at in wanted.items():
        if at >= 0 and result.supports(targets[at], node):
            target_of[node], result.causes[node] = at, "reader"
            continue
        able = next((target for target in targets if result.supports(target, node)), None)
        if able is None:
            raise _refuse(node, result, f"no device runs {node.describe()}")
        target_of[node] = able.index
        result.causes[node] = "host" if able.device.kind is Kind.HOST else "priority"


def _reached(target: Target, root: Tensor, result: Assignment) -> int:
    """1 if the target's device already reaches the value. Inputs and unplaced leaves are wherever they are wanted."""
    home = result.target_of.get(root) if root.state is None else None  # versions lie where their state lies
    if home is not None:
        return 1 if home == target.index or target.device.reaches(result.targets[home].space) else 0
    placement = root.memory.leaf.placement if root.memory.leaf is not None else None
    return 1 if placement is not None and target.device.reaches(placement.buffer.space) else 0


def _upgrade(nodes: Sequence[Tensor], result: Assignment, pins: Mapping[Tensor, int]) -> None:
    targets, target_of = result.targets, result.target_of
    for node in nodes:
        at = target_of[node]
        if node in pins:
            continue
        for target in targets[:at]:
            shared = target.space is targets[at].space
            verdict = result.verdict(target, node)
            fits = (
                shared and verdict.reason is None and not verdict.unpacked - result.verdict(targets[at], node).unpacked
            )
            if fits and target.device.wants(result.step(target, node)):
                target_of[node], result.causes[node] = target.index, "upgrade"
                break


def _place_leaves(graph: Graph, result: Assignment) -> None:
    """Inputs are fed where their readers are if they agree, else on the last device; other leaves join a reader."""
    target_of, causes, last = result.target_of, result.causes, len(result.targets) - 1
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
            home = target_at(result.targets, leaf.placement)
            if home is not None:
                target_of[tensor] = home
            causes[tensor] = "storage"
        else:
            target_of[tensor] = writers.get(tensor, first.get(tensor, last))
            causes[tensor] = "leaf"
