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

from opweave.contract.device import Device, Kind
from opweave.contract.space import Usage
from opweave.errors import UnsupportedOpError
from opweave.graph.tensor import Signature
from opweave.scheduler.target import Lane, Verdict, unbound_step

if TYPE_CHECKING:
    from opweave.contract.memory import BufferType
    from opweave.contract.step import Step
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Leaf, Location, Placement, Tensor

__all__ = ["CAUSES", "Assignment", "assign", "lane_at"]

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
    """The lane of every node and leaf of a graph.

    Attributes:
        lanes: the lanes by index.
        lane_of: tensor -> index of its lane, for computed nodes, leaves and views.
        causes: tensor -> key of `CAUSES`.
        streamed: nodes for which a lane brings placed weights from the host for each run.
        special: signatures of nodes that read leaves in special memory (pinned, split, repacked).
    """

    __slots__ = ("causes", "lane_of", "lanes", "special", "streamed")

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes: Final = lanes
        self.lane_of: dict[Tensor, int] = {}
        self.causes: dict[Tensor, str] = {}
        self.streamed: set[Tensor] = set()
        self.special: dict[Tensor, Signature] = {}

    def signature(self, node: Tensor) -> Signature:
        """What devices are asked about ``node``."""
        found = self.special.get(node, node.signature)
        assert found is not None
        return found

    def verdict(self, lane: Lane, node: Tensor) -> Verdict:
        """What a device says of ``node``."""
        return lane.verdict(self.signature(node))

    def step(self, lane: Lane, node: Tensor) -> Step:
        """``node`` as a step, the way the lane's device would get it."""
        return unbound_step(self.signature(node), lane.device, packed=self.verdict(lane, node).packed)

    def supports(self, lane: Lane, node: Tensor) -> bool:
        return self.verdict(lane, node).reason is None


def assign(
    graph: Graph,
    lanes: Sequence[Lane],
    pins: Mapping[Tensor, int],
    op_offload: bool,
    placed: Mapping[Tensor, Placement] = MappingProxyType({}),
) -> Assignment:
    """Place every node of ``graph``. ``placed`` are computed tensors whose memory the caller decided.

    Raises:
        UnsupportedOpError: a pinned node on a device that does not run it, or a node that no device runs; with every
            device's reason.
    """
    result = Assignment(lanes)
    nodes = [t for t in graph.nodes if t.base is None]
    memories = {t: kind for t in graph.leaves if (kind := _special_memory(t.leaf)) is not None}
    if memories:
        result.special = _special_signatures(nodes, memories)
    lane_of: dict[Tensor, int] = result.lane_of
    causes = result.causes
    if pins or placed or any(_has_place(t.leaf) for t in graph.leaves if t.leaf is not None):
        _decide_beforehand(nodes, result, pins, op_offload, placed)
        if lane_of and len(lane_of) < len(nodes):
            _grow(nodes, result)
    if len(lane_of) < len(nodes):
        _choose(nodes, result)
    if any(type(lane.device)._wants is not Device._wants for lane in lanes):
        _upgrade(nodes, result, pins)
    for tensor in graph.nodes:
        if tensor.base is not None and tensor.base.op is not None:
            lane_of[tensor] = lane_of[tensor.base]
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
        kinds = tuple([memories.get(source.root) for source in node.srcs])
        plain = node.signature
        if plain is not None and any(kind is not None for kind in kinds):
            result[node] = made.setdefault(
                (plain, kinds), Signature(plain.op, plain.attrs, plain.out, plain.srcs, kinds)
            )
    return result


def _has_place(leaf: Leaf) -> bool:
    return leaf.placement is not None and leaf.kind in ("weight", "state")


def _refuse(node: Tensor, result: Assignment, message: str) -> UnsupportedOpError:
    reasons = {lane.name: result.verdict(lane, node).reason or "supported" for lane in result.lanes}
    return UnsupportedOpError(message, reasons)


def _decide_beforehand(
    nodes: Sequence[Tensor],
    result: Assignment,
    pins: Mapping[Tensor, int],
    op_offload: bool,
    placed: Mapping[Tensor, Placement],
) -> None:
    lanes, lane_of, causes = result.lanes, result.lane_of, result.causes
    for node in nodes:
        pinned = pins.get(node)
        if pinned is not None:
            if not result.supports(lanes[pinned], node):
                raise _refuse(node, result, f"{node.describe()} is pinned to {lanes[pinned].name}, which refuses it")
            lane_of[node], causes[node] = pinned, "pinned"
            continue
        state = node.memory.leaf
        storage = placed.get(node) if state is None else state.placement
        if storage is not None:
            home = lane_at(lanes, storage)
            if home is not None and result.supports(lanes[home], node):
                lane_of[node], causes[node] = home, "storage"
                continue
        weight = _deciding_weight(node)
        if weight is None:
            continue
        assert weight.leaf is not None
        assert weight.leaf.placement is not None
        home = lane_at(lanes, weight.leaf.placement)
        if op_offload and weight.leaf.placement.buffer.is_host:
            for lane in lanes[: len(lanes) if home is None else home]:
                far = not lane.device.reaches(weight.leaf.placement.buffer.space)
                if far and result.supports(lane, node) and lane.device.offloads(result.step(lane, node)):
                    lane_of[node], causes[node] = lane.index, "offload"
                    result.streamed.add(node)
                    break
        if node not in lane_of and home is not None and result.supports(lanes[home], node):
            lane_of[node], causes[node] = home, "weights"


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


