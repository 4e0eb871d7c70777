"""A graph divided into splits, as data: their steps and copies, over numbered storages without addresses.

A *storage* is a block of memory that is not allocated yet, and is named by its number, the storage id. `allocate`
decides where storages lie, `bind` gives them buffers. `partition` makes all this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from opweave.graph.layout import Shape, Strides, dense_strides, nbytes

if TYPE_CHECKING:
    from opweave.contract.collectives import CollectiveKind, Collectives
    from opweave.contract.memory import MemorySpace
    from opweave.graph.dtypes import DType
    from opweave.graph.graph import Graph
    from opweave.graph.leaf import Placement
    from opweave.graph.tensor import Tensor
    from opweave.runtime.memory import BufferType
    from opweave.scheduler.place.annotated_graph import AnnotatedGraph
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.place.support import Support
    from opweave.scheduler.place.target import Target

__all__ = ["COPY_CAUSES", "Copy", "Partition", "Split", "SplitStep", "StorageView"]

COPY_CAUSES: Final[dict[str, str]] = {
    "transfer": "the value lies in memory that the device does not reach",
    "pack": "the device takes dense operands only and cannot pack them itself",
    "unpack": "the memory keeps tensors in a form that the device's kernels do not read",
    "weight-fetch": "a weight that stays in host memory is brought for this split, which gives its memory back",
    "gather": "a part of a value that several devices have computed, to its place in the whole",
    "all-reduce": "partial sums of several devices, added where the whole sum is needed",
    "reduce-scatter": "a range of the partial sums of several devices, added on the device that needs it",
    "collective": "values that several devices exchange, by the procedure of their backend",
    "region": "a part of a state, for a node that runs where the state does not lie",
    "write-back": "a result that has to lie in memory which its device does not reach",
}
"""Every cause that `Copy.cause` holds, with its meaning."""


class StorageView(NamedTuple):
    """A window of a storage: ``offset`` bytes into it; strides in bytes."""

    storage: int
    offset: int
    dtype: DType
    shape: Shape
    strides: Strides

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> StorageView:
        """What a tensor shows of the storage in which its root lies."""
        # Half the time of `cls(...)`, and made for every leaf of every program.
        return tuple.__new__(cls, (storage, tensor.offset, tensor.dtype, tensor.shape, tensor.strides))

    @classmethod
    def dense(cls, storage: int, dtype: DType, shape: Shape) -> StorageView:
        """Dense elements at the start of a storage."""
        return cls(storage, 0, dtype, shape, dense_strides(shape, dtype))


class SplitStep(NamedTuple):
    """A step before it has memory. ``node`` is ``None`` for a packing step that the core inserted."""

    op: str
    node: Tensor | None
    out: StorageView
    srcs: tuple[StorageView, ...]
    support: Support


class Copy(NamedTuple):
    """Bytes that move before a split starts, or after it (write-back). ``cause`` is a key of `COPY_CAUSES`.

    Attributes:
        ids: the rows along the first axis that are needed; ``None``: everything.
        terms: of sums and collectives the further sources: partial sums that are added to ``src`` in order, or the
            parts of the other devices.
        bias: of sums what is added at last.
        kind: of collectives, which it is.
        provider: of collectives that a backend does, its procedure; ``None``: the host adds.
        outs: of a collective that a backend does for all devices at once, where the devices but the first get their
            results.
    """

    tensor: Tensor
    src: StorageView
    dst: StorageView
    cause: str
    ids: StorageView | None = None
    terms: tuple[StorageView, ...] = ()
    bias: StorageView | None = None
    kind: CollectiveKind | None = None
    provider: Collectives | None = None
    outs: tuple[StorageView, ...] = ()

    @property
    def sources(self) -> tuple[StorageView, ...]:
        """What is read."""
        if self.ids is None and self.bias is None and not self.terms:
            return (self.src,)  # mostly
        return tuple([v for v in (self.src, *self.terms, self.ids, self.bias) if v is not None])

    @property
    def reads(self) -> tuple[int, ...]:
        """The storages that are read."""
        return tuple([view.storage for view in self.sources])

    @property
    def writes(self) -> tuple[StorageView, ...]:
        """What is written."""
        return (self.dst, *self.outs)

    @property
    def nbytes(self) -> int:
        """Bytes that are copied, of all rows where ``ids`` choose some; for sums those of all terms but one."""
        if self.kind is None:
            return nbytes(self.dst.shape, self.dst.dtype)
        results = sum([nbytes(view.shape, view.dtype) for view in self.writes])
        return results * (len(self.terms) if self.kind in ("all_reduce", "reduce_scatter") else 1)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Consecutive steps on one target.

    Attributes:
        index: its number, in the order in which splits run.
        copies, write_backs: made before the steps, and after them.
        steps: what it computes, in order.
        observed: the node whose value an observer gets after the steps, with the view where it lies.
    """

    index: int
    target: Target
    copies: list[Copy]
    steps: list[SplitStep]
    write_backs: list[Copy]
    observed: tuple[Tensor, StorageView] | None

    @property
    def nodes(self) -> list[Tensor]:
        """The graph's nodes that run here, in order."""
        return [item.node for item in self.steps if item.node is not None]

    def __repr__(self) -> str:
        return f"<Split {self.index} on {self.target.name}: {len(self.steps)} steps, {len(self.copies)} copies>"


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A graph divided into splits.

    Attributes:
        annotated, assignment: what was divided.
        splits: in the order they run.
        sizes: bytes, by storage id.
        arena_of: by storage id the index of the target among whose temporaries it lies, -1: it has memory of its own.
        tensors: by storage id the tensor whose value it holds (the first one).
        owners: storages with memory of their own -> the leaf tensor, and the space in which its bytes are read.
        unpacked: those of them that are copies in plain memory of placed leaves, made once with the program.
        repacked: those of them that are copies in special memory, made once for all programs -> its kind.
        inputs: input leaf -> its storage id.
        outputs: for every output of the graph its view, ``None`` where it has no elements.
        prediction: what a run is predicted to take, where the placement was chosen by that, or once it was asked for
            (`Program.predicted`).
    """

    annotated: AnnotatedGraph
    assignment: Assignment
    splits: Sequence[Split]
    sizes: Sequence[int]
    arena_of: Sequence[int]
    tensors: Sequence[Tensor]
    owners: Mapping[int, tuple[Tensor, MemorySpace]]
    unpacked: Set[int]
    repacked: Mapping[int, BufferType]
    inputs: Mapping[Tensor, int]
    outputs: Sequence[StorageView | None]
    prediction: Prediction | None = None

    @property
    def graph(self) -> Graph:
        return self.annotated.graph

    @property
    def placed(self) -> Mapping[Tensor, Placement]:
        """Computed tensors whose memory the caller decided."""
        return self.annotated.placed

    @property
    def leaves(self) -> list[Tensor]:
        """The graph's leaves, and those that hold weights of them rounded."""
        return list(dict.fromkeys((*self.graph.leaves, *[t for t, _ in self.owners.values() if t.leaf is not None])))

    def holder(self, storage: int) -> Target | None:
        """The target to whose memory a storage with memory of its own counts: that of its special memory, else the
        first that reaches it; ``None``: none of them."""
        kind = self.repacked.get(storage)
        space = self.owners[storage][1]
        for target in self.assignment.targets:
            if target.device is kind.device if kind is not None else target.device.reaches(space):
                return target
        return None

    @property
    def copies(self) -> list[Copy]:
        """Every copy of a run, write-backs included."""
        return [c for s in self.splits for c in (*s.copies, *s.write_backs)]
