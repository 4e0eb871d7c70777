"""`Template`: what all graphs of one structure have in common, so that one of new sizes is planned in a fraction of the
time.

A decoder with a growing cache, or a server that runs one model on texts of many lengths, builds graphs of the same
operations over the same leaves again and again. Their order, devices, splits, groups and the lifetimes of their values
follow from the structure; only layouts, kernels, bytes and addresses follow from the sizes. A template keeps the former
and looks up the latter, once for each kind of step: 60 equal layers ask as often as one. It serves where the plan of
another size cannot differ in more than that, which is checked; everything else is planned from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.graph.graph import Graph, check_self_overlap, overlapping_leaves
from opweave.runtime.memory import BufferType
from opweave.scheduler.compile.operands import Operands, pick
from opweave.scheduler.place.assign import Assignment
from opweave.scheduler.place.capabilities import ask_repacked, whole_sources
from opweave.scheduler.place.source import Source
from opweave.scheduler.plan.allocate import Moments, moments_of
from opweave.scheduler.plan.fuse import Groups, fuse
from opweave.scheduler.plan.splits import Partition, Split, SplitStep, StorageView

if TYPE_CHECKING:
    from opweave.graph.tensor import Signature, Tensor
    from opweave.scheduler.place.target import Support

__all__ = ["Outline", "Template", "looks_alike"]

_OP: Final = attrgetter("op")
_SRCS: Final = attrgetter("srcs")
_BASE: Final = attrgetter("base")
_SIGNATURE: Final = attrgetter("signature")
_OFFSET: Final = attrgetter("offset")
_DTYPE: Final = attrgetter("dtype")
_SHAPE: Final = attrgetter("shape")
_STRIDES: Final = attrgetter("strides")


def looks_alike(known: Tensor, tensor: Tensor) -> bool:
    """Whether two outputs may have one structure, as far as the operations show on the way along first sources, and the
    leaves that these read beside them."""
    while known is not tensor:
        if known.op is not tensor.op or len(known.srcs) != len(tensor.srcs):
            return False
        if not known.srcs:
            return _is_replaced(known)
        for one, other in zip(known.srcs[1:], tensor.srcs[1:], strict=True):
            if one is not other and one.op is None and not _is_replaced(one):
                return False
        known, tensor = known.srcs[0], tensor.srcs[0]
    return True


class Outline(NamedTuple):
    """A graph that was planned by a template, up to its memory.

    Attributes:
        moments: when its values are in use; ``None`` if its groups differ from those of the template.
        operands: of its only split; ``None`` if they were not numbered.
    """

    partition: Partition
    groups: Groups
    moments: Moments | None = None
    operands: Operands | None = None


class _Kind(NamedTuple):
    """Steps of one signature.

    Attributes:
        signature: with the read-only sources that the device reads in special memory, if it does.
        whole: positions of the sources that it might read so.
    """

    signature: Signature
    whole: frozenset[int]


class _Structure:
    """The operations of a graph and what they read.

    Tensors are numbered: leaves, then nodes, in the order of the graph, and behind them ``None``, which stands for the
    base of what is no view.

    Attributes:
        first: the number of the first node.
        number: tensor -> its number.
        replaced: numbers of leaves that may be others in another graph: inputs, and constants that nobody placed.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.first: Final = len(graph.leaves)
        self._tensors: Final[list[Tensor]] = [*graph.leaves, *nodes]
        self.number: Final[dict[Tensor | None, int]] = {tensor: i for i, tensor in enumerate(self._tensors)}
        number = self.number
        number[None] = len(self._tensors)
        self.replaced: Final = [i for i, tensor in enumerate(graph.leaves) if _is_replaced(tensor)]
        self._ops: Final = [node.op for node in nodes]
        self._counts: Final = [len(node.srcs) for node in nodes]
        self._sources: Final = [number[source] for node in nodes for source in node.srcs]
        self._bases: Final = [number[node.base] for node in nodes]
        self._outputs: Final = [number[output] for output in graph.outputs]
        # Where each node and replaced leaf is found: its number, that of a node which reads it, and its place among the
        # sources of that. Readers have higher numbers.
        found: dict[int, tuple[int, int]] = {}
        for node in nodes:
            for place, source in enumerate(node.srcs):
                found[number[source]] = number[node], place
        wanted = {*range(self.first, len(self._tensors)), *self.replaced}.difference(self._outputs)
        self._found: Final = [(i, *found[i]) for i in sorted(wanted, reverse=True)]
        # Steps that read the version of a state which they overwrite: which bytes they read depends on sizes.
        self._overwriting: Final = [
            (number[node], place)
            for node in nodes if node.op is not None and node.op.writes
            for place, source in enumerate(node.srcs) if place and source.root is node.srcs[0].root
        ]  # fmt: skip

    def match(self, outputs: tuple[Tensor, ...]) -> list[Any] | None:
        """The tensors of the graph of ``outputs`` by number, ``None`` if it has another structure or no elements.

        Raises:
            HazardError: a node reads the bytes of a state that it overwrites.
        """
        known = self._tensors
        tensors: list[Any] = [*known, None]
        for i, output in zip(self._outputs, outputs, strict=True):
            if i < self.first and i not in self.replaced and output is not known[i]:
                return None
            tensors[i] = output
        try:
            for i, reader, place in self._found:
                tensors[i] = tensors[reader].srcs[place]
        except IndexError:
            return None
        nodes = tensors[self.first : -1]
        same = (
            all(map(is_, map(_OP, nodes), self._ops))
            and list(map(len, map(_SRCS, nodes))) == self._counts
            and all(map(is_, chain.from_iterable(map(_SRCS, nodes)), pick(tensors, self._sources)))
            and all(map(is_, map(_BASE, nodes), pick(tensors, self._bases)))
            and len(set(tensors)) == len(tensors)
            and all(_is_like(tensors[i], known[i]) for i in self.replaced)
            and not any(0 in output.shape for output in outputs)
        )
        if not same:
            return None
        for writer, place in self._overwriting:
            check_self_overlap(tensors[writer], tensors[writer].srcs[place])
        return tensors


