"""`Capabilities`: what devices say of the nodes of a graph, given the memory that its leaves lie in."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.device import Kind
from opweave.contract.memory import Usage
from opweave.errors import UnsupportedOpError
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Signature
from opweave.runtime.memory import BufferType
from opweave.scheduler.place.support import Support, unbound_step

if TYPE_CHECKING:
    from opweave.contract.step import Step
    from opweave.graph.leaf import Leaf
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.target import Target

__all__ = ["Capabilities", "at_precision"]


class Capabilities:
    """What the devices of a scheduler say of the nodes of a graph.

    Args:
        targets: the targets by index, in order of priority.
        leaves, nodes: of the graph, views left out.
        precisions: nodes that may be computed less than exactly -> how roughly.

    Attributes:
        targets: as given.
        special: signatures of nodes that read leaves in special memory (pinned, split, repacked) or copies of weights
            there, or that may be computed less than exactly.
        precisions: as given.
        prepared: leaves in memory that keeps whole tensors in a form of its own -> that kind.
        repacked: bytes that copies of weights in special memory take, as far as they are not there yet, by device name.
        computing: the targets that compute, in order: all but those that only run the references, if there are others.
        references: the others.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        leaves: Sequence[Tensor],
        nodes: Sequence[Tensor],
        precisions: Mapping[Tensor, Precision] = MappingProxyType({}),
    ) -> None:
        memories = {t: kind for t in leaves if (kind := _special_memory(t.leaf)) is not None}
        self.targets: Final = targets
        self.precisions: Final = precisions
        self.special: Final[dict[Tensor, Signature]] = (
            _special_signatures(nodes, memories, precisions) if memories or precisions else {}
        )
        self.prepared: Final = {t: kind for t, kind in memories.items() if not kind.is_raw}
        self.repacked: Final = _mark_whole(targets, nodes, memories, self.special)
        computing = [target for target in targets if target.device.kind is not Kind.HOST]
        self.computing: Final = computing or list(targets)
        self.references: Final = [target for target in targets if target not in self.computing]
        for target in self.computing:
            if target.device.answers_many:
                target.ask_ahead(self.signature(node) for node in nodes)

    def signature(self, node: Tensor) -> Signature:
        """What devices are asked about ``node``."""
        found = self.special.get(node, node.signature) if self.special else node.signature
        assert found is not None
        return found

    def support(self, target: Target, node: Tensor) -> Support:
        """What a device says of ``node``."""
        signature = self.special.get(node, node.signature) if self.special else node.signature
        assert signature is not None
        known: Support | None = signature.support.get(target.device)
        return target.support(signature) if known is None else known

    def supports(self, target: Target, node: Tensor) -> bool:
        """Whether a device runs ``node``."""
        # As `support` finds it, without a second call: growing asks this of most nodes, in every sweep.
        signature = self.special.get(node, node.signature) if self.special else node.signature
        assert signature is not None
        known: Support | None = signature.support.get(target.device)
        return (target.support(signature) if known is None else known).reason is None

    def step(self, target: Target, node: Tensor) -> Step:
        """``node`` as a step, as the target's device would get it."""
        return unbound_step(self.signature(node), target.device, self.support(target, node))

    def unpacks(self, source: Tensor, support: Support) -> bool:
        """Whether a source that the device reaches has to be copied to plain memory for a node all the same: kernels
        are given whole tensors in the form in which they were prepared, where they accept it, and no parts of them."""
        kind = self.prepared.get(source.memory)
        return kind is not None and (source.base is not None or kind in support.unpacked)

    def is_constant(self, source: Tensor) -> bool:
        """Whether a copy of a placed source is made once with the program, as it is read-only; if not, it is made in
        each run."""
        leaf = source.memory.leaf
        if leaf is None or leaf.kind == "state" or leaf.placement is None:
            return False
        return leaf.placement.buffer.usage is Usage.WEIGHTS

    def runners(self, node: Tensor) -> Iterator[Target]:
        """The targets that may run ``node``, in order of priority: those with references only where no other can."""
        found = False
        for target in self.computing:
            if self.supports(target, node):
                found = True
                yield target
        if not found:
            yield from [target for target in self.references if self.supports(target, node)]

    def refusal(self, node: Tensor, message: str = "") -> UnsupportedOpError:
        """The error that says why no device runs ``node``, or what ``message`` says."""
        reasons = {target.name: self.support(target, node).reason or "supported" for target in self.targets}
        return UnsupportedOpError(message or f"no device runs {node.describe()}", reasons)


def _special_memory(leaf: Leaf | None) -> BufferType | None:
    """The buffer type of a leaf that does not lie in its device's ordinary memory."""
    if leaf is None or leaf.placement is None:
        return None
    kind = leaf.placement.buffer.type
    return None if kind is kind.device.default_buffer_type else kind


def _special_signatures(
    nodes: Sequence[Tensor], memories: Mapping[Tensor, BufferType], precisions: Mapping[Tensor, Precision]
) -> dict[Tensor, Signature]:
    """For every node that reads special memory, or may be computed less than exactly, its signature with that in it;
    equal ones are one object."""
    made: dict[Any, Signature] = {}
    result = {}
    for node in nodes:
        kinds = tuple([_kind_of(source, memories) for source in node.srcs])
        found = node.signature
        if found is not None and any(kind is not None for kind in kinds):
            found = made.setdefault((found, kinds), Signature(found.op, found.attrs, found.out, found.srcs, kinds))
        if found is not None and node in precisions:
            found = at_precision(node, found, precisions[node], memories)
        if found is not None and found is not node.signature:
            result[node] = found
    return result


