"""What a leaf refers to: its bytes, and where they are."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import ref

import numpy as np

from opweave.graph.dtypes import DType, DTypeLike, f32
from opweave.graph.layout import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opweave.graph.tensor import Tensor

__all__ = ["Leaf", "LeafKind", "Location", "Placement", "Shards", "Spec", "part_of", "parts_of"]

LeafKind = Literal["input", "constant", "weight", "state"]


class Spec(NamedTuple):
    """A shape and a dtype in place of an array, for graphs that are only planned."""

    shape: Shape
    dtype: DTypeLike = f32


class Location(NamedTuple):
    """A position in memory: byte ``offset`` of ``buffer``; ``handle`` is what `BufferType._init` returned for it.

    Graphs do not know devices, so that the type of ``buffer`` is left open here: it is an `opweave.contract.Buffer`.
    """

    buffer: Any
    offset: int
    handle: Any = None


class Placement(NamedTuple):
    """The memory of a tensor: byte ``offset`` of ``buffer``; ``handle`` is what `BufferType._init` returned for it."""

    tensor: Tensor
    buffer: Any
    offset: int
    handle: Any = None


class Shards(NamedTuple):
    """The parts of a read-only leaf, each a leaf of its own.

    Attributes:
        axis: the axis along which the leaf was cut.
        cuts: the first index of each part along that axis, in elements, and last the length of the axis.
        parts: the leaves of the parts, in the order of the axis.
        devices: the name of the device of each part.
    """

    axis: int
    cuts: tuple[int, ...]
    parts: tuple[Tensor, ...]
    devices: tuple[str, ...]

    def values(self, whole: np.ndarray[Any, Any], part: int) -> np.ndarray[Any, Any]:
        """The values of a part as a dense array, given those of the whole leaf: a view of them where that is dense."""
        at = part_of(self.parts[part].dtype, self.axis, self.parts[part].ndim, *self.cuts[part : part + 2])
        return np.ascontiguousarray(whole[at])


class Copies:
    """Where a read-only leaf was copied to: ``copies[key]`` is the `Location` in a memory space (or a kind of memory).

    An entry holds its buffer until it is read for the first time (``copies[key]``, `get`). From then on it holds a weak
    reference: the copy is freed when the last program that read the entry drops the buffer.
    """

    __slots__ = ("_strong", "_weak")

    def __init__(self) -> None:
        self._strong: dict[Any, Location] = {}
        self._weak: dict[Any, tuple[ref[Any], int, Any]] = {}

    def __setitem__(self, key: Any, location: Location) -> None:
        self._strong[key] = location

    def __getitem__(self, key: Any) -> Location:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: Any) -> Location | None:
        """As ``[key]``; ``None`` for an entry that is not there."""
        location = self._strong.pop(key, None)
        if location is not None:
            buffer, offset, handle = location
            self._weak[key] = (ref(buffer, partial(self._gone, key)), offset, handle)
            return location
        if key not in self._weak:
            return None
        known, offset, handle = self._weak[key]
        taken = known()
        return None if taken is None else Location(taken, offset, handle)

    def _gone(self, key: Any, known: ref[Any]) -> None:
        """Called when the buffer of an entry was freed: removes the entry, and with it the handle."""
        if key in self._weak and self._weak[key][0] is known:
            del self._weak[key]

    def __contains__(self, key: object) -> bool:
        return key in self._strong or (key in self._weak and self._weak[key][0]() is not None)

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key in (*self._strong, *self._weak) if key in self])

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self.pop(key)

    def pop(self, key: Any, default: object = None) -> None:
        """Forget an entry, if there is one."""
        self._strong.pop(key, None)
        self._weak.pop(key, None)

    def items(self) -> list[tuple[Any, Location]]:
        """All keys and locations. Entries that hold their buffer go on doing so."""
        taken = [(key, known(), at, handle) for key, (known, at, handle) in self._weak.items()]
        there = [(key, Location(buffer, at, handle)) for key, buffer, at, handle in taken if buffer is not None]
        return [*self._strong.items(), *there]

    def values(self) -> list[Location]:
        """All locations. Entries that hold their buffer go on doing so."""
        return [location for _, location in self.items()]


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Leaf:
    """The bytes of a leaf tensor, and where they are.

    Attributes:
        kind: ``"input"`` (fed for each run), ``"constant"``, ``"weight"`` (read-only) or ``"state"`` (nodes write it).
        name: by which it is fed, looked up and saved.
        data: the values on the host, dense; those of blocks as ``uint8``. ``None`` for inputs, for weights made from a
            `Spec` or split over devices, for what was saved without values, and for placed states.
        fill: the number with which a state without ``data`` begins.
        device: name of the device that the user chose for the leaf, or ``None``.
        placement: its memory, or ``None``. Leaves that the user placed have memory at once, others from the first
            program on.
        copies: memory space -> where this read-only leaf was uploaded to, once for all programs; buffer type -> where
            its copy in that special memory is.
        converted: dtype -> this read-only leaf in another type, converted once for all programs.
        group: a token of the mapping that a weight belongs to; its weights share buffers.
        borrowed: fed arrays are not copied: the caller must not change them until the run is complete.
        inferred: a constant whose dtype is that of its array and was not given.
        damaged: why a state cannot be read (a failed run left it half written), or ``""``.
        pending: waits for the rest of a run that was cancelled, which may still write a damaged state; or ``None``.
        shards: the parts of a weight that is split over devices, which have its memory in place of itself; else
            ``None``.
    """

    kind: LeafKind
    name: str
    data: np.ndarray[Any, Any] | None = None
    _: KW_ONLY
    device: str | None = None
    fill: float = 0
    group: object = None
    borrowed: bool = False
    inferred: bool = False
    placement: Location | None = field(default=None, init=False)
    copies: Copies = field(default_factory=Copies, init=False)
    converted: dict[DType, Tensor] = field(default_factory=dict, init=False)
    damaged: str = field(default="", init=False)
    pending: Callable[[], object] | None = field(default=None, init=False)
    shards: Shards | None = field(default=None, init=False)


def parts_of(whole: Tensor) -> tuple[Tensor, ...]:
    """The parts of a leaf, none where it is not in shards."""
    return () if whole.leaf is None or whole.leaf.shards is None else whole.leaf.shards.parts


def part_of(dtype: DType, axis: int, ndim: int, start: int, stop: int) -> tuple[slice, ...]:
    """The index that selects elements ``start`` to ``stop`` along ``axis`` of the array of a tensor's values. Where the
    dtype consists of blocks, the last axis of that array counts bytes, and the index does too."""
    if dtype.block > 1 and axis == ndim - 1:
        start, stop = dtype.row_bytes(start), dtype.row_bytes(stop)
    return (*[slice(None)] * axis, slice(start, stop))
