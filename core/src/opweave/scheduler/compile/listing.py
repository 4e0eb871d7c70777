"""`Lister`: what the groups of a program read, write and no longer need, for streams that compile whole groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract.step import Arg
from opweave.graph.layout import dense_strides, nbytes
from opweave.runtime.listing import listed
from opweave.scheduler.plan.allocate import Lifetimes

if TYPE_CHECKING:
    from opweave.contract.step import Group
    from opweave.scheduler.compile.run_list import Bindings
    from opweave.scheduler.plan.fuse import Groups
    from opweave.scheduler.plan.splits import Partition, Split

__all__ = ["Lister"]


class Lister:
    """Lists the operands of groups by what the whole program does with their values, in one slot."""

    def __init__(self, partition: Partition, groups: Groups, bindings: Bindings) -> None:
        live = Lifetimes(partition, groups)
        self._death: Final = live.death
        self._times: Final = live.times
        self._partition: Final = partition
        self._bindings: Final = bindings
        self._inputs: Final = frozenset(partition.inputs.values())
        written = {item.out.storage for split in partition.splits for item in split.steps}
        written |= {view.storage for copy in partition.copies for view in copy.writes}
        self._constant: Final = frozenset(s for s in partition.owners if s not in written)

    def listed(self, group: Group, split: Split, index: int) -> Group:
        """Group number ``index`` of a split with its operands listed."""
        moment = self._times[split.index] + 1 + index
        values = {arg.value for step in group.steps for arg in (step.out, *step.srcs) if arg.buffer is not None}
        arena_of = self._partition.arena_of
        dead = {value for value in values if arena_of[value] >= 0 and self._death[value] <= moment}
        wholes = {value: whole for value in values if (whole := self._whole(value)) is not None}
        return listed(group, wholes, self._constant, dead, dead - self._inputs)

    def _whole(self, storage: int) -> Arg | None:
        """All of a value as one operand, as its tensor shows it."""
        tensor, size = self._partition.tensors[storage], self._partition.sizes[storage]
        buffer, handles = self._bindings.buffers[storage], self._bindings.handles
        needed = nbytes(tensor.shape, tensor.dtype)
        if buffer is None or tensor.is_view or not 0 < needed <= size:
            return None
        strides = dense_strides(tensor.shape, tensor.dtype)
        offset = self._bindings.offsets[storage]
        return Arg(buffer, offset, tensor.dtype, tensor.shape, strides, handles.get(storage), storage)
