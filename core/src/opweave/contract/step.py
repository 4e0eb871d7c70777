"""The work that a device is given: operands (`Arg`), one operation on them (`Step`), several as one (`Group`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.errors import LifetimeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape, Strides, is_dense, nbytes, span

if TYPE_CHECKING:
    from opweave.contract.kernels import Kernel
    from opweave.contract.workspace import ArrayLayout, Scratch
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.memory import BufferType

__all__ = ["Arg", "Call", "Choice", "Group", "Single", "Step", "first_equals", "scratch_args"]

Call = Callable[[], Any]
"""A function without arguments that does one prepared piece of work; its result is ignored."""


class Arg:
    """An operand of a step: a strided window of a buffer. Args with equal fields are equal.

    Attributes:
        buffer: the memory; ``None`` while unbound (before memory is planned, and for values inside of a fused group).
        offset: bytes from the start of the buffer to the first element, offsets of views included; while unbound, from
            the start of the value.
        dtype, shape: of the operand.
        strides: bytes per axis; 0 along axes that are broadcast. For quantized types the last one is that of a block.
        handle: what the ``_init`` of the buffer type returned for this tensor, else ``None``.
        value: number of the value in its graph; args with the same number are windows of the same value.
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
        """The buffer type of its memory; while unbound, the special type it will be in, ``None`` for ordinary
        memory."""
        return self._type if self.buffer is None else self.buffer.type

    @property
    def mem(self) -> Any:
        """The buffer's handle: what the author's ``_alloc`` returned."""
        if self.buffer is None:
            raise LifetimeError(f"{self!r} has no memory yet")
        return self.buffer.handle

    @property
    def address(self) -> int:
        """The address of the first element. Raises `LifetimeError` if the operand has no memory, or memory without
        numeric addresses."""
        buffer = self.buffer
        if buffer is None or buffer.freed:
            raise LifetimeError(f"{self!r} has no memory {'yet' if buffer is None else 'any more'}")
        address = buffer.address
        if address is None:
            raise LifetimeError(f"{self!r} has no address: its memory is opaque; use .mem and .offset")
        return address + self.offset

    @property
    def view(self) -> np.ndarray[Any, Any]:
        """The operand as a NumPy array over its memory, not a copy; raises what `Buffer.view` does, and `LifetimeError`
        while unbound."""
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
        """Bytes of the operand without gaps."""
        return nbytes(self.shape, self.dtype)

    @property
    def span(self) -> int:
        """Bytes from the start of the first element to the end of the last one, gaps included."""
        return span(self.shape, self.strides, self.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether the elements are row-major without gaps."""
        return is_dense(self.shape, self.strides, self.dtype)

    def share_view(self, other: Arg) -> None:
        """Show the memory by the array that another operand of the same place and layout has made."""
        self._view = other._view

    def lies_at(self, buffer: Buffer | None, offset: int, handle: Any) -> bool:
        """Whether an operand of the same dtype, shape and strides at that place equals this one."""
        return self.buffer is buffer and self.offset == offset and self.handle is handle

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


class Single(NamedTuple):
    """How a stream that fuses computes a step that shares its group with no other.

    Attributes:
        kernel: as `Group.kernel`.
        workspace: bytes of scratch memory while it runs.
        fuses: whether such a step may share a group with those before and after it.
        follows: operations that make what such a step may read in their place: behind one of them it may share a
            group although it else does not.
    """

    kernel: Kernel | None
    workspace: int
    fuses: bool
    follows: frozenset[str] = frozenset()


class Choice:
    """What a device has chosen for steps of one kind: of equal operations, attributes, precisions, dtypes and shapes,
    in equal kinds of memory. Their operands may have different strides.

    Attributes:
        kernel: the kernel that its table has chosen; ``None``: the table has none for such steps.
        scratch: the scratch memory of that kernel.
        kept: what streams of the device keep for further steps of the kind, by keys of their own.
    """

    __slots__ = ("kept", "kernel", "scratch")

    def __init__(self, kernel: Kernel | None, scratch: Scratch) -> None:
        self.kernel: Final = kernel
        self.scratch: Final = scratch
        self.kept: Final[dict[Hashable, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # in another process, devices choose for themselves


class Step(NamedTuple):
    """One operation to run. It contains everything a backend needs; while unbound it can be pickled and cached.

    Attributes:
        op: name of the operation.
        out: the operand that receives the result. Of an operation that writes into a state: the region to write.
        srcs: the sources. The target of an operation that writes is ``out`` and not repeated here.
        attrs: the normalised attributes.
        live: whether the result is needed outside of the steps that are passed along with this one to ``_fuse``.
        label: name of the tensor, for messages.
        precision: how rough the computation may be at most (`opweave.graph.precision.Precision`).
        choice: what the device has chosen for steps of this kind, where it was asked before; ``None``: it is asked.
            Where operands are replaced by those of another kind, set it to ``None``.
    """

    op: str
    out: Arg
    srcs: tuple[Arg, ...]
    attrs: Mapping[str, Any]
    live: bool = True
    label: str = ""
    precision: Precision = "exact"
    choice: Choice | None = None


class Group(NamedTuple):
    """Steps that run as one call. Values that are used only inside of a group get no memory: their args stay unbound.

    Attributes:
        steps: in the order in which they are computed.
        workspace: bytes of scratch memory that the call needs while it runs.
        scratch: that memory, a u8 operand; ``None`` until memory is planned, or if ``workspace`` is 0.
        nodes: the nodes that the steps compute, for messages; empty where there is no graph.

    The rest is listed by the core for streams that fuse (`opweave.runtime.listing`), once there is memory. Operands
    are dense and do not overlap; each covers all windows of its bytes that steps use.

    Attributes:
        reads: what the steps read and do not compute themselves.
        writes: what they leave in memory. An operand that they change is also among ``reads``.
        constant: positions in ``reads`` of weights and constants, which no node writes.
        dead: positions in ``reads`` of values that nobody reads after this group in a run.
        donatable: those of ``dead`` that are temporaries: the call may overwrite their memory.

    Attributes:
        call: the call that the stream has bound before, in another program, for equal steps on the same operands; only
            for streams with ``shares_calls``.
        kernel: of a single step, where ``_fuse`` names it: the kernel that computes it, which the core binds itself,
            without ``_bind``.
    """

    steps: tuple[Step, ...]
    workspace: int = 0
    scratch: Arg | None = None
    nodes: tuple[Tensor, ...] = ()
    reads: tuple[Arg, ...] = ()
    writes: tuple[Arg, ...] = ()
    constant: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    donatable: frozenset[int] = frozenset()
    call: Call | None = None
    kernel: Kernel | None = None

    def describe(self) -> str:
        """What it computes, as error messages show it: its nodes and where they were built, else its operations."""
        described = [node.describe() for node in self.nodes]
        return " + ".join(described or [f"{s.op} {s.label!r}" if s.label else s.op for s in self.steps])


def first_equals(groups: Sequence[Group]) -> list[int]:
    """For each group the number of the first one with the same step on the same operands, mostly its own.

    Layers of a model pass the same memory on, so that many of their steps are equal. For authors who override
    ``_compile``: where a stream shares calls (``shares_calls``), one call serves for all of them.
    """
    known: dict[Hashable, int] = {}
    return [known.setdefault(_place_of(group), number) for number, group in enumerate(groups)]


def _place_of(group: Group) -> Hashable:
    """A key that is equal for groups of one equal step on the same operands."""
    step, scratch = group.steps[0], group.scratch
    if len(group.steps) > 1 or step.choice is None or group.call is not None:
        return id(group)
    memory = None if scratch is None else (id(scratch.buffer), scratch.offset)
    return step.choice, group.kernel, memory, id(step.out), *map(id, step.srcs)


def scratch_args(layouts: Sequence[ArrayLayout] | None, scratch: Arg | None) -> dict[str, Arg | None]:
    """The keyword arguments of a kernel for its scratch memory: the arrays as operands in ``scratch``.

    The parameter of an array that is left out keeps its default. With ``None`` for ``layouts``, of a kernel that asks
    for bytes, it is ``workspace=scratch``.

    Raises:
        LifetimeError: ``scratch`` is ``None``, and there are arrays.
    """
    if layouts is None:
        return {"workspace": scratch}
    if scratch is None:
        if layouts:
            name = layouts[0].name
            raise LifetimeError(f"the workspace {name!r} has no memory: the step was compiled without its scratch")
        return {}
    buffer, start = scratch.buffer, scratch.offset
    return {name: Arg(buffer, start + offset, dtype, shape, strides) for name, offset, dtype, shape, strides in layouts}
