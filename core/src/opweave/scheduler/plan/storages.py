"""`Storages`: the numbered storages of a graph that is being partitioned: what lies in each, and how large it is.

Values that are computed lie among the temporaries of a target, and so do inputs. States and placed leaves have memory
of their own; read-only leaves that nobody placed have some in each space in which they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract.memory import HOST_SPACE, MemorySpace
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import new_leaf
from opweave.runtime.memory import BufferType
from opweave.scheduler.plan.splits import StorageView

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.splits import Split

__all__ = ["Storages"]


class Storages:
    """The storages of a partition, by storage id.

    Attributes:
        sizes, arena_of, tensors, owners, unpacked, repacked, inputs: as of `opweave.scheduler.plan.splits.Partition`.
        views: computed value, input or state -> its view of the storage in which it lies.
        made_in: storage -> index of the split whose steps wrote it last, -1: none did, as of inputs and copies; results
            that a node has to itself are left out.
    """

    def __init__(self, targets: Sequence[Target], target_of: Mapping[Tensor, int]) -> None:
        self._targets: Final = targets
        self._target_of: Final = target_of
        self.sizes: list[int] = []
        self.arena_of: list[int] = []
        self.tensors: list[Tensor] = []
        self.owners: dict[int, tuple[Tensor, MemorySpace]] = {}
        self.unpacked: set[int] = set()
        self.repacked: dict[int, BufferType] = {}
        self.inputs: dict[Tensor, int] = {}
        self.views: dict[Tensor, StorageView] = {}
        self.made_in: dict[int, int] = {}
        # The space in which a target reads read-only leaves that were not placed.
        self._spaces: Final = [
            HOST_SPACE if target.device.reaches(HOST_SPACE) else target.device.default_buffer_type.space
            for target in self._targets
        ]
        self._uploaded: Final[dict[MemorySpace, dict[Tensor, int]]] = {s: {} for s in (HOST_SPACE, *self._spaces)}
        self._copies_in: Final[dict[tuple[Tensor, BufferType], int]] = {}  # storages of repacked leaves

    def temporary(self, tensor: Tensor, size: int, arena: int) -> int:
        """A new storage among the temporaries of a target."""
        self.sizes.append(size)
        self.arena_of.append(arena)
        self.tensors.append(tensor)
        return len(self.sizes) - 1

    def own(self, tensor: Tensor, space: MemorySpace) -> int:
        """A new storage with memory of its own in ``space``."""
        index = self.temporary(tensor, tensor.nbytes, -1)
        self.owners[index] = (tensor, space)
        return index

    def storage_of(self, root: Tensor, target: Target) -> int:
        """The storage in which a value lies, for a reader on ``target``."""
        found = self.views.get(root)
        if found is not None:
            return found.storage
        if root.leaf is not None:
            return self.leaf(root, root.leaf, target)
        # A version of a state whose writer has no elements: the bytes are those of the state.
        return self.enter(root, self.storage_of(root.memory, target))

    def shown(self, tensor: Tensor, target: Target) -> StorageView:
        """What a tensor shows where its root lies, for a reader on ``target``."""
        whole = self.views.get(tensor)
        if whole is None:
            storage = self.storage_of(tensor.root, target)
            whole = self.views.get(tensor) or StorageView.of(tensor, storage)
        return whole

    def enter(self, root: Tensor, storage: int) -> int:
        """Note in which storage a value lies; returns that."""
        self.views[root] = StorageView.of(root, storage)
        return storage

    def leaf(self, root: Tensor, leaf: Leaf, target: Target) -> int:
        """The storage of a leaf. Read-only unplaced leaves have one in every space in which they are read."""
        if leaf.kind == "input":
            storage = self.temporary(root, root.nbytes, self._target_of[root])
            self.inputs[root] = storage
            self.made_in[storage] = -1
        elif leaf.placement is not None:
            storage = self.own(root, leaf.placement.buffer.space)
        elif leaf.kind == "state":
            storage = self.own(root, self._targets[self._target_of[root]].device.default_buffer_type.space)
        else:
            return self.uploaded_leaf(root, target)
        return self.enter(root, storage)

    def uploaded_leaf(self, root: Tensor, target: Target) -> int:
        """The storage of a read-only leaf in plain memory that a target reaches."""
        return self._uploaded_to(self._spaces[target.index], root)

    def _uploaded_to(self, space: MemorySpace, root: Tensor) -> int:
        known = self._uploaded[space].get(root)
        if known is None:
            known = self._uploaded[space][root] = self.own(root, space)
        return known

    def repacked_leaf(self, source: Tensor, kind: BufferType) -> StorageView:
        """The copy of a read-only leaf in special memory."""
        storage = self._copies_in.get((source, kind))
        if storage is None:
            storage = self._copies_in[source, kind] = self.own(source, kind.space)
            self.sizes[storage] = kind.alloc_size(source)
            self.repacked[storage] = kind
        return StorageView(storage, 0, source.dtype, source.shape, source.strides)

    def reaches(self, target: Target, storage: int) -> bool:
        arena = self.arena_of[storage]
        if arena == target.index:
            return True
        return target.device.reaches(self._targets[arena].space if arena >= 0 else self.owners[storage][1])

    def empty(self, source: Tensor) -> StorageView:
        """A source without elements, which lies on the host for every reader."""
        return StorageView.dense(self._uploaded_to(HOST_SPACE, source), source.dtype, source.shape)

    def pad(self, splits: Iterable[Split]) -> None:
        """Set the sizes of temporaries to those that the kinds of memory in which they lie ask for."""
        kinds = {
            target.index: target.buffer_type
            for target in self._targets
            if type(target.buffer_type).alloc_size is not BufferType.alloc_size
        }
        if not kinds:
            return
        views: list[StorageView] = []
        for split in splits:
            views += [view for copy in (*split.copies, *split.write_backs) for view in copy.writes]
            views += [item.out for item in split.steps]
        shapes = {storage: (t.shape, t.dtype) for t, storage in self.inputs.items()}
        shapes |= {view.storage: (view.shape, view.dtype) for view in views}
        for storage, (shape, dtype) in shapes.items():
            kind = kinds.get(self.arena_of[storage])
            if kind is not None:
                value = new_leaf(Leaf("input", self.tensors[storage].name), shape, dtype)
                self.sizes[storage] = max(self.sizes[storage], kind.alloc_size(value))
