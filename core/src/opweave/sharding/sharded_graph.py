"""`shard_graph`: a graph that reads weights in shards, with a node for each part. `Graph` to `ShardedGraph`."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from opweave.errors import LayoutError
from opweave.graph.dtypes import DType, wide_type
from opweave.graph.graph import Graph
from opweave.graph.opdef import OpDef
from opweave.graph.scope import SCOPE
from opweave.graph.tensor import Tensor, constant, node, view_node
from opweave.ops import movement
from opweave.ops.matmul import LINEAR, MATMUL
from opweave.ops.selection import where
from opweave.sharding.values import NO_LINKS, Collective, Links, Spread, Values, cast_on
from opweave.sharding.ways import SAME, SUM, Way, ways

__all__ = ["ShardedGraph", "shard_graph"]

LEAST: Final = 1 << 16
"""Every device may compute an operation for itself if the unsplit weights that it reads have at most so many bytes."""


class ShardedGraph(NamedTuple):
    """What `shard_graph` returns.

    Attributes:
        graph: the new graph.
        sharded: the weights in shards that the old one reads.
        devices: node of the new graph that belongs to the device of a part -> the name of that device.
        stand_ins: tensor of the old graph -> the tensor of the new one that has its whole value, if there is one.
        collectives: the last node of a collective on a device -> that collective.
    """

    graph: Graph
    sharded: tuple[Tensor, ...]
    devices: Mapping[Tensor, str]
    stand_ins: Mapping[Tensor, Tensor]
    collectives: Mapping[Tensor, Collective]


def shard_graph(graph: Graph, kept: Mapping[Tensor, str | None], links: Links = NO_LINKS) -> ShardedGraph:
    """The graph with a node for each part of weights in shards.

    Args:
        graph: a graph with such weights.
        kept: node that is computed as a whole, because it is pinned or placed by hand -> its device, ``None``: any.
        links: how the devices are linked.
    """
    sharded = tuple([leaf for leaf in graph.leaves if leaf.leaf is not None and leaf.leaf.shards is not None])
    sharder = _Sharder(sharded, kept, links)
    for tensor in graph.nodes:
        sharder.add(tensor)
    values = sharder.values
    outputs = tuple([values.at(output, sharder.devices[0]) for output in graph.outputs])
    new = Graph(outputs)
    here = {*new.nodes, *new.leaves}
    devices = {tensor: device for tensor, device in values.pins.items() if tensor.op is not None and tensor in here}
    stand_ins = dict(values.plain)
    for (tensor, _), made in values.copies.items():
        if made in here:
            stand_ins.setdefault(tensor, made)
    collectives = {end: what for end, what in values.collectives.items() if end in here}
    return ShardedGraph(new, sharded, devices, stand_ins, collectives)


class _Sharder:
    def __init__(self, sharded: tuple[Tensor, ...], kept: Mapping[Tensor, str | None], links: Links) -> None:
        self.kept: Final = kept
        self.values: Final = Values(links)
        devices: dict[str, None] = {}
        self.copied: set[Tensor] = set()  # what every device computes for itself
        for tensor in sharded:
            assert tensor.leaf is not None
            shards = tensor.leaf.shards
            assert shards is not None
            self.values.spread[tensor] = Spread(shards.devices, shards.parts, shards.axis, shards.cuts)
            devices |= dict.fromkeys(shards.devices)
        self.devices: Final = tuple(devices)

    def add(self, tensor: Tensor) -> None:
        """Find what replaces a node; its sources were added before."""
        values = self.values
        if tensor.state is not None and tensor.state in values.spread:
            values.spread[tensor] = self._written(tensor)
            return
        if not any(s in values.spread or s in self.copied for s in tensor.srcs):
            if any(s in values.plain for s in tensor.srcs):
                self._whole(tensor, self.devices[0])
            return
        writes = tensor.op is not None and tensor.op.writes  # its state is whole
        if tensor not in self.kept and not writes:
            found = self._sum_of_sums(tensor) or self._in_parts(tensor)
            if found is not None:
                values.spread[tensor] = found
                return
            if self._is_cheap(tensor):
                self.copied.add(tensor)
                for device in self.devices:
                    srcs = tuple([values.at(s, device) for s in tensor.srcs])
                    values.copies[tensor, device] = values.on(device, tensor, partial(again, tensor, srcs), srcs)
                return
        self._whole(tensor, self.kept.get(tensor) or self._home(tensor))

    def _whole(self, tensor: Tensor, device: str) -> None:
        """Compute the node once, on a device, from what replaces its sources there."""
        srcs = tuple([self.values.at(s, device) for s in tensor.srcs])
        token = SCOPE.set(tensor.scope)
        try:
            made = again(tensor, srcs)
        finally:
            SCOPE.reset(token)
        if made is not tensor:
            if not made.given_name and made.op is tensor.op:
                made.given_name, made.built_at = tensor.given_name, tensor.built_at
            self.values.plain[tensor] = made

    def _home(self, tensor: Tensor) -> str:
        """The device whose copies a node reads that is computed once: that of a leaf that it reads, else the first."""
        for source in tensor.srcs:
            leaf = source.memory.leaf
            if leaf is not None and leaf.placement is not None:
                name: str = leaf.placement.buffer.device.name
                if name in self.devices:
                    return name
        return self.devices[0]

    @staticmethod
    def _is_cheap(tensor: Tensor) -> bool:
        """Whether every device may compute a node for itself instead of waiting for one that does."""
        assert tensor.op is not None
        if tensor.op.product or tensor.op.writes or tensor.op.name in ("custom", "recompute"):
            return False
        read = sum([s.nbytes for s in tensor.srcs if s.memory.leaf is not None and s.memory.leaf.kind != "input"])
        return read <= max(LEAST, tensor.nbytes)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _sum_of_sums(self, tensor: Tensor) -> Spread | None:
        """The sum of two values that are partial sums on the same devices, which are then added once."""
        if tensor.op is None or tensor.op.name != "add":
            return None
        a, b = [self.values.spread.get(s) for s in tensor.srcs]
        if a is None or b is None or not a.axis == b.axis == SUM or a.devices != b.devices or (a.bias and b.bias):
            return None
        pairs = zip(a.devices, a.parts, b.parts, strict=True)
        wide = [x.dtype for x in (a.parts[0], b.parts[0]) if x.dtype is not tensor.dtype]
        parts = []
        for device, *terms in pairs:
            make = partial(_in_type, tensor, tuple(terms), wide[0] if wide else tensor.dtype, device)
            parts.append(self.values.on(device, tensor, make, terms))
        bias = a.bias or b.bias
        return Spread(a.devices, tuple(parts), SUM, (), bias)

    def _written(self, tensor: Tensor) -> Spread:
        """The next version of a state in shards, of which each part is written where it lies."""
        assert tensor.op is not None
        assert tensor.state is not None
        region, state = tensor.srcs[0], self.values.spread[tensor.state]
        found = self.values.spread.get(region)
        for way in ways(tensor):
            if found is not None and way.srcs[0] == found.axis and tensor not in self.kept:
                way = way._replace(out=SUM)  # the axes of a region are not those of the state that results
                made = self._parts(tensor, way, found.devices, found.cuts, region.shape[found.axis])
                return made._replace(axis=state.axis, cuts=state.cuts)
        raise LayoutError(
            f"{tensor.describe()} cannot be computed in parts: the state {tensor.state.name!r} is split along axis "
            f"{state.axis}; write regions that have all of that axis, by rows along another one, and pin no such node"
        )

    def _in_parts(self, tensor: Tensor) -> Spread | None:
        """The node in parts, in the way in which most bytes of its sources already are."""
        best, most = None, 0
        for way in ways(tensor):
            like = self._pattern(tensor, way)
            if like is None:
                continue
            fits = 0
            for source, axis in zip(tensor.srcs, way.srcs, strict=True):
                found = self.values.spread.get(source)
                if found is not None and found.axis != SUM and axis != SAME:
                    size = source.nbytes << (40 if source.leaf is not None else 0)  # weights must not be gathered
                    alike = axis is not None and found.axis == axis and found.devices == like[0]
                    alike = alike and found.cuts == _scaled(like[1], like[2], source.shape[axis or 0])
                    fits += size if alike else -size
            if best is None or fits > most:
                best, most = (way, *like), fits
        return None if best is None else self._parts(tensor, *best)

    def _pattern(self, tensor: Tensor, way: Way) -> tuple[tuple[str, ...], tuple[int, ...], int] | None:
        """Devices, cuts and length of the source by which a way would cut the others; ``None`` if there is no such
        source, or another source or the result cannot be cut in the same shares."""
        like = None
        product = tensor.op is not None and tensor.op.product
        for source, axis in zip(tensor.srcs, way.srcs, strict=True):
            found = self.values.spread.get(source)
            if found is not None and axis is not None and found.axis == axis and (like is None or source.leaf):
                like = found.devices, found.cuts, source.shape[axis]
            leaf = source.memory.leaf
            read_only = leaf is not None and leaf.kind in ("weight", "constant")
            if product and found is None and read_only and source.nbytes > LEAST:
                return None  # every device would need the weight
        if like is None:
            return None
        lengths = [s.shape[a] for s, a in zip(tensor.srcs, way.srcs, strict=True) if a not in (None, SAME)]
        if way.out != SUM:
            lengths.append(tensor.shape[way.out])
        for length in lengths:
            if _scaled(like[1], like[2], length) is None:
                return None
        for source, axis in zip(tensor.srcs, way.srcs, strict=True):
            block = source.dtype.block if axis == source.ndim - 1 else 1
            cuts = () if axis in (None, SAME) else _scaled(like[1], like[2], source.shape[axis])
            if any(cut % block for cut in cuts or ()):
                return None
        return like

    def _parts(self, tensor: Tensor, way: Way, devices: tuple[str, ...], cuts: tuple[int, ...], length: int) -> Spread:
        values, parts, bias = self.values, [], None
        given, op = list(zip(tensor.srcs, way.srcs, strict=True)), tensor.op
        if op is LINEAR and way.out == SUM and len(given) == 3:
            bias = given.pop()[0]
        out = () if way.out == SUM else _scaled(cuts, length, tensor.shape[way.out]) or ()
        wide, widened = wide_type(tensor.dtype), []
        selects = op is not None and way.out == SUM and _selects_rows(op, way)
        adds = op is not None and way.out == SUM and not selects and not op.writes
        for i, device in enumerate(devices):
            srcs = []
            for source, axis in given:
                found = values.spread.get(source) if axis == SAME else None
                if found is not None and found.devices == devices:
                    srcs.append(found.parts[i])
                elif axis is None or axis == SAME:
                    srcs.append(values.at(source, device))
                else:
                    scaled = _scaled(cuts, length, source.shape[axis]) or ()
                    srcs.append(values.piece(source, i, Spread(devices, (), axis, scaled)))
            size = None if way.out == SUM else (way.out, out[i + 1] - out[i])
            make = partial(again, tensor, tuple(srcs), size)
            if selects:
                make = partial(_selecting, tensor, tuple(srcs), cuts[i], cuts[i + 1])
            parts.append(values.on(device, tensor, make, srcs))
            if adds and wide is not tensor.dtype is srcs[0].dtype:  # each part is a sum that would be rounded
                cast = len(srcs) if op is MATMUL else 1  # a matrix product has operands of one type
                make = partial(_in_type, tensor, tuple(srcs[:cast]), wide, device, srcs[cast:])
                widened.append(values.on(device, tensor, make, srcs))
        if widened and all(map(values.links.runs, devices, widened)):
            parts = widened
        return Spread(devices, tuple(parts), way.out, out, bias)


def _scaled(cuts: tuple[int, ...], length: int, to: int) -> tuple[int, ...] | None:
    """The same cuts of an axis of another length, if they are at whole elements of it."""
    if length == to:
        return cuts
    return None if any(cut * to % length for cut in cuts) else tuple([cut * to // length for cut in cuts])


def again(tensor: Tensor, srcs: tuple[Tensor, ...], size: tuple[int, int] | None = None) -> Tensor:
    """The node on other sources, which may lie otherwise in memory; with ``size`` the part of it whose axis number
    ``size[0]`` has length ``size[1]``."""
    op, attrs = tensor.op, tensor.attrs
    assert op is not None
    if srcs == tensor.srcs:
        return tensor
    if not op.is_view:
        return node(op, srcs, attrs)
    shape = tensor.shape if size is None else (*tensor.shape[: size[0]], size[1], *tensor.shape[size[0] + 1 :])
    x, *others = srcs
    if op.name in ("reshape", "broadcast_to"):
        return getattr(movement, op.name)(x, shape)  # type: ignore[no-any-return]
    if op.name == "transpose":
        return movement.transpose(x, attrs["axes"])
    if "window" in attrs:  # of a combination of devices
        return view_node(op, x, attrs, tensor.shape, tensor.strides, x.offset + attrs["window"][0])
    if op.name == "slice":
        return movement.slice(x, _key(attrs["key"], tensor.srcs[0], x))
    if op.name == "diagonal":
        return movement.diagonal(x, attrs["offset"], -2, -1)
    return movement.after(x, others)


def _key(key: Any, old: Tensor, new: Tensor) -> tuple[Any, ...]:
    """A normalised index in Python's form. Where ``new`` is shorter than ``old``, all of the axis is taken."""
    found: list[Any] = []
    axis = 0
    for k in key:
        if isinstance(k, tuple):
            whole = old.shape[axis] != new.shape[axis]
            found.append(builtins.slice(None) if whole else builtins.slice(*k))
        else:
            found.append(k)
        axis += k is not None
    return tuple(found)


