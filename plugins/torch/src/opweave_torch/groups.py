"""`TorchCpuStream`: products with weights in special memory run as one call with what surrounds them.

* Products of the same rows (queries, keys and values; gate and up) become one product, and a gated unit of two of them
  goes along.
* What follows a product goes along: an activation, another product after it, a sum, its layer norm. torch makes a new
  tensor of each product; the last operation then stores, instead of a copy of every one.
* Attention writes its result in the order in which it is wanted next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from opweave.contract import Arg, Call, Group, Step
from opweave.contract.kernels import Kernel
from opweave.graph.dtypes import DType, f32
from opweave_torch.kernels.groups import ACTIVATIONS, GATES, bind_group, rearranged
from opweave_torch.kernels.packed_products import computed_in
from opweave_torch.packed import Int4Type, PackedType
from opweave_torch.stream import TorchStream

__all__ = ["TorchCpuStream"]


class TorchCpuStream(TorchStream):
    """Runs calls in the calling thread, on memory of the process."""

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        found = _Groups(steps, self.device.kernels.find).found
        grouped = {i for members in found.values() for i in members}
        groups: list[Group] = []
        waiting: list[Step] = []
        for i, step in enumerate(steps):
            if i in found:
                groups += [*super()._fuse(waiting), self._group([steps[k] for k in found[i]])]
                waiting = []
            elif i not in grouped:
                waiting.append(step)
        return [*groups, *super()._fuse(waiting)]

    def _group(self, steps: Sequence[Step]) -> Group:
        """Steps as one call; their first one is given workspace."""
        first = rearranged(*steps) if steps[0].op == "attention" else steps[0]
        return Group(tuple(steps), 0 if first is None else self.device._workspace(first))

    def _bind(self, group: Group) -> Call:
        if len(group.steps) > 1 and group.steps[0].op in ("linear", "attention"):
            return bind_group(self, group)
        return super()._bind(group)


class _Groups:
    """The groups of a split.

    Attributes:
        found: number of the step in whose place a group runs -> the numbers of its steps.
    """

    def __init__(self, steps: Sequence[Step], find: Callable[[Step], Kernel | None]) -> None:
        self.steps, self.find = steps, find
        self.found: Final[dict[int, list[int]]] = {}
        self.readers: dict[Hashable, list[int]] = {}
        self.writers: dict[Hashable, list[int]] = {}
        firsts = [i for i, step in enumerate(steps) if step.op == "attention" or _is_packed(step)]
        for i, step in enumerate(steps if firsts else ()):
            for src in step.srcs:
                self.readers.setdefault(_memory(src), []).append(i)
            self.writers.setdefault(_memory(step.out), []).append(i)
        taken: set[int] = set()
        for i in firsts:
            if i in taken:
                continue
            members, place = self._attention(i) if steps[i].op == "attention" else self._products(i)
            if len(members) > 1 and not taken.intersection(members):
                self.found[place] = members
                taken.update(members)

    def _products(self, i: int) -> tuple[list[int], int]:
        members = self._of_same_rows(i)
        if len(members) == 1:
            members = self._chain(i)
            return members, members[-1]
        if len(members) == 2:
            last = {self._only_reader(k) for k in members}
            j = last.pop()
            if not last and j is not None and self._is_gated(j) and all(self._stays(k, j) for k in members):
                return [*members, j], j
        return members, i

    def _of_same_rows(self, i: int) -> list[int]:
        """The products of the same rows with packed weights that can run in place of the product ``i``."""
        first = self.steps[i]
        members = [i]
        if not isinstance(first.srcs[1].buffer_type, PackedType):
            return members
        for j in dict.fromkeys(self.readers[_memory(first.srcs[0])]):
            step = self.steps[j]
            alike = j > i and step.op == "linear" and step.srcs[0] == first.srcs[0] and _form(step) == _form(first)
            if alike and self.writers[_memory(step.out)] == [j] and self._stays(j, i):
                members.append(j)
        return members

    def _chain(self, i: int) -> list[int]:
        """The product ``i`` and the steps that go along with it, each the only one that reads the step before it."""
        members = [i]
        while True:
            j = self._only_reader(members[-1])
            if j is None or not self._follows(members, j) or not all(self._stays(k, j) for k in members):
                return members
            members.append(j)

    def _follows(self, members: Sequence[int], j: int) -> bool:
        """Whether the step ``j``, which reads the result of the last step of a chain, goes along with it."""
        before, step = self.steps[members[-1]], self.steps[j]
        shown, dtype = self._result(members[-1], j), before.out.dtype
        if step.op in ACTIVATIONS or step.op == "add":
            alike = all(arg.dtype is dtype for arg in (step.out, *step.srcs))
            return before.op == "linear" and alike and (step.op != "add" or step.out.shape == shown.shape)
        computed = _computed_in(self.steps[members[0]])
        if dtype not in (f32, computed) or step.out.dtype is not dtype or step.srcs[0] is not shown:
            return False  # values between steps would be rounded otherwise than each by itself
        if step.op == "layer_norm":
            # Of single elements the norm is 0, which a kernel of its own computes.
            return before.op == "add" and shown.shape[-1] > 1 and all(arg.dtype is dtype for arg in step.srcs)
        return (
            step.op == "linear" and before.op in ACTIVATIONS and computed is not None
            and _computed_in(step) is computed and shown.shape[-1] == before.out.shape[-1]
        )  # fmt: skip

    def _attention(self, i: int) -> tuple[list[int], int]:
        j = self._only_reader(i, whole=False)
        if j is None or self.steps[j].op != "contiguous" or not self._stays(i, j):
            return [i], i
        step = rearranged(self.steps[i], self.steps[j])
        return ([i, j], j) if step is not None and self.find(step) is self.find(self.steps[i]) else ([i], i)

    def _is_gated(self, j: int) -> bool:
        step = self.steps[j]
        return step.op in GATES and step.attrs.get("approximate") != "quick" and step.srcs[0] != step.srcs[1]

    # --- what depends on what ---------------------------------------------------------------------------------------

    def _only_reader(self, i: int, *, whole: bool = True) -> int | None:
        """The one step that reads the result of step ``i``, which nobody else needs; with ``whole`` all of it, in
        order."""
        step = self.steps[i]
        key = _memory(step.out)
        readers = self.readers.get(key, [])
        if step.live or len(readers) != 1 or self.writers[key] != [i] or not step.out.is_dense:
            return None
        shown = self._result(i, readers[0])
        if whole and (shown.offset != step.out.offset or not shown.is_dense or shown.size != step.out.size):
            return None
        return readers[0]

    def _result(self, i: int, j: int) -> Arg:
        """The result of step ``i`` as step ``j`` reads it."""
        key = _memory(self.steps[i].out)
        return next(src for src in self.steps[j].srcs if _memory(src) == key)

    def _stays(self, i: int, j: int) -> bool:
        """Whether step ``i`` finds the same operands in the place of ``j``."""
        first, last = sorted((i, j))
        writes = [k for src in self.steps[i].srcs for k in self.writers.get(_memory(src), ())]
        return not any(first <= k < last for k in writes)


def _is_packed(step: Step) -> bool:
    """Whether it is a product with a weight in special memory."""
    return step.op == "linear" and isinstance(step.srcs[1].buffer_type, (PackedType, Int4Type))


def _memory(arg: Arg) -> Hashable:
    return arg.value if arg.buffer is None else ("buffer", id(arg.buffer))


def _form(step: Step) -> Hashable:
    """What products that run as one have in common besides their rows."""
    return _computed_in(step), step.out.dtype, step.precision, len(step.srcs)


def _computed_in(step: Step) -> DType | None:
    """The type that a product with a packed weight computes in, ``None`` for other products."""
    w = step.srcs[1]
    return computed_in(w) if isinstance(w.buffer_type, PackedType) else None