def _mark_whole(
    targets: Sequence[Target], nodes: Sequence[Tensor], special: Container[Tensor], signatures: dict[Tensor, Signature]
) -> dict[str, int]:
    """Enter for products the signatures that name their read-only sources, where a device would rather read those in
    special memory and has room for the copies. Returns the bytes of copies that have to be made, by device. Weights
    that were placed are copied on their device, where their products stay; of others the copies of all devices that
    want them count."""
    repacking = [target for target in targets if target.repack and target.device.has_repacked]
    spent = {target.name: 0 for target in repacking}
    room: dict[str, float] = {}
    seen: set[tuple[Tensor, BufferType]] = set()
    asked: dict[Any, tuple[Signature, list[tuple[Target, int, BufferType]]]] = {}
    for node in [node for node in nodes if node.op is not None and node.op.product] if repacking else ():
        whole = frozenset([i for i, source in enumerate(node.srcs) if _is_whole(source, special)])
        if not whole or node.signature is None:
            continue
        known = signatures.get(node, node.signature)
        homes = frozenset(
            [leaf.placement.buffer.device for i in whole if (leaf := node.srcs[i].leaf) and leaf.placement]
        )
        answer = asked.get((known, whole, homes))
        if answer is None:
            near = [target for target in targets if target.device in homes and target.support(known).reason is None]
            able = [target for target in repacking if target in near] if near else repacking
            answer = asked[known, whole, homes] = _ask_repacked(targets, able, known, node, whole)
        found, positions = answer
        if not positions:
            continue
        wanted = [(target, node.srcs[i], kind) for target, i, kind in positions]
        new = [(t, w, kind) for t, w, kind in wanted if (w, kind) not in seen and w.leaf and kind not in w.leaf.copies]
        sizes = [(target, kind.alloc_size(weight)) for target, weight, kind in new]
        for target, _ in sizes:
            if target.name not in room:
                made = sum(kind.alloc_size(w) for w, kind in _copies(nodes) if kind.device is target.device)
                room[target.name] = min(target.repack - made, target.device.mem_info()[0] // 2)
        if any(spent[target.name] + size > room[target.name] for target, size in sizes):
            continue
        for target, size in sizes:
            spent[target.name] += size
        seen.update((weight, kind) for _, weight, kind in new)
        signatures[node] = found
    return spent


def _ask_repacked(
    targets: Sequence[Target], repacking: Sequence[Target], known: Signature, node: Tensor, whole: frozenset[int]
) -> tuple[Signature, list[tuple[Target, int, BufferType]]]:
    """A signature with its read-only sources named, and which of these devices would rather read in special memory.
    Devices whose special memory keeps no such tensors are not asked, as long as these are not rounded first."""
    if known.precision == "exact" or not known.constant:
        weights = [node.srcs[i] for i in whole]
        repacking = [target for target in repacking if target.device.keeps_repacked(weights)]
    alone = {t.device: known.at(known.precision, known.constant, whole, frozenset([t.device])) for t in repacking}
    wanted = [(t, i, kind) for t in repacking for i, kind in t.support_whole(alone[t.device], known).repacked.items()]
    copying = frozenset(target.device for target, _, _ in wanted)
    if not copying:
        return known, []
    found = known.at(known.precision, known.constant, whole, copying)
    for target in targets:
        # To each device it is the same step, whichever others copy: what was measured of it holds here too.
        found.support[target.device] = target.support(alone[target.device] if target.device in copying else known)
    return found, wanted


def _is_whole(source: Tensor, special: Container[Tensor]) -> bool:
    """Whether a source is a read-only matrix, no part of one, that lies in ordinary memory or nowhere yet."""
    leaf = source.leaf
    if leaf is None or leaf.kind not in ("weight", "constant") or len(source.shape) < 2 or source in special:
        return False
    return leaf.placement is None or leaf.placement.buffer.usage is Usage.WEIGHTS


def _copies(nodes: Sequence[Tensor]) -> set[tuple[Tensor, BufferType]]:
    """The copies in special memory that read-only sources have already, from other programs."""
    leaves = {source for node in nodes for source in node.srcs if source.leaf is not None}
    return {(w, kind) for w in leaves if w.leaf for kind in w.leaf.copies if isinstance(kind, BufferType)}


def at_precision(
    node: Tensor, signature: Signature, precision: Precision, special: Container[Tensor] = ()
) -> Signature:
    """The signature of a node that may be computed in ``precision``. Of its sources in f32 those are constant that show
    a read-only leaf which is not in ``special`` memory."""
    leaves = [(i, s.memory.leaf) for i, s in enumerate(node.srcs) if s.dtype is f32 and s.memory not in special]
    constant = [i for i, leaf in leaves if leaf is not None and leaf.kind in ("weight", "constant")]
    return signature.at(precision, frozenset(constant))


def _kind_of(source: Tensor, memories: Mapping[Tensor, BufferType]) -> BufferType | None:
    """The special memory that a kernel would be given a source in. Parts of tensors in a form of its own come as copies
    in ordinary memory."""
    kind = memories.get(source.memory)
    return None if kind is not None and source.base is not None and not kind.is_raw else kind