def _selects_rows(op: OpDef, way: Way) -> bool:
    """Whether the operation takes rows of a table by their ids, and the table is cut into ranges of rows."""
    return op.selects is not None and way.srcs[op.selects[0]] == 0


def _in_type(
    tensor: Tensor, srcs: tuple[Tensor, ...], dtype: DType, device: str, others: Sequence[Tensor] = ()
) -> Tensor:
    """The node on sources in another type, and on ``others`` as they are."""
    return again(tensor, (*[cast_on(source, dtype, device) for source in srcs], *others))


def _selecting(tensor: Tensor, srcs: tuple[Tensor, ...], start: int, stop: int) -> Tensor:
    """A node that takes rows of a table by their ids, of a part of the table that has the rows ``start .. stop``: 0 for
    ids of other parts."""
    op = tensor.op
    assert op is not None
    assert op.selects is not None
    _, at = op.selects
    ids = srcs[at]
    first = constant(start, ids.dtype)
    inside = where(ids >= first, ids < constant(stop, ids.dtype), constant(False))
    local = where(inside, ids - first, constant(0, ids.dtype))
    picked = node(op, tuple([local if i == at else s for i, s in enumerate(srcs)]), tensor.attrs)
    seen = movement.reshape(inside, (*inside.shape, *[1] * (picked.ndim - inside.ndim)))
    return where(seen, picked, constant(0, picked.dtype))
