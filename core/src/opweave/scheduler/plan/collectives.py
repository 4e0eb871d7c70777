"""How several devices exchange values: by the `Collectives` of their backend, by sums over memory that the host
addresses, or by the copies and additions of the graph itself.

`links_of` tells `opweave.sharding` what is possible, before a graph has nodes for parts; `plan_exchanges` decides for
the nodes that `opweave.sharding` has made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.contract.collectives import Collectives, CollectiveSupport
from opweave.errors import raise_backend_failure
from opweave.graph.layout import is_dense
from opweave.scheduler.place.precision import allowed_for
from opweave.sharding.values import Collective, Links

if TYPE_CHECKING:
    from opweave.contract.collectives import CollectiveKind
    from opweave.graph.dtypes import DType
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.annotated_graph import AnnotatedGraph
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.precision import Allowed
    from opweave.scheduler.place.target import Target

__all__ = ["Exchange", "backend_collectives", "links_of", "plan_exchanges"]

MOST_DEVICES: Final = 3
"""At most this many devices add whole partial sums in each other's memory. Each of them reads as many values as there
are devices; with more devices each reads less if it adds a range of the sum and the ranges are gathered."""


class Exchange(NamedTuple):
    """How a node is computed by an exchange between devices, in place of a kernel.

    Attributes:
        what: the collective.
        provider: the procedure of a backend that does it; ``None``: the host adds.
        together: where the exchange is one action for all devices, the node that each of them gets, ``None`` where
            nobody reads it there; empty where each device does its share by itself.
        targets: the targets of such an action, in the order of the parts.
    """

    what: Collective
    provider: Collectives | None
    together: tuple[Tensor | None, ...] = ()
    targets: tuple[Target, ...] = ()


def links_of(targets: Sequence[Target], allowed: Allowed) -> Links:
    """How the targets of a scheduler are linked, for a program that allows these precisions."""
    by_name = {target.name: target for target in targets}

    def members(devices: tuple[str, ...]) -> list[Target]:
        found = [by_name[name] for name in devices if name in by_name]
        return found if len(found) == len(devices) else []

    def support(
        devices: tuple[str, ...], tensor: Tensor, parts: tuple[Tensor, ...]
    ) -> tuple[Collectives, CollectiveSupport] | None:
        products = [part.root for part in parts]
        rough = all(allowed_for(product, allowed) != "exact" for product in products)
        return backend_collectives("all_reduce", members(devices), parts[0].dtype, tensor.size, rough)

    def together(devices: tuple[str, ...], tensor: Tensor, parts: tuple[Tensor, ...]) -> bool:
        found = support(devices, tensor, parts)
        return found is not None and found[1].together

    def adds_whole(devices: tuple[str, ...], tensor: Tensor, parts: tuple[Tensor, ...]) -> bool:
        found, known = support(devices, tensor, parts), members(devices)
        shared = found is not None or (bool(known) and all(target.buffer_type.is_host for target in known))
        return (found is not None and found[1].together) or (shared and len(devices) <= MOST_DEVICES)

    def runs(device: str, tensor: Tensor) -> bool:
        target, signature = by_name.get(device), tensor.signature
        return target is None or signature is None or target.support(signature).reason is None

    return Links(adds_whole, together, runs)


def backend_collectives(
    kind: CollectiveKind, targets: Sequence[Target], dtype: DType, size: int, rough: bool
) -> tuple[Collectives, CollectiveSupport] | None:
    """The `Collectives` of the targets' backend and how it does this one; ``None`` if not, or in no usable order.

    Args:
        size: elements of each part.
        rough: whether the program may compute the products that are added less than exactly.
    """
    devices = [target.device for target in targets]
    if len(devices) < 2 or len(set(devices)) < len(devices) or any(d.simulated for d in devices):
        return None
    backend: Any = devices[0].backend
    if backend is None or any(device.backend is not backend for device in devices):
        return None
    found: Collectives | None = backend.extension(Collectives)
    if found is None or not all(target.buffer_type.is_raw for target in targets):
        return None
    try:
        support = found.collective_support(kind, devices, dtype, size)
    except Exception as error:
        raise_backend_failure(error, devices[0].name, "planning a collective", f"{kind} of {dtype}")
    if support is None:
        return None
    same = kind == "all_gather" or not dtype.is_float or (len(devices) == 2 and dtype.itemsize >= 4)
    return (found, support) if support.order == "shards" or same or rough else None


def plan_exchanges(
    annotated: AnnotatedGraph, assignment: Assignment, observed: Collection[Tensor]
) -> tuple[Mapping[Tensor, Exchange], Collection[Tensor]]:
    """The nodes of a graph with weights in shards that an exchange computes, and those that are not computed by
    themselves, because an exchange includes them. Observed ones, and those whose memory the caller decided, stay."""
    known, fixed = annotated.collectives, {*annotated.placed, *observed}
    by_name = {target.name: target for target in assignment.targets}
    ends: dict[Tensor, Exchange] = {}
    groups: dict[tuple[str, Tensor, tuple[Tensor, ...]], dict[str, Tensor]] = {}
    for end, what in known.items():
        if any(node in fixed for node in (*what.inner, *[part.root for part in what.parts])):
            continue
        members = [by_name[name] for name in what.devices if name in by_name]
        if [_home(part.root, assignment) for part in what.parts] != members:
            continue
        target = assignment.targets[assignment.target_of[end]]
        rough = all(part.root in assignment.capabilities.precisions for part in what.parts)
        size = max(part.size for part in what.parts)
        found = backend_collectives(what.kind, members, end.dtype, size, rough)
        if found is not None and found[1].together:
            if what.bias is None and target in members and all(part.root.leaf is None for part in what.parts):
                ends[end] = Exchange(what, found[0], (), tuple(members))
                groups.setdefault((what.kind, what.of, what.parts), {})[target.name] = end
        elif _is_readable(what.bias, target, assignment):
            exchange = _by_itself(what, target, members, found)
            if exchange is not None:
                ends[end] = exchange
    for group in groups.values():
        _join(group, ends, known)
    return ends, _absorbed(annotated.graph, {end: known[end] for end in ends})


def _home(root: Tensor, assignment: Assignment) -> Target | None:
    """The target in whose plain memory a value is computed or, if it is a weight, lies; ``None``: there is none."""
    targets, target_of = assignment.targets, assignment.target_of
    if root.memory in assignment.capabilities.prepared:
        return None
    if root.leaf is None:
        return targets[target_of[root]] if root in target_of else None
    placement = root.leaf.placement
    if root.leaf.kind != "weight" or placement is None or not placement.buffer.type.is_raw:
        return None
    return next((target for target in targets if target.device is placement.buffer.device), None)


def _by_itself(
    what: Collective, target: Target, members: list[Target], found: tuple[Collectives, CollectiveSupport] | None
) -> Exchange | None:
    """How a target does its share of a collective by itself: by the procedure that was found, or as sums over memory
    that the host addresses. ``None``: in neither way."""
    if found is not None:
        return Exchange(what, found[0]) if target in members else None
    shared = target.buffer_type.is_host and all(member.buffer_type.is_host for member in members)
    return Exchange(what, None) if shared and what.kind != "all_gather" else None


def _join(group: Mapping[str, Tensor], ends: dict[Tensor, Exchange], known: Mapping[Tensor, Collective]) -> None:
    """Let one call compute the ends of a group, device -> end, if they fit together; else none of them is exchanged."""
    first = ends[next(iter(group.values()))]
    together = tuple([group.get(name) for name in first.what.devices])
    for end in group.values():
        if _fits(known, together):
            ends[end] = ends[end]._replace(together=together)
        else:
            del ends[end]


def _absorbed(graph: Graph, replaced: Mapping[Tensor, Collective]) -> set[Tensor]:
    """The nodes that nobody reads any more once the collectives in ``replaced`` compute their readers."""
    inner = {node for what in replaced.values() for node in what.inner}
    needed = {*graph.outputs}
    for node in reversed(graph.nodes):
        what = replaced.get(node)
        if what is not None:
            needed.update(what.terms if what.bias is None else (*what.terms, what.bias))
        elif node not in inner or node in needed:
            needed.update(node.srcs)
    return {node for node in inner if node not in needed and node not in replaced}


def _is_readable(bias: Tensor | None, target: Target, assignment: Assignment) -> bool:
    """Whether a target reads a bias in plain memory."""
    if bias is None:
        return True
    root = bias.root
    if root.memory in assignment.capabilities.prepared:
        return False
    leaf = root.leaf
    if leaf is not None and leaf.placement is not None:
        return target.device.reaches(leaf.placement.buffer.space)
    if leaf is not None and leaf.kind not in ("input", "state"):
        return True  # it is brought to memory of the target when the program is made
    return assignment.targets[assignment.target_of[root]] is target


def _fits(known: Mapping[Tensor, Collective], ends: Sequence[Tensor | None]) -> bool:
    """Whether the operands of a collective that is done together are dense, and lie one after the other in a result."""
    end = next(end for end in ends if end is not None)
    what = known[end]
    if not all(is_dense(part.shape, part.strides, part.dtype) for part in what.parts):
        return False
    if what.kind == "all_reduce":
        return True
    if None in ends or len({part.shape for part in what.parts}) > 1:
        return False
    if what.kind == "all_gather":
        return all(n == 1 for n in end.shape[: end.attrs["axis"]])
    cuts = [known[other].cut for other in ends if other is not None]
    axis = cuts[0][0] if cuts[0] is not None else 0
    n, count = what.of.shape[axis], len(cuts)
    even = n % count == 0 and cuts == [(axis, n // count * i, n // count * (i + 1)) for i in range(count)]
    return even and all(m == 1 for m in what.of.shape[:axis])
