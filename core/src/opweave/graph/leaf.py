"""What a leaf refers to: its bytes, and where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from opweave.graph.dtypes import DType, f32
from opweave.graph.layout import Shape

if TYPE_CHECKING:
    from opweave.contract.buffer import Buffer
    from opweave.graph.tensor import Tensor

__all__ = ["Leaf", "LeafKind", "Location", "Placement", "Spec"]

LeafKind = Literal["input", "constant", "weight", "state"]


class Spec(NamedTuple):
    """A shape and a dtype in place of an array, for graphs that are only planned."""

    shape: Shape
    dtype: DType = f32


class Location(NamedTuple):
    """A position in memory: byte ``offset`` of ``buffer``; ``handle`` is what the ``_init`` of its type returned."""

    buffer: Buffer
    offset: int
    handle: Any = None


class Placement(NamedTuple):
    """The memory of a tensor: byte ``offset`` of ``buffer``; ``handle`` is what the ``_init`` of its type returned."""

    tensor: Tensor
    buffer: Buffer
    offset: int
    handle: Any = None


class Leaf:
    """The bytes of a leaf tensor, and where they are.

    Attributes:
        kind: ``"input"`` (fed for each run), ``"constant"``, ``"weight"`` (read-only) or ``"state"`` (nodes write it).
        data: the bytes on the host, dense; ``None`` for inputs, for states, and for weights made from a `Spec`.
        device: name of the device that the user chose for the leaf, or ``None``.
        placement: its memory, or ``None``: leaves that the user placed have it at once, others from the first program.
        copies: memory space -> where this read-only leaf was uploaded to, once for all programs; buffer type -> where
            its copy in that special memory is.
        group: a token of the mapping that a weight belongs to; its weights share buffers.
        borrowed: fed arrays are not copied: the caller must not change them until the run is complete.
        inferred: a constant whose dtype is that of its array and was not given.
        damaged: why a state cannot be read (a failed run left it half written), or ``""``.
    """

    __slots__ = (
        "__weakref__", "borrowed", "copies", "damaged", "data", "device", "fill", "group", "inferred", "kind", "name",
        "placement",
    )  # fmt: skip

    def __init__(
        self,
        kind: LeafKind,
        name: str,
        data: np.ndarray[Any, Any] | None = None,
        *,
        device: str | None = None,
        fill: float = 0,
        group: object = None,
        borrowed: bool = False,
        inferred: bool = False,
    ) -> None:
        self.kind: Final = kind
        self.name = name
        self.data = data
        self.device = device
        self.fill = fill
        self.group = group
        self.borrowed = borrowed
        self.inferred = inferred
        self.placement: Location | None = None
        self.copies: dict[Any, Location] = {}
        self.damaged = ""