class Template:
    """What another graph of the structure of a program is planned by, which runs on one device without copies.

    Made by `of`. Steps are numbered in the order in which they run.
    """

    @classmethod
    def of(cls, known: Partition, groups: Groups) -> Template | None:
        """The structure of a partition, ``None`` where other sizes may change more than layouts, kernels and bytes."""
        return cls(known, groups) if _is_uniform(known) else None

    def __init__(self, known: Partition, groups: Groups) -> None:
        self._known: Final = known
        self._moments: Final = moments_of(known, groups)
        self._groups: Final = groups.items(known.splits[0]), groups.internal
        self._structure: Final = _Structure(known.graph)
        items, number, assignment = known.splits[0].items, self._structure.number, known.assignment
        self._names: Final = [item.op for item in items]
        self._nodes: Final = [number[item.node] for item in items]
        self._made: Final = [-1 if item.out.storage in known.owners else item.out.storage for item in items]
        self._values: Final = [number[tensor] for tensor in known.names]
        self._assigned: Final = [number[tensor] for tensor in assignment.target_of]
        self._caused: Final = [number[tensor] for tensor in assignment.causes]
        self._kinds, self._kind_of = _kinds_of(known)
        self._operands: Final = Operands.of(items)
        views = chain([item.out for item in items], chain.from_iterable([item.srcs for item in items]))
        tensors = chain(map(_written, items), chain.from_iterable(map(_sources, items)))
        tensor_of = dict(zip(map(id, views), tensors, strict=True))
        self._shown: Final = [number[tensor_of[id(view)]] for view in self._operands.views]
        self._storages: Final = [view.storage for view in self._operands.views]
        self._results: Final = [shown.storage for shown in known.outputs if shown is not None]
        self._inputs: Final = [(number[tensor], storage) for tensor, storage in known.inputs.items()]
        owned = {tensor: storage for storage, (tensor, _) in known.owners.items()}
        replaced = [(i, known.graph.leaves[i]) for i in self._structure.replaced]
        self._constants: Final = [(i, owned[tensor]) for i, tensor in replaced if tensor in owned]

    def plan(self, outputs: tuple[Tensor, ...]) -> Outline | None:
        """The graph of ``outputs`` as it would be planned from the start, if it has this structure; else ``None``.

        Raises:
            HazardError: a node reads the bytes of a state that it overwrites.
        """
        own = self._known.splits[0].target
        if self._known.assignment.targets[own.index] is not own:
            return None  # the scheduler has opened another stream of the device since then
        tensors = self._structure.match(outputs)
        found = None if tensors is None else self._supports(pick(tensors, self._nodes))
        if tensors is None or found is None:
            return None
        supports, special = found
        known, first = self._known, self._structure.first
        graph = Graph.ordered(outputs, tuple(tensors[:first]), tuple(tensors[first:-1]))
        assignment = Assignment(
            known.assignment.capabilities.resized(special),
            dict(zip(pick(tensors, self._assigned), known.assignment.target_of.values(), strict=True)),
            dict(zip(pick(tensors, self._caused), known.assignment.causes.values(), strict=True)),
            known.assignment.fetched,
        )
        operands, steps = self._steps(tensors, supports)
        sizes, owners = list(known.sizes), known.owners
        for storage, support in zip(self._made, supports, strict=True):
            if storage >= 0:
                sizes[storage] = support.nbytes
        for i, storage in (*self._inputs, *self._constants):
            sizes[storage] = tensors[i].nbytes
        if any(owners[storage][0] is not tensors[i] for i, storage in self._constants):
            owners = {**owners, **{storage: (tensors[i], owners[storage][1]) for i, storage in self._constants}}
        split = known.splits[0]
        partition = Partition(
            Source(graph), assignment, [Split(split.index, split.target, [], steps, [], None)], sizes,
            known.arenas, pick(tensors, self._values), owners, known.unpacked, known.repacked,
            {tensors[i]: storage for i, storage in self._inputs},
            [StorageView.of(output, storage) for output, storage in zip(outputs, self._results, strict=True)],
        )  # fmt: skip
        groups = fuse(partition)
        same = (groups.items(partition.splits[0]), groups.internal) == self._groups
        return Outline(partition, groups, self._moments if same else None, operands)

    def _steps(self, tensors: Sequence[Any], supports: Sequence[Support]) -> tuple[Operands, list[SplitStep]]:
        """The steps and their operands. They are made by few calls, as they are most of what planning makes."""
        shown, new = pick(tensors, self._shown), tuple.__new__
        layouts = map(_OFFSET, shown), map(_DTYPE, shown), map(_SHAPE, shown), map(_STRIDES, shown)
        views: list[StorageView] = list(map(new, repeat(StorageView), zip(self._storages, *layouts, strict=True)))
        operands = self._operands._replace(views=views)
        outs, srcs = pick(views, operands.outs), operands.sources(views)
        fields = zip(self._names, pick(tensors, self._nodes), outs, srcs, supports, strict=True)
        return operands, list(map(new, repeat(SplitStep), fields))

    def _supports(self, nodes: Sequence[Tensor]) -> tuple[list[Support], dict[Tensor, Signature]] | None:
        """What the device says of each step, and the signatures of those that read copies in special memory."""
        pairs = list(zip(self._kind_of, map(_SIGNATURE, nodes), strict=True))
        answers: dict[tuple[int, Signature], tuple[Support, Signature]] = {}
        for (kind, signature), node in dict(zip(pairs, nodes, strict=True)).items():
            answer = self._answer(self._kinds[kind], signature, node)
            if answer is None:
                return None
            answers[kind, signature] = answer
        found = [answers[pair] for pair in pairs]
        special = {
            node: known for node, (_, known), (_, plain) in zip(nodes, found, pairs, strict=True) if known is not plain
        }
        return [support for support, _ in found], special

    def _answer(self, kind: _Kind, signature: Signature, node: Tensor) -> tuple[Support, Signature] | None:
        """What the device says of steps of a kind in another size, and their signature; ``None`` where a device says
        something else than before."""
        if any(0 in shape for _, shape, _ in (signature.out, *signature.srcs)):
            return None
        known = self._known
        targets, own = known.assignment.targets, known.splits[0].target
        found = ask_repacked(targets, node, signature, kind.whole) if kind.whole else signature
        for target in targets:
            before, now = target.support(kind.signature), target.support(found)
            if (before.reason is None) is not (now.reason is None):
                return None
        before, now = own.support(kind.signature), own.support(found)
        if now.packed or now.rounded or now.unpacked:
            return None
        return (now, found) if (now.repacked, now.inplace) == (before.repacked, before.inplace) else None


