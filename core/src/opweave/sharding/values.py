"""`Values`: what stands for each tensor of a graph while its weights are replaced by their parts: one tensor, a copy on
each device, or parts; and the collectives that make one of the other.

A collective consists of ordinary nodes. An all-gather is a ``concat`` on the device that needs the whole, whose pieces
are copied straight to their places (`opweave.scheduler.plan.partition`). An all-reduce adds equal pieces of the partial
sums on each device, and gathers the sums; where values are small, or few devices read each other's memory, each device
adds all of them itself. Partial sums are added in the order of the parts, half types in f32, so that every device has
equal bits, and a bias once after that. Those of products in half types are computed in f32 too, where the devices do
that.

Every device has the operations of these nodes. `Collective` notes which nodes belong together, so that
`opweave.scheduler.plan.partition` can replace them by an action that does the same faster.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

from opweave.contract.collectives import CollectiveKind
from opweave.graph.dtypes import DType, wide_type
from opweave.graph.opdef import OpDef, find_op
from opweave.graph.scope import SCOPE
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import cast
from opweave.ops.movement import broadcast_to, slice
from opweave.sharding.ways import SUM

__all__ = [
    "NO_LINKS", "Collective", "Links", "Spread", "Values", "cast_on", "even_cuts", "slice_along",
]  # fmt: skip

SMALL: Final = 1 << 16
"""Bytes up to which each device adds whole partial sums: one exchange of more bytes is then faster than two."""


class Spread(NamedTuple):
    """A value in parts, each on a device.

    Attributes:
        devices: the name of the device of each part.
        parts: the tensors.
        axis: the axis along which they lie one after the other, or `SUM`: the value is their sum.
        cuts: where each begins along the axis, and at last its length; empty for sums.
        bias: a tensor to add to the sum, once; ``None``: none.
    """

    devices: tuple[str, ...]
    parts: tuple[Tensor, ...]
    axis: int
    cuts: tuple[int, ...] = ()
    bias: Tensor | None = None


class Collective(NamedTuple):
    """What nodes of a device compute together with those of others.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        of: the tensor whose value is exchanged.
        devices: the name of the device of each part.
        parts: the partial sums, or the pieces along an axis, in order.
        terms: what this device adds or puts together: the parts, for ``"reduce_scatter"`` a range of each.
        cut: of ``"reduce_scatter"`` that range: axis, start and stop.
        bias: what this device adds to the sum.
        inner: the nodes that compute it, the last one too.
    """

    kind: CollectiveKind
    of: Tensor
    devices: tuple[str, ...]
    parts: tuple[Tensor, ...]
    terms: tuple[Tensor, ...]
    cut: tuple[int, int, int] | None
    bias: Tensor | None
    inner: frozenset[Tensor]

    def rewritten(self, changed: Mapping[Tensor, Tensor]) -> Collective:
        """The same of a graph in which tensors have others with their value in their place."""

        def now(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            return tuple([changed.get(tensor, tensor) for tensor in tensors])

        return self._replace(
            of=changed.get(self.of, self.of),
            parts=now(self.parts),
            terms=now(self.terms),
            bias=None if self.bias is None else changed.get(self.bias, self.bias),
            inner=frozenset(now(self.inner)),
        )


class Links(NamedTuple):
    """How the devices are linked that compute a graph.

    Attributes:
        adds_whole: whether each of some devices should add whole partial sums of a tensor, which are given.
        together: whether the backend of these devices adds them, for all devices at once.
        runs: whether a device computes a node.
    """

    adds_whole: Callable[[tuple[str, ...], Tensor, tuple[Tensor, ...]], bool]
    together: Callable[[tuple[str, ...], Tensor, tuple[Tensor, ...]], bool]
    runs: Callable[[str, Tensor], bool]


NO_LINKS: Final = Links(lambda *_: False, lambda *_: False, lambda *_: True)
"""The links of devices about which nothing is known."""


class Values:
    """What stands for the tensors of a graph.

    Args:
        links: how the devices are linked.

    Attributes:
        spread: tensor -> its parts.
        plain: tensor -> the one tensor that stands for it on all devices, where that is not itself.
        copies: tensor and name of a device -> the tensor that stands for it there.
        pins: tensors that were made -> the name of their device.
        collectives: the last node of each collective on each device -> that collective.
    """

    def __init__(self, links: Links = NO_LINKS) -> None:
        self.links: Final = links
        self.collectives: Final[dict[Tensor, Collective]] = {}
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
        if found is not None and (found.devices, found.axis, found.cuts) == (like.devices, like.axis, like.cuts):
            return found.parts[index]
        if found is not None and found.axis == SUM:
            return self._added(tensor, found, device, (like.axis, start, stop))
        return slice_along(self.at(tensor, device), like.axis, start, stop)

    def on(self, device: str, like: Tensor, make: Callable[[], Tensor], given: Iterable[Tensor]) -> Tensor:
        """What ``make`` builds in the scope of ``like``; its nodes behind the ``given`` ones are pinned to a device."""
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
                if not tensor.given_name:
                    tensor.given_name, tensor.built_at = like.given_name, like.built_at
            stack += tensor.srcs
        return made

    # --- collectives ------------------------------------------------------------------------------------------------

    def _gathered(self, tensor: Tensor, device: str) -> Tensor:
        """All-gather, for sums all-reduce: the whole on a device."""
        found = self.spread[tensor]
        if found.axis == SUM:
            axis = next((a for a, n in enumerate(tensor.shape) if n > 1), 0)
            small = tensor.nbytes <= SMALL or tensor.shape[axis] < len(found.parts)
            if small or self.links.adds_whole(found.devices, tensor, found.parts):
                return self._added(tensor, found, device)
            found = self._scatter(tensor, found, axis)
        made = self._concat(tensor, device, found.parts, found.axis)
        if tensor in self._scattered:
            return made.named("all_reduce")
        self._note("all_gather", tensor, found, made, found.parts)
        return made.named("all_gather")

    def _concat(self, tensor: Tensor, device: str, pieces: tuple[Tensor, ...], axis: int) -> Tensor:
        concat = _on(find_op("concat"), device)
        return self.on(device, tensor, partial(node, concat, pieces, {"axis": axis}), pieces)

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
        terms = tuple([part if cut is None else slice_along(part, *cut) for part in found.parts])
        bias = self._bias(tensor, found, device, cut)

        wide, late, dtype = wide_type(tensor.dtype), None, terms[0].dtype
        alone = cut is None and wide is dtype and self.links.together(found.devices, tensor, found.parts)
        if alone or dtype is not tensor.dtype:
            bias, late = None, bias

        def add() -> Tensor:
            return cast_on(_sum(terms, bias, wide, device), dtype, device)

        made = self.on(device, tensor, add, terms if bias is None else (*terms, bias))
        kind: CollectiveKind = "all_reduce" if cut is None else "reduce_scatter"
        self._note(kind, tensor, found, made, terms, cut, bias)
        made = made.named(kind)
        if late is not None:
            given = (made, late)
            made = self.on(device, tensor, partial(_sum, given, None, wide, device), given)
        return self.on(device, tensor, partial(cast_on, made, tensor.dtype, device), [made])

    def _bias(self, tensor: Tensor, found: Spread, device: str, cut: tuple[int, int, int] | None) -> Tensor | None:
        if found.bias is None:
            return None
        bias = broadcast_to(self.at(found.bias, device), tensor.shape)
        return bias if cut is None else slice_along(bias, *cut)

    def _note(
        self,
        kind: CollectiveKind,
        tensor: Tensor,
        found: Spread,
        made: Tensor,
        terms: tuple[Tensor, ...],
        cut: tuple[int, int, int] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Note that ``made`` is the last node of a collective on a device."""
        given, inner, stack = {*terms, bias}, set(), [made]
        while stack:
            at = stack.pop()
            if at not in given and at not in inner and at.op is not None:
                inner.add(at)
                stack += at.srcs
        if made not in given:
            self.collectives[made] = Collective(
                kind, tensor, found.devices, found.parts, terms, cut, bias, frozenset(inner)
            )


def slice_along(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """The elements ``start .. stop`` along an axis, as a view."""
    return slice(tensor, (*[builtins.slice(None)] * axis, builtins.slice(start, stop)))


def even_cuts(length: int, count: int) -> tuple[int, ...]:
    """Where an axis is cut into nearly equal parts."""
    return tuple([length * i // count for i in range(count + 1)])


def _sum(terms: Sequence[Tensor], bias: Tensor | None, wide: DType, device: str) -> Tensor:
    """The terms added in order, and then the bias, in a wider type, on a device."""
    add = _on(find_op("add"), device)
    total, *others = [cast_on(term, wide, device) for term in (*terms, *([] if bias is None else [bias]))]
    for other in others:
        total = node(add, (total, other), {})
    return total


def cast_on(tensor: Tensor, dtype: DType, device: str) -> Tensor:
    """A tensor in another type, by a node for one device."""
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
