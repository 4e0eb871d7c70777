"""`Sharded`: over which devices weights are split, along which axis and in which shares; and placing the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from math import gcd, inf, lcm
from numbers import Integral, Real
from typing import TYPE_CHECKING, Final

from opweave import registry
from opweave.errors import BoundsError, LayoutError, SchedulerError
from opweave.graph.leaf import Leaf, Shards
from opweave.graph.tensor import Tensor, new_leaf
from opweave.leaf_memory import place_state, read_leaf, upload
from opweave.runtime.device import Device

if TYPE_CHECKING:
    from opweave.runtime.buffer import Buffer, MultiBuffer

__all__ = ["Sharded", "keep_values", "place_shards", "place_state_shards", "shards_of", "shares_by_device"]

EVEN: Final = 256
"""Cuts lie at multiples of this many elements, or of a smaller power of two where an axis is short: then weights of
different types and axes are cut at the same places, at whole blocks of every type and mostly at whole heads."""


class Sharded:
    """Weights split over several devices, for ``device=`` of `opweave.weights`, or states, for that of `opweave.state`.

    Graphs that read them compute each part on the device where it lies. A product with weights that are cut along their
    first axis gives each device a part of the result; cut along the axis that is summed over, each device gives a
    partial sum, and the sums are added. Operations between two products stay split where they can, so that the two
    products of an MLP, or the four of an attention block, exchange values once if the last one is cut along axis 1
    and the others along axis 0. Nodes that write a state in shards write each part where it lies: `opweave.index_copy`
    of one that is cut along another axis than its rows, `opweave.assign` and `opweave.accumulate` along any; so a
    key-value cache is split by heads.

    Args:
        devices: device or its name -> share, any positive number: ``{"opencl:0": 3, "opencl:1": 1}``; or a sequence of
            devices, whose shares are then the bytes that each has free when weights are placed.
        axis: the axis of each weight that is cut: of a matrix (out, in) 0 or 1, of a table 0 for its rows, of
            experts (experts, out, in) 0 for whole experts.
        multiple: cuts lie at multiples of it: for the projections of an attention the size of a head, times the heads
            that share keys for that of the queries. Default: 256, or less where the axis is short.

    Raises:
        SchedulerError: no devices, one named twice, a set of them, which has no order; a share that is no positive
            number, an axis or multiple that is no integer, a multiple below 1.
    """

    __slots__ = ("axis", "devices", "multiple", "shares")

    def __init__(
        self,
        devices: Mapping[str | Device, float] | Sequence[str | Device],
        axis: int = 0,
        *,
        multiple: int | None = None,
    ) -> None:
        self.devices, self.shares = shares_by_device("Sharded", devices)
        numbers = [n for n in (axis, multiple) if n is not None]
        if (
            not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers)
            or min(numbers[1:], default=1) < 1
        ):
            raise SchedulerError(f"axis is an integer and multiple a positive one, not {axis!r} and {multiple!r}")
        self.axis: Final = int(axis)
        self.multiple: Final = None if multiple is None else int(multiple)

    def __repr__(self) -> str:
        over = list(self.devices) if self.shares is None else dict(zip(self.devices, self.shares, strict=True))
        return f"Sharded({over}, axis={self.axis})"


def shares_by_device(
    what: str, devices: Mapping[str | Device, float] | Sequence[str | Device]
) -> tuple[tuple[str | Device, ...], tuple[float, ...] | None]:
    """The devices and the shares that a caller of ``what`` gave; ``None``: no shares.

    Raises:
        SchedulerError: no devices, one named twice, a set of them, which has no order; a share that is no positive
            number.
    """
    named = dict(devices) if isinstance(devices, Mapping) else None
    given = tuple(devices) if isinstance(devices, Iterable) else ()
    unordered = isinstance(devices, (str, Set))  # sums are added in the order of the devices
    if unordered or not given or not all(isinstance(d, (str, Device)) for d in given):
        raise SchedulerError(f"{what} takes devices or their names, with or without shares, not {devices!r:.60}")
    if len(set(given)) < len(given):
        names = [device if isinstance(device, str) else device.name for device in given]
        raise SchedulerError(f"{what} names a device twice: {', '.join(names)}")
    for device, share in (named or {}).items():
        if not _is_share(share):
            raise SchedulerError(f"the share of {device!r} is a positive number, not {share!r:.60}")
    return given, None if named is None else tuple(named.values())


def _is_share(share: object) -> bool:
    try:
        return isinstance(share, Real) and not isinstance(share, bool) and 0 < float(share) < inf
    except OverflowError:  # an integer beyond all floats
        return False


def place_shards(tensors: Sequence[Tensor], sharded: Sharded) -> list[Buffer | MultiBuffer]:
    """Split weights and give each part memory on its device; returns the buffers. Weights made of a `Spec` are split
    without memory, for planning.

    Raises:
        UnknownNameError: no such device.
        SchedulerError: a device named twice, by different names.
        BoundsError: a weight without the axis.
        LayoutError: too few whole blocks for a part on each device.
        AllocationError: a device has not enough free memory; nothing stays allocated.
    """
    devices, shares, names = _resolved(sharded)
    cut = [(tensor, shards_of(tensor, sharded, shares, names)) for tensor in tensors]
    buffers: list[Buffer | MultiBuffer] = []
    try:
        for i, device in enumerate(devices):
            parts = [shards.parts[i] for _, shards in cut]
            for (whole, shards), part in zip(cut, parts, strict=True):
                assert whole.leaf is not None
                assert part.leaf is not None
                if whole.leaf.data is not None:
                    part.leaf.data = shards.values(whole.leaf.data, i)
            buffers += upload([p for p in parts if p.leaf is not None and p.leaf.data is not None], device)
            for part in parts:
                assert part.leaf is not None
                part.leaf.data = None  # the whole keeps its values; see `keep_values`
    except BaseException:
        for buffer in buffers:
            buffer.free()
        raise
    for whole, shards in cut:
        assert whole.leaf is not None
        whole.leaf.shards, whole.leaf.placement = shards, None
    return buffers


def place_state_shards(tensor: Tensor, sharded: Sharded) -> None:
    """Split a state that lies nowhere yet and give each part memory on its device, with its present values; raises what
    `place_shards` raises."""
    leaf = tensor.leaf
    assert leaf is not None
    devices, shares, names = _resolved(sharded)
    shards = shards_of(tensor, sharded, shares, names)
    try:
        for i, (part, device) in enumerate(zip(shards.parts, devices, strict=True)):
            if leaf.data is not None and part.leaf is not None:
                part.leaf.data = shards.values(leaf.data, i)
            place_state(part, device)
    except BaseException:
        for part in shards.parts:
            if part.leaf is not None and part.leaf.placement is not None:
                part.leaf.placement.buffer.free()
        raise
    leaf.shards, leaf.data = shards, None


def _resolved(sharded: Sharded) -> tuple[list[Device], Sequence[float], tuple[str, ...]]:
    """The devices, their shares and their names."""
    devices = [registry.device(d) if isinstance(d, str) else d for d in sharded.devices]
    if len(set(devices)) < len(devices):
        raise SchedulerError(f"{sharded!r} names a device twice: {', '.join(d.name for d in devices)}")
    return devices, sharded.shares or _free_bytes(devices), tuple([device.name for device in devices])


def _free_bytes(devices: Sequence[Device]) -> tuple[float, ...]:
    """Shares by the memory that each device has free; equal ones where a device does not know."""
    free = [device.mem_info()[0] for device in devices]
    return tuple(map(float, free)) if all(size > 0 for size in free) else (1.0,) * len(devices)


def shards_of(tensor: Tensor, sharded: Sharded, shares: Sequence[float], names: tuple[str, ...]) -> Shards:
    """The parts of a weight, without memory."""
    leaf, axis = tensor.leaf, sharded.axis
    assert leaf is not None
    if not -tensor.ndim <= axis < tensor.ndim:
        raise BoundsError(f"{tensor.describe()} has no axis {axis} to be cut along, as {sharded!r} asks")
    axis %= tensor.ndim
    if leaf.placement is not None and leaf.data is None:
        leaf.data = read_leaf(tensor)
    block = tensor.dtype.block if axis == tensor.ndim - 1 else 1
    cuts = cuts_of(tensor.shape[axis], shares, block, sharded.multiple)
    if cuts is None:
        raise LayoutError(
            f"{tensor.describe()} cannot be cut along axis {axis} into {len(shares)} parts of whole "
            f"{f'blocks of {block}' if block > 1 else 'elements'}"
            f"{f' at multiples of {sharded.multiple}' if sharded.multiple else ''}; take fewer devices or another axis"
        )
    parts = []
    for name, start, stop in zip(names, cuts, cuts[1:], strict=False):
        shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
        part = Leaf(leaf.kind, f"{leaf.name}[{start}:{stop}]", device=name, fill=leaf.fill, group=leaf.group)
        parts.append(new_leaf(part, shape, tensor.dtype))
    return Shards(axis, cuts, tuple(parts), names)


def cuts_of(
    length: int, shares: Sequence[float], block: int = 1, multiple: int | None = None
) -> tuple[int, ...] | None:
    """Where an axis is cut, each part at least one unit long; ``None``: it is too short.

    A unit is the least common multiple of a block and ``multiple``. Without one it is `EVEN`, halved until each part
    of equal ones would have at least 16 units.
    """
    unit = lcm(block, multiple or gcd(length, EVEN))
    while multiple is None and unit % 2 == 0 and (unit // 2) % block == 0 and length < 16 * len(shares) * unit:
        unit //= 2
    if length % unit:
        unit = block if multiple is None else unit
    units = length // unit
    if length % unit or units < len(shares):
        return None
    most = max(shares)  # so that no sum of them overflows
    cuts, total, before = [0], sum([share / most for share in shares]), 0.0
    for i, share in enumerate(shares):
        before += share / most
        at = round(units * before / total)
        cuts.append(max(cuts[-1] + 1, min(at, units - (len(shares) - 1 - i))))
    return tuple([cut * unit for cut in cuts])


def keep_values(tensors: Iterable[Tensor], device: Device) -> None:
    """Take the values of parts on a device that may be lost from those of their whole weights on the host, so that the
    parts can be withdrawn from it (`opweave.leaf_memory.withdraw`)."""
    for tensor in tensors:
        shards = tensor.leaf.shards if tensor.leaf is not None else None
        for i, part in enumerate(shards.parts if shards is not None else ()):
            assert shards is not None
            assert tensor.leaf is not None
            assert part.leaf is not None
            if shards.devices[i] == device.name and part.leaf.data is None and tensor.leaf.data is not None:
                part.leaf.data = shards.values(tensor.leaf.data, i)