def _written(item: SplitStep) -> Tensor:
    """The tensor whose layout the result of a step has."""
    node = item.node
    assert node is not None
    assert node.op is not None
    return node.srcs[0] if node.op.writes else node


def _sources(item: SplitStep) -> tuple[Tensor, ...]:
    node = item.node
    assert node is not None
    assert node.op is not None
    return node.srcs[1:] if node.op.writes else node.srcs


def _is_replaced(tensor: Tensor) -> bool:
    """Whether another graph may have another leaf in place of this one."""
    leaf = tensor.leaf
    return leaf is not None and (leaf.kind == "input" or (leaf.kind == "constant" and leaf.placement is None))


def _is_like(tensor: Tensor, known: Tensor) -> bool:
    """Whether a leaf may take the place of one that is replaced."""
    leaf, other = tensor.leaf, known.leaf
    if tensor is known:
        return True
    if leaf is None or other is None or leaf.kind != other.kind or 0 in tensor.shape or not _is_replaced(tensor):
        return False
    return leaf.kind != "input" or leaf.name == other.name


def _is_uniform(partition: Partition) -> bool:
    """Whether a graph runs on one device, which holds all its memory, without copies, and exactly."""
    graph, assignment, splits = partition.graph, partition.assignment, partition.splits
    able, items = assignment.capabilities, splits[0].items if splits else ()
    if len(splits) != 1 or not items or partition.copies or splits[0].observed is not None:
        return False
    special = (
        partition.source.sharded,
        partition.placed,
        partition.unpacked,
        assignment.fetched,
        able.precisions,
        able.prepared,
    )
    if any(special) or "pinned" in assignment.causes.values():
        return False
    if any(signature.memories or signature.precision != "exact" for signature in able.special.values()):
        return False
    repacked = [partition.owners[storage][0].leaf for storage in partition.repacked]
    if any(leaf is not None and leaf.kind == "constant" for leaf in repacked):
        return False  # another constant would have to be repacked first
    own = splits[0].target
    if set(assignment.target_of.values()) != {own.index} or any(target.device.answers_many for target in able.targets):
        return False
    if type(own.buffer_type).alloc_size is not BufferType.alloc_size:
        return False
    if [item.node for item in items] != [node for node in graph.nodes if node.base is None]:
        return False  # some steps pack operands, or some nodes have no elements
    if any(node.op is not None and node.op.writes for node in graph.nodes) and overlapping_leaves(graph.leaves):
        return False
    # Operands are then the layouts of tensors.
    return None not in partition.outputs and not any(s.packed or s.rounded for s in {item.support for item in items})


def _kinds_of(partition: Partition) -> tuple[list[_Kind], list[int]]:
    """The kinds of the steps of a partition, and the number of the kind of each step."""
    able = partition.assignment.capabilities
    numbers: dict[_Kind, int] = {}
    of_steps = []
    for item in partition.splits[0].items:
        node = item.node
        assert node is not None
        kind = _Kind(able.signature(node), whole_sources(node, ()))
        of_steps.append(numbers.setdefault(kind, len(numbers)))
    return list(numbers), of_steps
