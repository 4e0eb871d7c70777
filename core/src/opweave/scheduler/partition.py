"""Cutting an assigned graph into splits: steps of one device in a row, and the copies that each split needs before it.

A split ends where the device changes, after an observed node, and before a node whose weights are fetched from host
memory, so that the memory of one weight can serve the next. What a device does not reach is copied: once for each
version, range of bytes and target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from opweave.contract.memory import BufferType
from opweave.contract.space import HOST_SPACE, MemorySpace
from opweave.graph.layout import Shape, Strides, dense_strides, is_dense, nbytes
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import new_leaf
from opweave.scheduler.precision import rounded_sources
from opweave.scheduler.splits import Copy, Partition, PlannedStep, Split, StorageView
from opweave.scheduler.target import Support, packing_support

if TYPE_CHECKING:
    from opweave.contract.buffer import Buffer
    from opweave.graph.dtypes import DType
    from opweave.graph.graph import Graph
    from opweave.graph.leaf import Placement
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.assign import Assignment
    from opweave.scheduler.collectives import Exchange
    from opweave.scheduler.target import Target

__all__ = ["partition"]

NO_EXCHANGES: Final[tuple[Mapping[Tensor, Exchange], Collection[Tensor]]] = ({}, ())
"""Of graphs that read no weights in shards."""


def partition(
    graph: Graph,
    assignment: Assignment,
    placed: Mapping[Tensor, Placement] = MappingProxyType({}),
    observed: Collection[Tensor] = (),
) -> Partition:
    """Cut ``graph`` at every change of device and after every observed node, and find what must be copied where.

    Args:
        placed: computed tensors whose memory the caller decided.
        observed: nodes whose values an observer gets in each run.
    """
    return _Partitioner(graph, assignment, placed, observed).run()


class _OpenSplit:
    """A split that is being filled."""

    __slots__ = ("copies", "index", "items", "observed", "target", "write_backs")

    def __init__(self, index: int, target: Target) -> None:
        self.index: Final = index
        self.target: Final = target
        self.copies: list[Copy] = []
        self.items: list[PlannedStep] = []
        self.write_backs: list[Copy] = []
        self.observed: tuple[Tensor, StorageView] | None = None

    def closed(self) -> Split:
        return Split(self.index, self.target, self.copies, self.items, self.write_backs, self.observed)


class _Partitioner:
    def __init__(
        self, graph: Graph, assignment: Assignment, placed: Mapping[Tensor, Placement], observed: Collection[Tensor]
    ) -> None:
        self.graph: Final = graph
        self.assignment: Final = assignment
        self.placed: Final = placed
        self.observed: Final = observed
        self.targets: Final = assignment.targets
        self.target_of: Final = assignment.target_of
        self.fetched: Final = assignment.fetched
        self.prepared: Final = assignment.capabilities.prepared
        # The space in which a target reads read-only leaves that were not placed.
        self.spaces: Final = [
            HOST_SPACE if target.device.reaches(HOST_SPACE) else target.device.default_buffer_type.space
            for target in self.targets
        ]
        # What becomes the partition.
        self.splits: list[_OpenSplit] = []
        self.sizes: list[int] = []
        self.arenas: list[int] = []
        self.names: list[Tensor] = []
        self.owners: dict[int, tuple[Tensor, MemorySpace]] = {}
        self.unpacked: set[int] = set()
        self.repacked: dict[int, BufferType] = {}
        self.inputs: dict[Tensor, int] = {}
        # What is needed while it is made.
        self.home: dict[Tensor, StorageView] = {}  # where values were computed, where inputs and states lie
        self.seen: list[dict[Tensor, StorageView]] = [{} for _ in self.targets]  # values as a target has read them
        self.uploaded: dict[MemorySpace, dict[Tensor, int]] = {s: {} for s in (HOST_SPACE, *self.spaces)}
        self.copied: dict[object, StorageView] = {}
        self.fetched_here: list[object] = []  # keys in `copied` that end with the current split
        self.opened = 0  # the first storage that the current split may have made
        self.made_in: dict[int, int] = {}  # other storages -> index of the split that wrote them last, -1: none
        self.copies_in: dict[tuple[Tensor, BufferType], int] = {}  # storages of repacked leaves
        self.packers: dict[object, Support | None] = {}
        self.exchanges: tuple[Mapping[Tensor, Exchange], Collection[Tensor]] = NO_EXCHANGES
        if getattr(graph, "collectives", None):
            from opweave.scheduler.collectives import plan_exchanges  # most graphs read no weights in shards

            self.exchanges = plan_exchanges(graph, assignment, {*placed, *observed})
        self.originals: dict[Tensor, Tensor] = {}  # rounded sources -> what they were rounded from

    def run(self) -> Partition:
        target_of, targets, home = self.target_of, self.targets, self.home
        sizes, arenas, names = self.sizes, self.arenas, self.names
        current = -1
        split: _OpenSplit | None = None
        items: list[PlannedStep] = []
        new, special, observed = tuple.__new__, self.assignment.capabilities.special, self.observed
        prepared = self.prepared
        exchanged, absorbed = self.exchanges
        for node in self.graph.nodes:
            if node.base is not None or 0 in node.shape:
                continue
            exchange = None
            if exchanged:
                if node in absorbed:
                    continue
                exchange = exchanged.get(node)
                if exchange is not None and exchange.together:
                    if node not in home:
                        self._exchange(exchange)
                        current = -1
                    continue
            at = target_of[node]
            target, seen = targets[at], self.seen[at]
            if observed and split is not None and self._observe(split):
                current = -1
            if at != current or split is None or (items and node in self.fetched):
                split = self._open(target)
                items = split.items
                current = at
            signature, op = node.signature, node.op
            assert signature is not None
            assert op is not None
            if special:
                signature = special.get(node, signature)
            support = signature.support.get(target.device) or target.support(signature)
            writes, packed = op.writes, support.packed
            if exchange is not None:
                split = self._share(node, exchange, target, split)
                items = split.items
                continue
            if op.name == "concat" and len(targets) > 1 and self._gathers(node, target):
                split = self._gather(node, target, split)
                items = split.items
                continue
            operands: list[StorageView] = []
            sources = node.srcs[1:] if writes else node.srcs
            if support.rounded:
                sources = rounded_sources(node, support.rounded)
                self.originals.update(zip(sources, node.srcs, strict=True))
            repacked = support.repacked
            for source in sources:
                if repacked and len(operands) in repacked:
                    operands.append(self._repacked(source, repacked[len(operands)]))
                    continue
                operand = home.get(source)
                if operand is None or arenas[operand[0]] != at or packed:
                    # Other than in the common case of a value that was computed on this target.
                    operand = None if packed else seen.get(source)
                    if operand is None and source.base is not None and not packed:
                        whole = home.get(source.base)
                        if whole is not None and arenas[whole[0]] == at:
                            window = (whole[0], source.offset, source.dtype, source.shape, source.strides)
                            operand = new(StorageView, window)
                if operand is None:
                    operand, split = self._operand(source, target, split, node, support)
                    items = split.items
                    if not packed and not self.fetched_here and source.memory not in prepared:
                        seen[source] = operand
                operands.append(operand)
            if writes:
                split = self._write(node, target, split, support, tuple(operands))
                items = split.items
                if split.write_backs:
                    current = -1
                continue
            if self.placed and node in self.placed:
                self._place(node, target, split, support, tuple(operands), self.placed[node].buffer)
                continue
            index = len(sizes)
            sizes.append(support.nbytes)
            arenas.append(at)
            names.append(node)
            out = home[node] = new(StorageView, (index, 0, node.dtype, node.shape, node.strides))
            items.append(new(PlannedStep, (op.name, node, out, tuple(operands), support)))
        if observed and split is not None:
            self._observe(split)
        outputs = [self._output(output) for output in self.graph.outputs]
        for leaf_tensor in self.graph.leaves:
            leaf = leaf_tensor.leaf
            assert leaf is not None
            if leaf.kind == "input" and leaf_tensor not in self.inputs and 0 not in leaf_tensor.shape:
                self._leaf(leaf_tensor, leaf, targets[target_of[leaf_tensor]])
        self._pad()
        return Partition(
            self.graph, self.assignment, self.placed, [split.closed() for split in self.splits], sizes, arenas, names,
            self.owners, self.unpacked, self.repacked, self.inputs, outputs,
        )  # fmt: skip

    def _pad(self) -> None:
        """Set the sizes of temporaries to those that the kinds of memory in which they lie ask for."""
        kinds = {
            target.index: target.buffer_type
            for target in self.targets
            if type(target.buffer_type).alloc_size is not BufferType.alloc_size
        }
        if not kinds:
            return
        views = [v for split in self.splits for copy in (*split.copies, *split.write_backs) for v in copy.writes]
        views += [item.out for split in self.splits for item in split.items]
        shapes = {storage: (t.shape, t.dtype) for t, storage in self.inputs.items()}
        shapes |= {view.storage: (view.shape, view.dtype) for view in views}
        for storage, (shape, dtype) in shapes.items():
            kind = kinds.get(self.arenas[storage])
            if kind is not None:
                value = new_leaf(Leaf("input", self.names[storage].name), shape, dtype)
                self.sizes[storage] = max(self.sizes[storage], kind.alloc_size(value))

    def _observe(self, split: _OpenSplit) -> bool:
        """Note the observed node that ``split`` ends with, if it does."""
        node = split.items[-1].node if split.items else None
        if split.observed is None and node is not None and node in self.observed:
            split.observed = (node, self.home[node])
        return split.observed is not None

    def _open(self, target: Target) -> _OpenSplit:
        for key in self.fetched_here:
            self.copied.pop(key, None)
        self.fetched_here.clear()
        self.opened = len(self.sizes)
        split = _OpenSplit(len(self.splits), target)
        self.splits.append(split)
        return split

    # --- storages ---------------------------------------------------------------------------------------------------

    def _temporary(self, tensor: Tensor, size: int, arena: int) -> int:
        """A new storage among the temporaries of a target."""
        self.sizes.append(size)
        self.arenas.append(arena)
        self.names.append(tensor)
        return len(self.sizes) - 1

    def _own(self, tensor: Tensor, space: MemorySpace) -> int:
        """A new storage with memory of its own in ``space``."""
        index = self._temporary(tensor, tensor.nbytes, -1)
        self.owners[index] = (tensor, space)
        return index

    def _home(self, root: Tensor, target: Target) -> int:
        """The storage in which a value lies, for a reader on ``target``."""
        found = self.home.get(root)
        if found is not None:
            return found.storage
        if root.leaf is not None:
            return self._leaf(root, root.leaf, target)
        # A version of a state whose writer has no elements: the bytes are those of the state.
        return self._settle(root, self._home(root.memory, target))

    def _seen(self, tensor: Tensor, target: Target) -> StorageView:
        """What a tensor shows where its root lies, for a reader on ``target``."""
        return StorageView.of(tensor, self._home(tensor.root, target))

    def _settle(self, root: Tensor, storage: int) -> int:
        self.home[root] = StorageView.of(root, storage)
        return storage

    def _leaf(self, root: Tensor, leaf: Leaf, target: Target) -> int:
        """The storage of a leaf. Read-only unplaced leaves have one in every space in which they are read."""
        if leaf.kind == "input":
            storage = self._temporary(root, root.nbytes, self.target_of[root])
            self.inputs[root] = storage
            self.made_in[storage] = -1
        elif leaf.placement is not None:
            storage = self._own(root, leaf.placement.buffer.space)
        elif leaf.kind == "state":
            storage = self._own(root, self.targets[self.target_of[root]].device.default_buffer_type.space)
        else:
            return self._uploaded(root, target)
        return self._settle(root, storage)

    def _uploaded(self, root: Tensor, target: Target) -> int:
        """The storage of a read-only leaf in plain memory that a target reaches."""
        space = self.spaces[target.index]
        known = self.uploaded[space].get(root)
        if known is None:
            known = self.uploaded[space][root] = self._own(root, space)
        return known

    def _repacked(self, source: Tensor, kind: BufferType) -> StorageView:
        """The copy of a read-only leaf in special memory."""
        storage = self.copies_in.get((source, kind))
        if storage is None:
            storage = self.copies_in[source, kind] = self._own(source, kind.space)
            self.sizes[storage] = kind.alloc_size(source)
            self.repacked[storage] = kind
        return StorageView(storage, 0, source.dtype, source.shape, source.strides)

    def _space(self, storage: int) -> MemorySpace:
        arena = self.arenas[storage]
        return self.targets[arena].space if arena >= 0 else self.owners[storage][1]

    def _reaches(self, target: Target, storage: int) -> bool:
        return self.arenas[storage] == target.index or target.device.reaches(self._space(storage))

    # --- sources ----------------------------------------------------------------------------------------------------

    def _operand(
        self, source: Tensor, target: Target, split: _OpenSplit, node: Tensor, support: Support
    ) -> tuple[StorageView, _OpenSplit]:
        """``source`` as the target can read it, copied or packed where it must be; perhaps in a new split."""
        root = source.root
        if 0 in source.shape:
            return self._empty(source), split
        found = self._home(root, target)
        operand = StorageView.of(source, found)
        able = self.assignment.capabilities
        if not self._reaches(target, found):
            # What lies where no device of this scheduler reaches it stays with the program.
            if root not in self.target_of and able.is_constant(source):
                operand = self._copy_once(root, operand, target)
            else:
                operand = self._copy(source, operand, target, split, node)
        elif self.prepared and able.unpacks(source, support):
            if able.is_constant(source):
                operand = self._copy_once(root, operand, target)
            else:
                operand = self._copy(source, operand, target, split, node, "unpack")
        if support.packed and not is_dense(operand.shape, operand.strides, operand.dtype):
            return self._pack(source, operand, target, split)
        return operand, split

    def _copy_once(self, root: Tensor, operand: StorageView, target: Target) -> StorageView:
        """The operand in a copy of a placed leaf, which is made with the program."""
        storage = self._uploaded(root, target)
        self.unpacked.add(storage)
        return operand._replace(storage=storage)

    def _empty(self, source: Tensor) -> StorageView:
        storage = self.uploaded[HOST_SPACE].get(source)
        if storage is None:
            storage = self.uploaded[HOST_SPACE][source] = self._own(source, HOST_SPACE)
        return StorageView.dense(storage, source.dtype, source.shape)

    def _copy(
        self,
        source: Tensor,
        operand: StorageView,
        target: Target,
        split: _OpenSplit,
        node: Tensor,
        cause: str = "transfer",
    ) -> StorageView:
        """A packed copy of a window in the target's memory, made before the split; one for each version and range."""
        _, offset, dtype, shape, strides = operand
        once, packed, dense = shape, strides, True
        if source.base is not None:
            # Repeated axes are copied once and repeated again in the copy.
            once = tuple([1 if s == 0 else n for n, s in zip(shape, strides, strict=True)])
            dense = is_dense(once, strides, dtype)
            packed = dense_strides(once, dtype)
        range_key = nbytes(once, dtype) if dense else (once, strides)
        leaf = source.root.leaf
        placement = leaf.placement if leaf is not None and leaf.kind == "weight" else None
        brought = cause == "transfer" and placement is not None and placement.buffer.is_host
        fetched = brought and node in self.fetched
        ids = self._selected(source, node, target) if fetched and dense else None
        key = (source.root, offset, range_key, target.index, ids)
        copied = self.copied.get(key)
        if copied is None:
            storage = self._temporary(source.root, nbytes(once, dtype), target.index)
            copied = StorageView(storage, 0, dtype, once, packed)
            whole = StorageView(operand.storage, offset, dtype, once, strides)
            split.copies.append(Copy(source, whole, copied, "weight-fetch" if brought else cause, ids))
            self.copied[key] = copied
            self.made_in[storage] = -1
            if fetched:
                self.fetched_here.append(key)
        if source.base is not None:
            packed = tuple([0 if s == 0 else p for p, s in zip(packed, strides, strict=True)])
        return StorageView(copied.storage, 0, dtype, shape, packed)

    def _gathers(self, node: Tensor, target: Target) -> bool:
        """Whether the pieces of a ``concat`` are copied straight to their places in it: some of them are brought from
        other memory, none twice, and the places are dense or written by the host; an observer is shown steps."""
        dense = all(n == 1 for n in node.shape[: node.attrs["axis"]])
        once = len({*node.srcs}) == len(node.srcs)
        if node in self.placed or node in self.observed or not once or not (dense or target.buffer_type.is_host):
            return False
        roots = [source.root for source in node.srcs]
        return all(root.memory not in self.prepared for root in roots) and not all(
            self._reaches(target, self._home(root, target)) for root in roots
        )

    def _gather(self, node: Tensor, target: Target, split: _OpenSplit) -> _OpenSplit:
        """A ``concat`` as copies of its pieces, each to its place."""
        if split.items:
            split = self._open(target)
        storage, offset, axis = self._temporary(node, node.nbytes, target.index), 0, node.attrs["axis"]
        for source in node.srcs:
            window = StorageView(storage, offset, node.dtype, source.shape, node.strides)
            split.copies.append(Copy(source, self._seen(source, target), window, "gather"))
            block = node.dtype.block if axis == node.ndim - 1 else 1
            offset += source.shape[axis] // block * node.strides[axis]
        self.made_in[self._settle(node, storage)] = -1
        return split

    def _share(self, node: Tensor, exchange: Exchange, target: Target, split: _OpenSplit) -> _OpenSplit:
        """What one device does of a collective, of parts that it reads where they lie."""
        what, provider = exchange.what, exchange.provider
        if split.items:
            split = self._open(target)
        out = StorageView.dense(self._temporary(node, node.nbytes, target.index), node.dtype, node.shape)
        first, *terms = [self._seen(term, target) for term in what.terms]
        bias = None if what.bias is None else self._seen(what.bias, target)
        cause = what.kind.replace("_", "-") if provider is None else "collective"
        split.copies.append(
            Copy(what.of, first, out, cause, None, tuple(terms), bias=bias, kind=what.kind, provider=provider)
        )
        self.made_in[self._settle(node, out.storage)] = -1
        return split

    def _exchange(self, exchange: Exchange) -> None:
        """A collective that a backend does for all devices at once, on the first of them."""
        what, ends, targets = exchange.what, exchange.together, exchange.targets
        split = self._open(targets[0])
        first, *terms = [self._seen(part, target) for part, target in zip(what.parts, targets, strict=True)]
        shown = next(end for end in ends if end is not None)
        outs = []
        for end, target in zip(ends, targets, strict=True):
            storage = self._temporary(shown if end is None else end, shown.nbytes, target.index)
            self.made_in[storage] = -1
            if end is not None:
                self._settle(end, storage)
            outs.append(StorageView.dense(storage, shown.dtype, shown.shape))
        dst, *others = outs
        split.copies.append(
            Copy(
                what.of, first, dst, "collective", None, tuple(terms), None, what.kind, exchange.provider, tuple(others)
            )
        )

    def _selected(self, source: Tensor, node: Tensor, target: Target) -> StorageView | None:
        """The ids that name the only rows of ``source`` that ``node`` reads, wherever they lie."""
        selects = node.op.selects if node.op is not None else None
        source = self.originals.get(source, source)
        if selects is None or node.srcs[selects[0]] is not source or node.srcs.count(source) > 1:
            return None
        return self._seen(node.srcs[selects[1]], target)

    def _pack(
        self, source: Tensor, operand: StorageView, target: Target, split: _OpenSplit
    ) -> tuple[StorageView, _OpenSplit]:
        """A dense copy of a window on the target itself: by its own kernel if it has one, else through the host."""
        key = (source.root, operand, target.index, "pack")
        known = self.copied.get(key)
        if known is not None:
            return known, split
        _, _, dtype, shape, strides = operand
        storage = self._temporary(source, nbytes(shape, dtype), target.index)
        packed = StorageView.dense(storage, dtype, shape)
        support = self._packer(target, dtype, shape, strides)
        if support is not None:
            split.items.append(PlannedStep("contiguous", None, packed, (operand,), support))
        else:
            here = self.made_in.get(operand.storage)
            if here == split.index or (here is None and operand.storage >= self.opened and split.items):
                split = self._open(target)
            split.copies.append(Copy(source, operand, packed, "pack"))
        self.made_in[storage] = split.index
        self.copied[key] = packed
        return packed, split

    def _packer(self, target: Target, dtype: DType, shape: Shape, strides: Strides) -> Support | None:
        key = (target.index, dtype, shape, strides)
        if key not in self.packers:
            self.packers[key] = packing_support(target.device, dtype, shape, strides)
        return self.packers[key]

    # --- results ----------------------------------------------------------------------------------------------------

    def _write(
        self, node: Tensor, target: Target, split: _OpenSplit, support: Support, operands: tuple[StorageView, ...]
    ) -> _OpenSplit:
        """A node that writes a state: in place where the target reaches it and its bytes are plain, else on a copy that
        is written back."""
        written, op = node.srcs[0], node.op
        assert op is not None
        storage = self._home(written.root, target)
        self._settle(node, storage)
        region = StorageView.of(written, storage)
        if 0 in written.shape:
            return split
        if self._reaches(target, storage) and written.memory not in self.prepared:
            split.items.append(PlannedStep(op.name, node, region, operands, support))
            self.made_in[storage] = split.index
            return split
        if split.items:
            split = self._open(target)
        copy = self._temporary(written, nbytes(written.shape, written.dtype), target.index)
        window = StorageView.dense(copy, written.dtype, written.shape)
        split.copies.append(Copy(written, region, window, "region"))
        split.items.append(PlannedStep(op.name, node, window, operands, support))
        split.write_backs.append(Copy(node, window, region, "write-back"))
        self.made_in[storage] = split.index
        return split

    def _place(
        self,
        node: Tensor,
        target: Target,
        split: _OpenSplit,
        support: Support,
        operands: tuple[StorageView, ...],
        buffer: Buffer,
    ) -> None:
        """A node whose memory the caller decided: computed there, or elsewhere and written back."""
        op = node.op
        assert op is not None
        storage = self._own(node, buffer.space)
        out = final = StorageView.of(node, storage)
        if not (self._reaches(target, storage) and buffer.type.is_raw):
            out = StorageView.of(node, self._temporary(node, node.nbytes, target.index))
            split.write_backs.append(Copy(node, out, final, "write-back"))
        split.items.append(PlannedStep(op.name, node, out, operands, support))
        self._settle(node, out.storage)
        self.made_in[out.storage] = split.index

    def _output(self, output: Tensor) -> StorageView | None:
        if 0 in output.shape:
            return None
        root = output.root
        target = self.targets[self.target_of.get(root, len(self.targets) - 1)]
        return self._seen(output, target)
