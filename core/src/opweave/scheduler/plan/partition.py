"""Cutting an assigned graph into splits: steps of one device in a row, and the copies that each split needs before it.

A split ends where the device changes, after an observed node, and before a node whose weights are fetched from host
memory, so that the memory of one weight can serve the next. What a device does not reach is copied: once for each
version, range of bytes and target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from opweave.graph.layout import dense_strides, is_dense, nbytes
from opweave.scheduler.place.precision import rounded_sources
from opweave.scheduler.place.support import Support, packing_support
from opweave.scheduler.plan.splits import Copy, Partition, Split, SplitStep, StorageView
from opweave.scheduler.plan.storages import Storages

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.annotated_graph import AnnotatedGraph
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.collectives import Exchange

__all__ = ["partition"]


def partition(annotated: AnnotatedGraph, assignment: Assignment, observed: Collection[Tensor] = ()) -> Partition:
    """Cut the graph at every change of device and after every observed node, and find what must be copied where.

    Args:
        observed: nodes whose values an observer gets in each run.
    """
    return _Partitioner(annotated, assignment, observed).run()


def _last(split: Split) -> Tensor | None:
    """The node of a split's last step, if it has one."""
    return split.steps[-1].node if split.steps else None


class _Partitioner:
    def __init__(self, annotated: AnnotatedGraph, assignment: Assignment, observed: Collection[Tensor]) -> None:
        self.annotated: Final = annotated
        self.graph: Final = annotated.graph
        self.assignment: Final = assignment
        self.placed: Final = annotated.placed
        self.observed: Final = observed
        self.targets: Final = assignment.targets
        self.target_of: Final = assignment.target_of
        self.fetched: Final = assignment.fetched
        self.prepared: Final = assignment.capabilities.prepared
        self.splits: list[Split] = []
        self.split: Split | None = None  # which steps are added to, `None`: the next step begins one
        self.storages: Final = Storages(self.targets, self.target_of)
        self.seen: list[dict[Tensor, StorageView]] = [{} for _ in self.targets]  # values as a target has read them
        self.copied: dict[object, StorageView] = {}
        self.fetched_here: list[object] = []  # keys in `copied` that end with the current split
        self.opened = 0  # the first storage that the current split may have made
        self.packers: dict[object, Support | None] = {}
        self.exchanges: Mapping[Tensor, Exchange] = {}
        self.absorbed: Collection[Tensor] = ()
        if annotated.collectives:
            from opweave.scheduler.plan.collectives import plan_exchanges  # most graphs read no weights in shards

            self.exchanges, self.absorbed = plan_exchanges(annotated, assignment, observed)
        self.originals: dict[Tensor, Tensor] = {}  # rounded sources -> what they were rounded from

    def run(self) -> Partition:
        storages = self.storages
        views, sizes, arena_of, tensors = storages.views, storages.sizes, storages.arena_of, storages.tensors
        new, special, observed = tuple.__new__, self.assignment.capabilities.special, self.observed
        targets, placed, fetched, exchanged = self.targets, self.placed, self.fetched, self.exchanges
        for node in self.graph.nodes:
            if node.base is not None or 0 in node.shape:
                continue
            if observed and self.split is not None and _last(self.split) in observed:
                self.split = None
            if exchanged and self._is_exchanged(node):
                continue
            at = self.target_of[node]
            target, split = targets[at], self.split
            if split is None or split.target is not target or (fetched and split.steps and node in fetched):
                self._open(target)
            signature, op = node.signature, node.op
            assert signature is not None
            assert op is not None
            signature = special.get(node, signature) if special else signature
            support = signature.support.get(target.device) or target.support(signature)
            if op.name == "concat" and len(targets) > 1 and self._gathers(node, target):
                self._gather(node, target)
                continue
            sources = node.srcs[1:] if op.writes else node.srcs
            if support.rounded:
                sources = self._rounded(node, support.rounded)
            special_form = support.packed or support.repacked  # of some operand
            operands: list[StorageView] = []
            for source in sources:
                operand = views.get(source)
                if operand is None or special_form or arena_of[operand.storage] != at:
                    operand = self._operand(source, target, node, support, len(operands))
                operands.append(operand)
            split = self.split  # an operand may have begun another one
            assert split is not None
            if op.writes:
                self._write(node, split, support, tuple(operands))
            elif placed and node in placed:
                self._place(node, split, support, tuple(operands))
            else:
                index = len(sizes)
                sizes.append(support.nbytes)
                arena_of.append(at)
                tensors.append(node)
                out = views[node] = new(StorageView, (index, 0, node.dtype, node.shape, node.strides))
                split.steps.append(new(SplitStep, (op.name, node, out, tuple(operands), support)))
        return self._partition()

    def _partition(self) -> Partition:
        """What was found, with storages for outputs and for inputs that nobody reads."""
        storages = self.storages
        outputs = [self._output(output) for output in self.graph.outputs]
        for leaf_tensor in self.graph.leaves:
            leaf = leaf_tensor.leaf
            assert leaf is not None
            if leaf.kind == "input" and leaf_tensor not in storages.inputs and 0 not in leaf_tensor.shape:
                storages.leaf(leaf_tensor, leaf, self.targets[self.target_of[leaf_tensor]])
        splits = self.splits
        for k, split in enumerate(splits):
            last = _last(split)
            if last in self.observed:
                assert last is not None
                splits[k] = replace(split, observed=(last, storages.views[last]))
        storages.pad(splits)
        return Partition(
            self.annotated, self.assignment, splits, storages.sizes, storages.arena_of, storages.tensors,
            storages.owners, storages.unpacked, storages.repacked, storages.inputs, outputs,
        )  # fmt: skip

    def _before_steps(self, target: Target) -> Split:
        """The current split if it is one of a target without steps so far, else a new one: copies come before steps."""
        split = self.split
        return self._open(target) if split is None or split.target is not target or split.steps else split

    def _open(self, target: Target) -> Split:
        """A new split, to which the next steps are added."""
        for key in self.fetched_here:
            self.copied.pop(key, None)
        self.fetched_here.clear()
        self.opened = len(self.storages.sizes)
        self.split = split = Split(len(self.splits), target, [], [], [], None)
        self.splits.append(split)
        return split

    # --- sources ----------------------------------------------------------------------------------------------------

    def _rounded(self, node: Tensor, rounded: Collection[int]) -> tuple[Tensor, ...]:
        """The sources of a node, in other dtypes where its kernel reads them rounded."""
        sources = rounded_sources(node, rounded)
        self.originals.update(zip(sources, node.srcs, strict=True))
        return sources

    def _operand(self, source: Tensor, target: Target, node: Tensor, support: Support, number: int) -> StorageView:
        """Source ``number`` of a node where that is not a value that was computed on its target."""
        if support.repacked and number in support.repacked:
            return self.storages.repacked_leaf(source, support.repacked[number])
        if support.packed:
            return self._readable(source, target, node, support)
        seen = self.seen[target.index]
        operand = seen.get(source)
        if operand is None and source.base is not None:
            whole = self.storages.views.get(source.base)
            if whole is not None and self.storages.arena_of[whole.storage] == target.index:
                return StorageView.of(source, whole.storage)
        if operand is None:
            operand = self._readable(source, target, node, support)
            if not (self.fetched_here or (self.prepared and source.memory in self.prepared)):
                seen[source] = operand
        return operand

    def _readable(self, source: Tensor, target: Target, node: Tensor, support: Support) -> StorageView:
        """``source`` as the target can read it, copied or packed where it must be; perhaps in a new split."""
        if 0 in source.shape:
            return self.storages.empty(source)
        leaf = source.leaf
        if leaf is not None and leaf.placement is None and leaf.kind in ("weight", "constant"):
            return StorageView.of(source, self.storages.uploaded_leaf(source, target))
        root = source.root
        operand = self.storages.shown(source, target)
        capabilities = self.assignment.capabilities
        if not self.storages.reaches(target, operand.storage):
            # A copy of memory that no device of this scheduler reaches stays with the program.
            if root not in self.target_of and capabilities.is_constant(source):
                operand = self._copy_once(root, operand, target)
            else:
                operand = self._copy(source, operand, target, node)
        elif self.prepared and capabilities.unpacks(source, support):
            if capabilities.is_constant(source):
                operand = self._copy_once(root, operand, target)
            else:
                operand = self._copy(source, operand, target, node, "unpack")
        if support.packed and not is_dense(operand.shape, operand.strides, operand.dtype):
            return self._pack(source, operand, target)
        return operand

    def _copy_once(self, root: Tensor, operand: StorageView, target: Target) -> StorageView:
        """The operand in a copy of a placed leaf, which is made with the program."""
        storage = self.storages.uploaded_leaf(root, target)
        self.storages.unpacked.add(storage)
        return operand._replace(storage=storage)

    def _copy(
        self, source: Tensor, operand: StorageView, target: Target, node: Tensor, cause: str = "transfer"
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
            assert self.split is not None
            storage = self.storages.temporary(source.root, nbytes(once, dtype), target.index)
            copied = StorageView(storage, 0, dtype, once, packed)
            whole = operand if once is shape else StorageView(operand.storage, offset, dtype, once, strides)
            self.split.copies.append(Copy(source, whole, copied, "weight-fetch" if brought else cause, ids))
            self.copied[key] = copied
            self.storages.made_in[storage] = -1
            if fetched:
                self.fetched_here.append(key)
        if source.base is not None:
            packed = tuple([0 if s == 0 else p for p, s in zip(packed, strides, strict=True)])
        return StorageView(copied.storage, 0, dtype, shape, packed)

    def _gathers(self, node: Tensor, target: Target) -> bool:
        """Whether the pieces of a ``concat`` are copied straight to their places in it: some of them are brought from
        other memory, none twice, all are of its type, the places are dense or written by the host, and nobody places or
        observes it."""
        if not target.buffer_type.is_host and prod(node.shape[: node.attrs["axis"]]) > 1:
            return False  # the places have gaps
        if node in self.placed or node in self.observed or len({*node.srcs}) < len(node.srcs):
            return False
        if any(source.dtype is not node.dtype for source in node.srcs):
            return False  # a copy converts nothing
        roots = [source.root for source in node.srcs]
        return all(root.memory not in self.prepared for root in roots) and not all(
            self.storages.reaches(target, self.storages.storage_of(root, target)) for root in roots
        )

    def _gather(self, node: Tensor, target: Target) -> None:
        """A ``concat`` as copies of its pieces, each to its place."""
        split = self._before_steps(target)
        storage, offset, axis = self.storages.temporary(node, node.nbytes, target.index), 0, node.attrs["axis"]
        for source in node.srcs:
            window = StorageView(storage, offset, node.dtype, source.shape, node.strides)
            split.copies.append(Copy(source, self.storages.shown(source, target), window, "gather"))
            block = node.dtype.block if axis == node.ndim - 1 else 1
            offset += source.shape[axis] // block * node.strides[axis]
        self.storages.made_in[self.storages.enter(node, storage)] = -1

    def _is_exchanged(self, node: Tensor) -> bool:
        """Whether an exchange between devices computes a node or includes it; the copies of the former are added."""
        exchange = self.exchanges.get(node)
        if exchange is None or node in self.absorbed:
            return node in self.absorbed
        if not exchange.together:
            self._share(node, exchange, self.targets[self.target_of[node]])
        elif node not in self.storages.views:
            self._exchange(exchange)
        return True

    def _share(self, node: Tensor, exchange: Exchange, target: Target) -> None:
        """The share of one device in a collective: it reads the parts where they lie."""
        what, provider = exchange.what, exchange.provider
        split = self._before_steps(target)
        out = StorageView.dense(self.storages.temporary(node, node.nbytes, target.index), node.dtype, node.shape)
        first, *terms = [self.storages.shown(term, target) for term in what.terms]
        bias = None if what.bias is None else self.storages.shown(what.bias, target)
        cause = what.kind.replace("_", "-") if provider is None else "collective"
        split.copies.append(
            Copy(what.of, first, out, cause, terms=tuple(terms), bias=bias, kind=what.kind, provider=provider)
        )
        self.storages.made_in[self.storages.enter(node, out.storage)] = -1

    def _exchange(self, exchange: Exchange) -> None:
        """A collective that a backend does for all devices at once, on the first of them."""
        what, ends, targets = exchange.what, exchange.together, exchange.targets
        split = self._open(targets[0])
        first, *terms = [self.storages.shown(part, target) for part, target in zip(what.parts, targets, strict=True)]
        shown = next(end for end in ends if end is not None)
        outs = []
        for end, target in zip(ends, targets, strict=True):
            storage = self.storages.temporary(shown if end is None else end, shown.nbytes, target.index)
            self.storages.made_in[storage] = -1
            if end is not None:
                self.storages.enter(end, storage)
            outs.append(StorageView.dense(storage, shown.dtype, shown.shape))
        split.copies.append(
            Copy(
                what.of, first, outs[0], "collective", terms=tuple(terms), kind=what.kind, provider=exchange.provider,
                outs=tuple(outs[1:]),
            )
        )  # fmt: skip
        self.split = None

    def _selected(self, source: Tensor, node: Tensor, target: Target) -> StorageView | None:
        """The ids of the rows of ``source`` that ``node`` reads; ``None`` if it reads all or ``source`` twice."""
        selects = node.op.selects if node.op is not None else None
        source = self.originals.get(source, source)
        if selects is None or node.srcs[selects[0]] is not source or node.srcs.count(source) > 1:
            return None
        return self.storages.shown(node.srcs[selects[1]], target)

    def _pack(self, source: Tensor, operand: StorageView, target: Target) -> StorageView:
        """A dense copy of a window on the target itself: by its own kernel if it has one, else through the host."""
        key = (source.root, operand, target.index, "pack")
        known = self.copied.get(key)
        if known is not None:
            return known
        split = self.split
        assert split is not None
        _, _, dtype, shape, strides = operand
        storage = self.storages.temporary(source, nbytes(shape, dtype), target.index)
        packed = StorageView.dense(storage, dtype, shape)
        form = (target.index, dtype, shape, strides)
        if form not in self.packers:
            self.packers[form] = packing_support(target.device, dtype, shape, strides)
        support = self.packers[form]
        if support is not None:
            split.steps.append(SplitStep("contiguous", None, packed, (operand,), support))
        else:
            here = self.storages.made_in.get(operand.storage)
            if here == split.index or (here is None and operand.storage >= self.opened and split.steps):
                split = self._open(target)
            split.copies.append(Copy(source, operand, packed, "pack"))
        self.storages.made_in[storage] = split.index
        self.copied[key] = packed
        return packed

    # --- results ----------------------------------------------------------------------------------------------------

    def _write(self, node: Tensor, split: Split, support: Support, operands: tuple[StorageView, ...]) -> None:
        """A node that writes a state: in place where the target reaches it and its bytes are plain, else on a copy that
        is written back."""
        written, op, target = node.srcs[0], node.op, split.target
        assert op is not None
        storage = self.storages.storage_of(written.root, target)
        self.storages.enter(node, storage)
        region = StorageView.of(written, storage)
        if 0 in written.shape:
            return
        if self.storages.reaches(target, storage) and written.memory not in self.prepared:
            split.steps.append(SplitStep(op.name, node, region, operands, support))
            self.storages.made_in[storage] = split.index
            return
        split = self._before_steps(target)
        copy = self.storages.temporary(written, nbytes(written.shape, written.dtype), target.index)
        window = StorageView.dense(copy, written.dtype, written.shape)
        split.copies.append(Copy(written, region, window, "region"))
        split.steps.append(SplitStep(op.name, node, window, operands, support))
        split.write_backs.append(Copy(node, window, region, "write-back"))
        self.storages.made_in[storage] = split.index
        self.split = None

    def _place(self, node: Tensor, split: Split, support: Support, operands: tuple[StorageView, ...]) -> None:
        """A node whose memory the caller decided: computed there, or elsewhere and written back."""
        op, target, buffer = node.op, split.target, self.placed[node].buffer
        assert op is not None
        storage = self.storages.own(node, buffer.space)
        out = final = StorageView.of(node, storage)
        if not (self.storages.reaches(target, storage) and buffer.type.is_raw):
            out = StorageView.of(node, self.storages.temporary(node, node.nbytes, target.index))
            split.write_backs.append(Copy(node, out, final, "write-back"))
        split.steps.append(SplitStep(op.name, node, out, operands, support))
        self.storages.enter(node, out.storage)
        self.storages.made_in[out.storage] = split.index

    def _output(self, output: Tensor) -> StorageView | None:
        if 0 in output.shape:
            return None
        root = output.root
        target = self.targets[self.target_of.get(root, len(self.targets) - 1)]
        return self.storages.shown(output, target)
