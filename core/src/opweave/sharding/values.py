"""`Values`: what stands for each tensor of a graph while its weights are replaced by their parts: one tensor, a copy on
each device, or parts; and the collectives that make one of the other.

A collective consists of ordinary nodes. An all-gather is a ``concat`` on the device that needs the whole, whose pieces
are copied straight to their places (`opweave.scheduler.partition`). An all-reduce adds equal pieces of the partial sums
on each device, and gathers the sums; where the values are small, each device adds all of them itself. Partial sums are
added in the order of the parts, half types in f32, so that every device has equal bits, and a bias once after that.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Final, NamedTuple

from opweave.graph.dtypes import DType, f32
from opweave.graph.opdef import OpDef, find_op
from opweave.graph.scope import SCOPE
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import cast
from opweave.ops.movement import broadcast_to, slice
from opweave.sharding.ways import SUM

__all__ = ["Spread", "Values", "even_cuts", "slice_along"]

SMALL: Final = 1 << 16
"""Bytes up to which each device adds whole partial sums: one exchange of more bytes is then faster than two."""


class Spread(NamedTuple):
    """A value in parts, each on a device.

    Attributes:
        devices: the name of the device of each part.
        parts: the tensors.
        axis: the axis along which they lie one after the other, or `SUM`: the value is their sum.
        cuts: where each begins along the axis, and at last its length; empty for sums.
        bias: of sums what is added to the sum.
    """

    devices: tuple[str, ...]
    parts: tuple[Tensor, ...]
    axis: int
    cuts: tuple[int, ...] = ()
    bias: Tensor | None = None


class Values:
    """What stands for the tensors of a graph.

    Attributes:
        spread: tensor -> its parts.
        plain: tensor -> the one tensor that stands for it on all devices, where that is not itself.
        copies: tensor and name of a device -> the tensor that stands for it there.
        pins: tensors that were made -> the name of their device.
    """

    def __init__(self) -> None:
        self.spread: Final[dict[Tensor, Spread]] = {}
        self.plain: Final[dict[Tensor, Tensor]] = {}
        self.copies: Final[dict[tuple[Tensor, str], Tensor]] = {}
        self.pins: Final[dict[Tensor, str]] = {}
        self._scattered: dict[Tensor, Spread] = {}

    def at(self, tensor: Tensor, device: str) -> Tensor:
        """The whole of a tensor for a reader on a device."""
        found = self.copies.get((tensor, device))
        if found is None and tensor in self.spread:
            found = self.copies[tensor, device] = self._gathered(tensor, device)
        return self.plain.get(tensor, tensor) if found is None else found

    def piece(self, tensor: Tensor, index: int, like: Spread) -> Tensor:
        """Part number ``index`` of a tensor cut as ``like``, on that part's device."""
        device, (start, stop) = like.devices[index], like.cuts[index : index + 2]
        found = self.spread.get(tensor)
        if found is not None and found[0] == like[0] and found[2:4] == like[2:4]:
            return found.parts[index]
        if found is not None and found.axis == SUM:
            return self._added(tensor, found, device, (like.axis, start, stop))
        return slice_along(self.at(tensor, device), like.axis, start, stop)

    def on(self, device: str, like: Tensor, make: Callable[[], Tensor], given: Iterable[Tensor]) -> Tensor:
        """What ``make`` makes of tensors that are given, in the scope of ``like``: all nodes pinned to a device."""
        token = SCOPE.set(like.scope)
        try:
            made = make()
        finally:
            SCOPE.reset(token)
        known, stack = set(given), [made]
        while stack:
            tensor = stack.pop()
            if tensor in known or tensor.op is None:
                continue
            known.add(tensor)
            if not tensor.is_view:
                self.pins[tensor] = device
                if not tensor._name:
                    tensor._name, tensor._site = like._name, like._site
            stack += tensor.srcs
        return made

    # --- collectives ------------------------------------------------------------------------------------------------

    def _gathered(self, tensor: Tensor, device: str) -> Tensor:
        """All-gather, for sums all-reduce: the whole on a device."""
        found = self.spread[tensor]
        if found.axis == SUM:
            axis = next((a for a, n in enumerate(tensor.shape) if n > 1), 0)
            if tensor.nbytes <= SMALL or tensor.shape[axis] < len(found.parts):
                return self._added(tensor, found, device)
            found = self._scatter(tensor, found, axis)
        parts, concat = found.parts, _on(find_op("concat"), device)
        made = self.on(device, tensor, partial(node, concat, parts, {"axis": found.axis}), parts)
        return made.named("all_gather") if tensor not in self._scattered else made.named("all_reduce")

    def _scatter(self, tensor: Tensor, found: Spread, axis: int) -> Spread:
        """Reduce-scatter: on each device an equal part of the sum."""
        known = self._scattered.get(tensor)
        if known is None:
            cuts = even_cuts(tensor.shape[axis], len(found.parts))
            ranges = zip(found.devices, cuts, cuts[1:], strict=False)
            parts = tuple([self._added(tensor, found, device, (axis, start, stop)) for device, start, stop in ranges])
            known = self._scattered[tensor] = Spread(found.devices, parts, axis, cuts)
        return known

    def _added(self, tensor: Tensor, found: Spread, device: str, cut: tuple[int, int, int] | None = None) -> Tensor:
        """The sum of the parts, or the elements ``start .. stop`` of it along an axis, on a device."""
        own = _on(find_op("add"), device)
        wide = f32 if tensor.dtype.is_float and tensor.dtype.itemsize < f32.itemsize else tensor.dtype
        terms = [part if cut is None else slice_along(part, *cut) for part in found.parts]
        if found.bias is not None:
            bias = broadcast_to(self.at(found.bias, device), tensor.shape)
            terms.append(bias if cut is None else slice_along(bias, *cut))

        def add() -> Tensor:
            total, *others = [_cast(term, wide, device) for term in terms]
            for other in others:
                total = node(own, (total, other), {})
            return _cast(total, tensor.dtype, device)

        return self.on(device, tensor, add, terms).named("all_reduce" if cut is None else "reduce_scatter")


def slice_along(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """The elements ``start .. stop`` along an axis, as a view."""
    return slice(tensor, (*[builtins.slice(None)] * axis, builtins.slice(start, stop)))


def even_cuts(length: int, count: int) -> tuple[int, ...]:
    """Where an axis is cut into nearly equal parts."""
    return tuple([length * i // count for i in range(count + 1)])


def _cast(tensor: Tensor, dtype: DType, device: str) -> Tensor:
    if tensor.dtype is dtype:
        return tensor
    made = cast(tensor, dtype)
    assert made.op is not None
    return node(_on(made.op, device), made.srcs, made.attrs)


@cache
def _on(op: OpDef, device: str) -> OpDef:
    """An operation like ``op`` for the nodes of one device: equal nodes are one tensor, which runs on one device, and
    collectives compute the same on several."""
    made = object.__new__(OpDef)
    for name in OpDef.__slots__:
        object.__setattr__(made, name, getattr(op, name))
    return made
