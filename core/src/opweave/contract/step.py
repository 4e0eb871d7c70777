"""What a device is asked to do: operands (`Arg`), one operation on them (`Step`), several as one (`Group`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opweave.contract.buffer import Buffer
from opweave.errors import LifetimeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape, Strides, is_dense, nbytes, span

if TYPE_CHECKING:
    from opweave.contract.memory import BufferType

__all__ = ["Arg", "Call", "Group", "Step"]

Call = Callable[[], Any]
"""One piece of work with everything decided beforehand."""


class Arg:
    """An operand of a step: a window of a buffer. Value object: equal contents are equal.

    Attributes:
        buffer: the memory, ``None`` while unbound (before memory is planned, and inside a fused group).
        offset: bytes from the start of the buffer, views included; while unbound, from the start of the value.
        dtype, shape: of the operand.
        strides: bytes per axis in this very copy of the value; 0 where it is broadcast.
        handle: what the buffer type's ``_init`` made for this tensor, else ``None``.
        value: number of the value in its graph; two args with one number show the same value.
    """

    __slots__ = ("_type", "_view", "buffer", "dtype", "handle", "offset", "shape", "strides", "value")

    def __init__(
        self,
        buffer: Buffer | None,
        offset: int,
        dtype: DType,
        shape: Shape,
        strides: Strides,
        handle: Any = None,
        value: int = -1,
        type: BufferType | None = None,
    ) -> None:
        self.buffer = buffer
        self._type = type
        self.offset = offset
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.handle = handle
        self.value = value
        self._view: np.ndarray[Any, Any] | None = None

    @property
    def buffer_type(self) -> BufferType | None:
        """The kind of memory it lies in; while unbound, the special kind it will lie in, ``None`` for ordinary one."""
        return self._type if self.buffer is None else self.buffer.type

    @property
    def mem(self) -> Any:
        """The buffer's handle: what the author's ``_alloc`` returned."""
        if self.buffer is None:
            raise LifetimeError(f"{self!r} has no memory yet")
        return self.buffer.handle

    @property
    def address(self) -> int:
        """Where the operand begins, in memory that has numeric addresses."""
        buffer = self.buffer
        if buffer is None or buffer._freed:
            raise LifetimeError(f"{self!r} has no memory {'yet' if buffer is None else 'any more'}")
        if buffer.address is None:
            raise LifetimeError(f"{self!r} has no address: its memory is opaque; use .mem and .offset")
        return buffer.address + self.offset

    @property
    def view(self) -> np.ndarray[Any, Any]:
        """The operand as an array over its own bytes, in memory that the process can address."""
        view = self._view
        if view is None:
            if self.buffer is None:
                raise LifetimeError(f"{self!r} has no memory yet")
            view = self._view = self.buffer.view(self.offset, self.dtype, self.shape, self.strides)
        return view

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes when packed."""
        return nbytes(self.shape, self.dtype)

    @property
    def span(self) -> int:
        """Bytes from the first to past the last element as it lies."""
        return span(self.shape, self.strides, self.dtype)

    @property
    def is_dense(self) -> bool:
        return is_dense(self.shape, self.strides, self.dtype)

    def _key(self) -> tuple[Any, ...]:
        return id(self.buffer), self.offset, self.dtype, self.shape, self.strides, self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arg) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return Arg, (self.buffer, self.offset, self.dtype, self.shape, self.strides, self.handle, self.value)

    def __repr__(self) -> str:
        where = "unbound" if self.buffer is None else f"{self.buffer.name}+{self.offset}"
        return f"<Arg {self.dtype}{list(self.shape)} {where}>"


class Step(NamedTuple):
    """One operation to run, self-contained: it can be cached, pickled (while unbound) and sent.

    Attributes:
        op: the operation's name.
        out: where the result goes. For a writing op: the region of the state that is written.
        srcs: the sources; a writing op's target is ``out`` and not repeated here.
        attrs: the normalised attributes.
        live: whether anything outside of the steps it is shown with needs the result.
        label: the tensor's name, for people.
    """

    op: str
    out: Arg
    srcs: tuple[Arg, ...]
    attrs: Mapping[str, Any]
    live: bool = True
    label: str = ""


class Group(NamedTuple):
    """Steps that run as one piece of work, with ``workspace`` bytes of scratch memory while they do.

    Values that live only inside a group get no memory: their args stay unbound.
    ``scratch`` is the workspace, bound when memory is planned.
    """

    steps: tuple[Step, ...]
    workspace: int = 0
    scratch: Arg | None = None