def lane_at(lanes: Sequence[Lane], placement: Placement | Location) -> int | None:
    """The lane whose device holds placed memory, else the first one that reaches it."""
    for lane in lanes:
        if lane.device is placement.buffer.device:
            return lane.index
    for lane in lanes:
        if lane.device.reaches(placement.buffer.space):
            return lane.index
    return None


def _grow(nodes: Sequence[Tensor], result: Assignment) -> None:
    last = len(result.lanes) - 1
    for order, cause in ((1, "expand-down"), (-1, "expand-up")):
        _sweep(nodes[::order], result, cause, skip=last)
    for order, cause in ((1, "expand-down"), (-1, "expand-up")):
        _sweep(nodes[::order], result, cause, skip=-1)


def _sweep(nodes: Sequence[Tensor], result: Assignment, cause: str, skip: int) -> None:
    lanes, lane_of, causes = result.lanes, result.lane_of, result.causes
    current = -1
    for node in nodes:
        lane = lane_of.get(node)
        if lane is not None:
            current = -1 if lane == skip else lane
        elif current >= 0 and result.supports(lanes[current], node):
            lane_of[node], causes[node] = current, cause


def _choose(nodes: Sequence[Tensor], result: Assignment) -> None:
    lanes, lane_of, causes = result.lanes, result.lane_of, result.causes
    first = lanes[0]
    alone = len(lanes) == 1
    device, special = first.device, result.special
    made: list[Tensor] = []  # values out of nothing can be made wherever they are wanted
    for node in nodes:
        if node in lane_of:
            continue
        if alone:
            # One device: the common case deserves the short way.
            signature = special.get(node, node.signature) if special else node.signature
            assert signature is not None
            verdict = signature.verdicts.get(device) or first.verdict(signature)
            if verdict.reason is not None:
                raise _refuse(node, result, f"no device runs {node.describe()}")
            lane_of[node] = 0
            causes[node] = "priority"
            continue
        if not node.srcs:
            made.append(node)
            continue
        best, best_score, cause = -1, -1, "priority"
        for lane in lanes:
            verdict = result.verdict(lane, node)
            if verdict.reason is not None:
                continue
            score = 0
            for source in node.srcs:
                score += _reached(lane, source.root, result)
            if score > best_score:
                best, best_score = lane.index, score
        if best < 0:
            raise _refuse(node, result, f"no device runs {node.describe()}")
        if best_score > 0:
            cause = "most-inputs"
        elif lanes[best].device.kind is Kind.HOST:
            cause = "host"
        lane_of[node], causes[node] = best, cause
    if made:
        _join_readers(made, nodes, result)


def _join_readers(made: Sequence[Tensor], nodes: Sequence[Tensor], result: Assignment) -> None:
    """Nodes without sources go where their first reader is if that supports them, else to the first that does."""
    lanes, lane_of = result.lanes, result.lane_of
    wanted = dict.fromkeys(made, -1)
    for node in nodes:
        for source in node.srcs:
            if wanted.get(source.root) == -1:
                wanted[source.root] = lane_of[node]
    for node, at in wanted.items():
        if at >= 0 and result.supports(lanes[at], node):
            lane_of[node], result.causes[node] = at, "reader"
            continue
        able = next((lane for lane in lanes if result.supports(lane, node)), None)
        if able is None:
            raise _refuse(node, result, f"no device runs {node.describe()}")
        lane_of[node] = able.index
        result.causes[node] = "host" if able.device.kind is Kind.HOST else "priority"


def _reached(lane: Lane, root: Tensor, result: Assignment) -> int:
    """1 if the lane's device already reaches the value. Inputs and unplaced leaves are wherever they are wanted."""
    home = result.lane_of.get(root) if root.state is None else None  # versions lie where their state lies
    if home is not None:
        return 1 if home == lane.index or lane.device.reaches(result.lanes[home].space) else 0
    placement = root.memory.leaf.placement if root.memory.leaf is not None else None
    return 1 if placement is not None and lane.device.reaches(placement.buffer.space) else 0


def _upgrade(nodes: Sequence[Tensor], result: Assignment, pins: Mapping[Tensor, int]) -> None:
    lanes, lane_of = result.lanes, result.lane_of
    for node in nodes:
        at = lane_of[node]
        if node in pins:
            continue
        for lane in lanes[:at]:
            shared = lane.space is lanes[at].space
            if shared and result.supports(lane, node) and lane.device.wants(result.step(lane, node)):
                lane_of[node], result.causes[node] = lane.index, "upgrade"
                break


def _place_leaves(graph: Graph, result: Assignment) -> None:
    """Inputs are fed where their readers are if they agree, else on the last device; other leaves join a reader."""
    lane_of, causes, last = result.lane_of, result.causes, len(result.lanes) - 1
    first: dict[Tensor, int] = {}
    shared: set[Tensor] = set()  # read on several lanes
    writers: dict[Tensor, int] = {}
    for node in graph.nodes:
        if node.base is not None:
            continue
        at = lane_of[node]
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
            lane_of[tensor] = last if tensor in shared else first.get(tensor, last)
            causes[tensor] = "input"
        elif leaf.placement is not None:
            home = lane_at(result.lanes, leaf.placement)
            if home is not None:
                lane_of[tensor] = home
            causes[tensor] = "storage"
        else:
            lane_of[tensor] = writers.get(tensor, first.get(tensor, last))
            causes[tensor] = "leaf"
