"""Plan updates: what was planned for a graph serves an equal one of other sizes. `Partition` to `Partition`.

The nodes of both graphs are matched (`Graph.matched`). Devices are asked about every node whose sizes are new, and the
kernels are those of their answers. Splits, copies and storage ids stay, and operands get their new shapes, where
dividing the new graph would give the same. Where it might not, there is no update, and the graph is divided as any
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import TYPE_CHECKING, Final

from opweave.contract.memory import BufferType
from opweave.graph.layout import dense_strides, is_dense, nbytes
from opweave.scheduler.partition import copied_window, in_copy, packer_of
from opweave.scheduler.splits import Copy, Partition, PlannedStep, Split, StorageView

if TYPE_CHECKING:
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.assign import Assignment
    from opweave.scheduler.target import Support, Target

__all__ = ["updated"]


class _OtherwiseDivided(Exception):
    """The new graph might be divided in another way than the known one."""


def updated(known: Partition, graph: Graph, pairs: Mapping[Tensor, Tensor], assignment: Assignment) -> Partition | None:
    """The partition of ``graph``, made of that of a graph which matches it; ``None`` where `partition` might divide it
    in another way.

    Args:
        pairs: tensor of the known graph -> the one of ``graph`` in its place.
        assignment: of ``graph``.
    """
    try:
        return _Update(known, graph, pairs, assignment).run()
    except _OtherwiseDivided:
        return None


class _Update:
    def __init__(self, known: Partition, graph: Graph, pairs: Mapping[Tensor, Tensor], assignment: Assignment) -> None:
        self.known: Final = known
        self.graph: Final = graph
        self.pairs: Final = pairs
        self.assignment: Final = assignment
        self.sizes: Final = list(known.sizes)
        self.copied: Final[dict[int, tuple[Tensor, int, object, int]]] = {}  # storage -> what is copied there
        self.regions: Final[dict[int, StorageView]] = {}  # storage -> the copy of a part of a state, to be written back
        self.packs: Final[dict[int, tuple[StorageView, StorageView]]] = {}  # storage -> what is packed there, and how
        self.packers: Final[dict[object, Support | None]] = {}

    def run(self) -> Partition:
        known, pairs, assignment = self.known, self.pairs, self.assignment
        self._check()
        owners = {storage: (pairs.get(t, t), space) for storage, (t, space) in known.owners.items()}
        inputs = {pairs[t]: storage for t, storage in known.inputs.items()}
        for tensor, storage in (*inputs.items(), *[(t, s) for s, (t, _) in owners.items() if t is not known.names[s]]):
            if 0 in tensor.shape or storage in known.repacked or storage in known.unpacked:
                raise _OtherwiseDivided
            self.sizes[storage] = tensor.nbytes
        splits = [self._split(split) for split in known.splits]
        outputs = [
            _window(view.storage, pairs[output])
            for output, view in zip(known.graph.outputs, known.outputs, strict=True)
            if view is not None
        ]
        names = [pairs.get(t, t) for t in known.names]
        return Partition(
            self.graph, assignment, known.placed, splits, self.sizes, known.arenas, names, owners, known.unpacked,
            known.repacked, inputs, outputs,
        )  # fmt: skip

    def _check(self) -> None:
        """Compare what divides graphs and has nothing to do with sizes."""
        known, pairs, assignment = self.known, self.pairs, self.assignment
        before, target_of = known.assignment, assignment.target_of
        same = (
            [target_of.get(pairs[t]) for t in before.target_of] == list(before.target_of.values())
            and not known.placed
            and not before.fetched
            and not assignment.fetched
            and before.capabilities.prepared == assignment.capabilities.prepared
            and all(type(t.buffer_type).alloc_size is BufferType.alloc_size for t in assignment.targets)
            and None not in known.outputs
            and not any(0 in node.shape for node in known.graph.nodes)
        )
        for storage, (tensor, space) in known.owners.items():
            placement = tensor.leaf.placement if tensor.leaf is not None else None
            plain = storage not in known.unpacked and storage not in known.repacked
            same = same and 0 not in tensor.shape and not (plain and placement and placement.buffer.space is not space)
        if not same:
            raise _OtherwiseDivided

    # --- splits -----------------------------------------------------------------------------------------------------

    def _split(self, split: Split) -> Split:
        if split.observed is not None:
            raise _OtherwiseDivided
        copies = [self._copy(copy, split.target) for copy in split.copies]
        target, device, pairs = split.target, split.target.device, self.pairs
        special, operand = self.assignment.capabilities.special, self._operand
        items: list[PlannedStep] = []
        new = tuple.__new__
        for item in split.items:
            op, node, out, srcs, support = item
            if node is None:
                items.append(self._pack(item, target))
                continue
            other = pairs[node]
            signature = special.get(other, other.signature) if special else other.signature
            assert signature is not None
            asked = signature.support.get(device) or target.support(signature)
            if asked is not support:
                _check_alike(support, asked)
            old, read = node.srcs, other.srcs
            if node.state is not None:
                made = self.regions.get(out[0]) or operand(old[0], out, read[0])
                old, read = old[1:], read[1:]
            else:
                made = out if out[3] == other.shape else _window(out[0], other)
                self.sizes[out[0]] = asked.nbytes
            views = tuple(map(operand, old, srcs, read))
            if asked.packed and not all(is_dense(shape, strides, dtype) for _, _, dtype, shape, strides in views):
                raise _OtherwiseDivided  # what was dense would have to be packed now
            if all(map(is_, views, srcs)):
                views = srcs  # the very same, by which `lower` finds that nothing has changed
            items.append(new(PlannedStep, (op, other, made, views, asked)))
        back = [
            Copy(pairs[c.tensor], self.regions[c.src.storage], self._region(c.tensor, c.dst), c.cause)
            for c in split.write_backs
        ]
        return Split(split.index, target, copies, items, back, None)

    def _copy(self, copy: Copy, target: Target) -> Copy:
        tensor, src, dst, cause, ids = copy
        other = self.pairs.get(tensor)
        if ids is not None or other is None:
            raise _OtherwiseDivided
        if cause == "pack":
            view = self._to_pack(tensor, src, other)
            if view is not src and self._packer(target, view) is not None:
                raise _OtherwiseDivided
            return Copy(other, view, self._packed(dst, view), cause)
        if cause == "region":
            view = self._operand(tensor, src, other)
            self.regions[dst.storage] = self._dense(dst, view)
            return Copy(other, view, self.regions[dst.storage], cause)
        operand = _window(src.storage, other)
        once, packed, key = copied_window(other, operand)
        whole = other.root, operand.offset, key, target.index
        if whole in self.copied.values():
            raise _OtherwiseDivided
        self.copied[dst.storage] = whole
        self.sizes[dst.storage] = nbytes(once, operand.dtype)
        copied = StorageView(dst.storage, 0, operand.dtype, once, packed)
        return Copy(other, operand._replace(shape=once), copied, cause)

    def _region(self, node: Tensor, view: StorageView) -> StorageView:
        """The part of a state that a node writes."""
        return self._operand(node.srcs[0], view, self.pairs[node].srcs[0])

    # --- packing ----------------------------------------------------------------------------------------------------

    def _pack(self, item: PlannedStep, target: Target) -> PlannedStep:
        """A dense copy of a window, made by the device."""
        op, _, out, (src,), support = item
        source = self.known.names[out.storage]
        other = self.pairs.get(source)
        if other is None:
            raise _OtherwiseDivided
        view = self._to_pack(source, src, other)
        asked = support if view is src else self._packer(target, view)
        if asked is None:
            raise _OtherwiseDivided
        return PlannedStep(op, None, self._packed(out, view), (view,), asked)

    def _to_pack(self, tensor: Tensor, view: StorageView, other: Tensor) -> StorageView:
        """A window that is packed, and was not packed before."""
        made = self._operand(tensor, view, other)
        if is_dense(made.shape, made.strides, made.dtype) or any(made == known for known, _ in self.packs.values()):
            raise _OtherwiseDivided
        return made

    def _packed(self, dense: StorageView, view: StorageView) -> StorageView:
        made = self._dense(dense, view)
        self.packs[dense.storage] = view, made
        return made

    def _dense(self, known: StorageView, view: StorageView) -> StorageView:
        """The dense copy of a window; ``known`` if the shape is the same."""
        storage, dtype, shape = known.storage, view.dtype, view.shape
        self.sizes[storage] = nbytes(shape, dtype)
        return known if known.shape == shape else StorageView(storage, 0, dtype, shape, dense_strides(shape, dtype))

    def _packer(self, target: Target, view: StorageView) -> Support | None:
        key = target.index, *view[2:]
        if key not in self.packers:
            self.packers[key] = packer_of(target, *view[2:])
        return self.packers[key]

    # --- operands ---------------------------------------------------------------------------------------------------

    def _operand(self, tensor: Tensor, view: StorageView, other: Tensor) -> StorageView:
        """``other`` where ``tensor`` was read as ``view``."""
        storage, offset, dtype, shape, strides = view
        if storage in self.packs:
            source, dense = self.packs[storage]
            if self._found(source.storage, other) != source:
                raise _OtherwiseDivided
            return dense
        if storage in self.copied:
            made = self._found(storage, other)
            return view if made == view else made
        if other is tensor:
            return view
        if tensor.shape != shape or tensor.strides != strides or tensor.offset != offset or tensor.dtype is not dtype:
            raise _OtherwiseDivided
        if other.shape == shape and other.strides == strides and other.offset == offset:
            return view
        return _window(storage, other)

    def _found(self, storage: int, tensor: Tensor) -> StorageView:
        """A tensor where it lies, or in the copy of it that was made in ``storage``."""
        copied = self.copied.get(storage)
        if copied is None:
            return _window(storage, tensor)
        operand = _window(storage, tensor)
        _, packed, key = copied_window(tensor, operand)
        if copied != (tensor.root, operand.offset, key, copied[-1]):
            raise _OtherwiseDivided
        return in_copy(storage, tensor, operand, packed)


def _window(storage: int, tensor: Tensor) -> StorageView:
    if 0 in tensor.shape:
        raise _OtherwiseDivided
    window = (storage, tensor.offset, tensor.dtype, tensor.shape, tensor.strides)
    return tuple.__new__(StorageView, window)


def _check_alike(before: Support, now: Support) -> None:
    """What devices say decides in which form a kernel's operands come."""
    if (
        now.reason is not None
        or now.packed != before.packed
        or now.unpacked != before.unpacked
        or now.rounded != before.rounded
        or now.repacked != before.repacked
    ):
        raise _OtherwiseDivided
