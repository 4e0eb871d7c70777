"""Symbolic values: `Tensor`, and its leaves.

A `Tensor` has no memory: programs allocate memory for computed tensors, and a `Leaf` refers to the bytes of a leaf.
Building an equal node twice returns the same object (hash-consing), so ``is`` compares structure, and schedulers find
programs that were built before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod
from os.path import dirname, sep
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from opweave.concurrency import Lock
from opweave.errors import BoundsError, DTypeError, HazardError, ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, f32, u8
from opweave.graph.foreign import host_view, is_foreign
from opweave.graph.layout import Shape, Strides, check_shape, dense_strides, is_dense, nbytes, normalize_axis

if TYPE_CHECKING:
    from types import CodeType

    from opweave.contract.buffer import Buffer
    from opweave.contract.memory import BufferType
    from opweave.graph.opdef import OpDef

__all__ = [
    "Leaf", "Location", "Placement", "Signature", "Spec", "Tensor", "as_tensor", "constant", "input", "node",
    "view_node",
]  # fmt: skip

LeafKind = Literal["input", "constant", "weight", "state"]
Window = tuple[DType, Shape, Strides]
_PACKAGE: Final = dirname(dirname(__file__)) + sep


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


class Signature:
    """Everything about a node that can decide whether a device supports it: op, attributes, dtypes and layouts.

    Interned: equal signatures are one object, so each device is asked once; ``support`` keeps the answers.
    ``memories`` are the special buffer types that sources lie in, ``None`` for ordinary memory; empty if all do.
    """

    __slots__ = ("__weakref__", "attrs", "memories", "op", "out", "srcs", "support")

    def __init__(
        self,
        op: OpDef,
        attrs: dict[str, Any],
        out: Window,
        srcs: tuple[Window, ...],
        memories: tuple[BufferType | None, ...] = (),
    ) -> None:
        self.op, self.attrs, self.out, self.srcs, self.memories = op, attrs, out, srcs, memories
        self.support: dict[Any, Any] = {}


class Leaf:
    """The bytes of a leaf tensor, and where they are.

    Attributes:
        kind: ``"input"`` (fed for each run), ``"constant"``, ``"weight"`` (read-only) or ``"state"`` (nodes write it).
        data: the bytes on the host, dense; ``None`` for inputs, for states, and for weights made from a `Spec`.
        device: name of the device that the user chose for the leaf, or ``None``.
        placement: its memory, or ``None``: leaves that the user placed have it at once, others from the first program.
        copies: memory space -> where this read-only leaf was uploaded to, once for all programs.
        group: a token of the mapping that a weight belongs to; its weights share buffers.
        borrowed: fed arrays are not copied: the caller must not change them until the run is complete.
        damaged: why a state cannot be read (a failed run left it half written), or ``""``.
    """

    __slots__ = (
        "__weakref__", "borrowed", "copies", "damaged", "data", "device", "fill", "group", "kind", "name", "placement",
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
    ) -> None:
        self.kind: Final = kind
        self.name = name
        self.data = data
        self.device = device
        self.fill = fill
        self.group = group
        self.borrowed = borrowed
        self.placement: Location | None = None
        self.copies: dict[Any, Location] = {}
        self.damaged = ""


class Tensor:
    """A symbolic value: the result of an operation on its sources, or a leaf.

    Built by the functions of `opweave` (``ow.input``, ``ow.matmul``, ...) and by operators; immutable but for its
    name. Comparison is by identity. Programs compute values (``ow.compile``, ``Scheduler.build``).

    Attributes:
        op: the operation, ``None`` for leaves.
        srcs: the tensors it is computed from.
        attrs: the operation's attributes, normalised.
        dtype, shape: of the value, NumPy's order of axes.
        strides, offset: bytes, relative to ``root``.
        base: for a view, the dense tensor whose bytes it shows; else ``None``, as NumPy's ``base``.
        state: for a version of a state, the state's leaf; else ``None``.
        leaf: what is known of the bytes of a leaf, else ``None``.
        signature: interned key of op, attributes and layouts, ``None`` for leaves and views.
    """

    __slots__ = (
        "__weakref__", "_name", "_site", "attrs", "base", "dtype", "leaf", "offset", "op", "shape", "signature",
        "srcs", "state", "strides",
    )  # fmt: skip

    op: OpDef | None
    srcs: tuple[Tensor, ...]
    attrs: dict[str, Any]
    dtype: DType
    shape: Shape
    strides: Strides
    offset: int
    # Never the tensor itself: a cycle would leave its memory to the garbage collector.
    base: Tensor | None
    state: Tensor | None
    leaf: Leaf | None
    signature: Signature | None
    _name: str
    _site: tuple[CodeType, int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Tensor:
        raise TypeError("tensors are built by ow.input, ow.constant, ow.weights, ow.state and by operations")

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The given name, else the name of the leaf or of the operation."""
        return self._name or (self.leaf.name if self.leaf else self.op.name if self.op else "")

    def named(self, name: str) -> Tensor:
        """Give this tensor a name for messages and reports; returns the tensor itself."""
        self._name = name
        return self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the value when packed."""
        return nbytes(self.shape, self.dtype)

    @property
    def is_view(self) -> bool:
        return self.base is not None

    @property
    def root(self) -> Tensor:
        """The dense tensor whose bytes this one shows; itself unless it is a view."""
        return self if self.base is None else self.base

    @property
    def memory(self) -> Tensor:
        """The tensor that owns the bytes: the root, or for a version of a state the state's leaf."""
        root = self if self.base is None else self.base
        return root if root.state is None else root.state

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie row-major without gaps."""
        return self.base is None or is_dense(self.shape, self.strides, self.dtype)

    @property
    def site(self) -> str:
        """``file:line`` where the tensor was built."""
        code, at = self._site
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= at < end and number is not None:
                line = number
        return f"{code.co_filename}:{line}"

    def describe(self) -> str:
        """Op, name, type, shape and build site in one line, as error messages show it."""
        what = self.op.name if self.op else self.leaf.kind if self.leaf else "tensor"
        label = f" {self.name!r}" if self.name != what else ""
        return f"{what}{label} {self.dtype}{list(self.shape)} (built at {self.site})"

    def __repr__(self) -> str:
        what = self.op.name if self.op else self.leaf.kind if self.leaf else "tensor"
        label = f" {self.name!r}" if self.name != what else ""
        return f"<Tensor {what}{label} {self.dtype}{list(self.shape)}>"

    # --- operators, as NumPy's --------------------------------------------------------------------------------------

    def __dlpack__(self, **params: Any) -> Any:
        """The memory of a placed leaf (a state, weights), or of a view of one, for another library's ``from_dlpack``:
        without copying, so that it shows what later runs write. Wait for them before reading.

        Raises:
            BufferError: a computed tensor, a leaf without memory, or memory that cannot be shown.
        """
        return self._exported().__dlpack__(**params)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._exported().__dlpack_device__()
        return int(kind), int(number)

    def _exported(self) -> Any:
        leaf = self.memory.leaf
        if leaf is None or leaf.placement is None:
            raise BufferError(f"{self.describe()} has no memory of its own to show; run a program and take its result")
        buffer, offset, _ = leaf.placement
        return buffer.exported(offset + self.offset, self.dtype, self.shape, self.strides)

    __array_ufunc__ = None  # np.ndarray + tensor comes to us instead of broadcasting over us

    def __add__(self, other: Any) -> Tensor:
        return opdef.build("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return opdef.build("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return opdef.build("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return opdef.build("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return opdef.build("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return opdef.build("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return opdef.build("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return opdef.build("div", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return opdef.build("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return opdef.build("matmul", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return opdef.build("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return opdef.build("pow", other, self)

    def __neg__(self) -> Tensor:
        return opdef.build("neg", self)

    def __abs__(self) -> Tensor:
        return opdef.build("abs", self)

    def __getitem__(self, key: Any) -> Tensor:
        return opdef.build("slice", self, key)

    # --- views and the most used operations as methods --------------------------------------------------------------

    @property
    def T(self) -> Tensor:  # noqa: N802 - NumPy's name
        """All axes reversed."""
        return opdef.build("transpose", self)

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """The axes in the given order, reversed without one; NumPy's ``transpose``."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return opdef.build("transpose", self, order or None)

    def swapaxes(self, a: int, b: int) -> Tensor:
        """Two axes exchanged; NumPy's ``swapaxes``."""
        order = list(range(self.ndim))
        try:
            i, j = normalize_axis(a, self.ndim), normalize_axis(b, self.ndim)
        except BoundsError as error:
            raise BoundsError(f"swapaxes: {error}; the operand is {self.describe()}") from None
        order[i], order[j] = j, i
        return opdef.build("transpose", self, order)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one length may be -1."""
        return opdef.build("reshape", self, shape[0] if len(shape) == 1 else shape)

    def broadcast_to(self, shape: Any) -> Tensor:
        return opdef.build("broadcast_to", self, shape)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """The value converted to another type, as ``ow.cast``."""
        return opdef.build("cast", self, dtype)

    def contiguous(self) -> Tensor:
        """The value packed row-major; itself if it already is."""
        return opdef.build("contiguous", self)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return opdef.build("sum", self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return opdef.build("mean", self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        return opdef.build("max", self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        return opdef.build("argmax", self, axis, keepdims)

    # --- what looks like Python but would mislead -------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise DTypeError(f"{self!r} is symbolic and has no truth value; run a program and test its result")

    def __iter__(self) -> Iterator[Tensor]:
        raise DTypeError(f"{self!r} is symbolic and does not iterate; use t[0], t[1], ... or ow.split(t, ...)")

    def __len__(self) -> NoReturn:
        raise DTypeError(f"use {self!r}.shape[0] for the length of its first axis")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DTypeError(f"{self!r} is symbolic and holds no values; run a program: ow.compile(tensor)(...)")

    def __float__(self) -> NoReturn:
        raise DTypeError(f"{self!r} is symbolic and holds no number; run a program: ow.compile(tensor)(...)")


# --- making tensors -------------------------------------------------------------------------------------------------

_NODES: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
_SIGNATURES: WeakValueDictionary[Any, Signature] = WeakValueDictionary()
_NODES_LOCK: Final = Lock()
"""Held while a node is looked up or made, so that two threads never get two equal nodes. Making a node may make
others."""


def _exact(attrs: dict[str, Any]) -> tuple[Any, ...]:
    """Attributes as a key that distinguishes values that are equal in Python: 0.0 and -0.0; 1, 1.0 and True."""
    return (*attrs, *map(_exact_value, attrs.values()))


def _exact_value(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is str:
        return value
    if kind is float:
        return kind, value if value < 0 or value > 0 else repr(value)  # 0.0, -0.0, nan
    if isinstance(value, tuple):
        plain = kind is tuple and _INT.issuperset(map(type, value))
        return value if plain else (kind, *map(_exact_value, value))
    return kind, value


_INT: Final = frozenset({int})


def _call_site() -> tuple[CodeType, int]:
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _new(
    op: OpDef | None, srcs: tuple[Tensor, ...], attrs: dict[str, Any], dtype: DType, shape: Shape, strides: Strides
) -> Tensor:
    tensor = object.__new__(Tensor)
    tensor.op = op
    tensor.srcs = srcs
    tensor.attrs = attrs
    tensor.dtype = dtype
    tensor.shape = shape
    tensor.strides = strides
    tensor.offset = 0
    tensor.base = tensor.state = None
    tensor.leaf = None
    tensor.signature = None
    tensor._name = ""
    tensor._site = _call_site()
    return tensor


def node(op: OpDef, srcs: tuple[Tensor, ...], attrs: dict[str, Any]) -> Tensor:
    """The node that applies ``op`` to ``srcs``: the existing one if an equal one lives, else a new one.

    ``attrs`` are normalised (non-negative axes, defaults filled) and hashable, always in the same order.

    Raises:
        ShapeError, DTypeError, LayoutError: by the op's shape rule.
        HazardError: a writing op whose target is not a state.
    """
    with _NODES_LOCK:
        return _node(op, srcs, attrs)


def _node(op: OpDef, srcs: tuple[Tensor, ...], attrs: dict[str, Any]) -> Tensor:
    exact = _exact(attrs) if attrs else ()
    key = (op, srcs, exact)
    known = _NODES.get(key)
    if known is not None:
        return known
    shape, dtype = op.infer(*srcs, **attrs)
    try:
        strides = dense_strides(shape, dtype)
    except ShapeError as error:
        raise ShapeError(f"{op.name}: {error}") from None
    tensor = _new(op, srcs, attrs, dtype, shape, strides)
    if op.writes:
        target = srcs[0].memory
        if target.leaf is None or target.leaf.kind != "state":
            raise HazardError(
                f"{op.name} writes into its first source, which must be a state (ow.state) or a view of one, "
                f"not {srcs[0].describe()}"
            )
        tensor.state = target
    out = srcs[0] if op.writes else tensor
    windows = tuple([(s.dtype, s.shape, s.strides) for s in srcs])
    window = (out.dtype, out.shape, out.strides)
    skey = (op, window, windows, exact)
    signature = _SIGNATURES.get(skey)
    if signature is None:
        signature = _SIGNATURES[skey] = Signature(op, attrs, window, windows)
    tensor.signature = signature
    _NODES[key] = tensor
    return tensor


def view_node(
    op: OpDef,
    src: Tensor,
    attrs: dict[str, Any],
    shape: Shape,
    strides: Strides,
    offset: int,
    after: tuple[Tensor, ...] = (),
) -> Tensor:
    """A view of ``src`` whose window, relative to ``src.root``, is ``(shape, strides, offset)``.

    What depends on the view also depends on the tensors in ``after``, whose values it does not show.
    """
    key = (op, src, *after, _exact(attrs))
    with _NODES_LOCK:
        known = _NODES.get(key)
        if known is not None:
            return known
        # The builder checks whole blocks; the transpose of a quantized matrix, which only matmul reads, has none.
        check_shape(shape, src.dtype if src.dtype.block == 1 else u8)
        tensor = _new(op, (src, *after), attrs, src.dtype, shape, strides)
        tensor.base = src.root
        tensor.offset = offset
        _NODES[key] = tensor
        return tensor


def shows_columns_of_blocks(x: Tensor) -> bool:
    """Whether ``x`` is the transpose of a quantized matrix, which only matmul takes, on its right side."""
    return x.dtype.block > 1 and x.op is not None and x.op.name == "transpose" and x.attrs["axes"][-1] != x.ndim - 1


def new_leaf(leaf: Leaf, shape: Shape, dtype: DType) -> Tensor:
    """A leaf tensor around ``leaf``."""
    tensor = _new(None, (), {}, dtype, shape, dense_strides(shape, dtype))
    tensor.leaf = leaf
    return tensor


def input(name: str, shape: int | Sequence[int], dtype: DTypeLike = f32, *, borrowed: bool = False) -> Tensor:
    """A value that is fed for each run. A second call with equal arguments returns the same tensor.

    Args:
        name: how it is fed: ``program.run({"x": array})``.
        shape: lengths of up to 8 axes.
        dtype: a `DType` or its name.
        borrowed: fed arrays are not copied; the caller must not change them until the run is complete.

    Raises:
        ShapeError: a missing name, or a shape that is not possible.
        LayoutError: the last axis does not consist of whole blocks of a quantized dtype.
        UnknownNameError, DTypeError: see `as_dtype`.
    """
    dtype = as_dtype(dtype)
    shape = check_shape(shape if isinstance(shape, int) else tuple(shape), dtype)
    if not isinstance(name, str) or not name:
        raise ShapeError(f"an input needs a name: ow.input('x', shape), not {name!r:.60}")
    key = ("input", name, shape, dtype, borrowed)
    with _NODES_LOCK:
        tensor = _NODES.get(key)
        if tensor is None:
            tensor = _NODES[key] = new_leaf(Leaf("input", name, borrowed=borrowed), shape, dtype)
    return tensor


def host_array(value: Any, dtype: DTypeLike | None = None, *, copy: bool) -> np.ndarray[Any, Any]:
    """``value`` as a dense row-major array. An array of another library, such as a tensor of PyTorch, keeps its dtype;
    one that requires a gradient is detached.

    With a ``dtype`` the values are converted to it as far as it holds them: a float type rounds, and what is too large
    for it becomes infinite; an integer type and bool take whole numbers within their range.

    Raises:
        DTypeError: it is no array of numbers, or has values that ``dtype`` does not hold; an array of floats for an
            integer ``dtype``, whatever its values; an array in the memory of another device than the host.
    """
    if is_foreign(value) and not isinstance(value, Tensor):
        value = host_view(value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(f"cannot make an array of {type(value).__name__}: {error}") from None
    if dtype is None and not isinstance(value, (np.ndarray, np.generic)):
        # Python numbers have no width; models compute in f32 and i64.
        array = _converted(array, f32) if array.dtype == np.float64 else array
    want = as_dtype(array.dtype if dtype is None else dtype)
    if array.dtype != want.numpy:
        if isinstance(value, np.ndarray) and not want.is_float and array.dtype.kind not in "biu":
            raise DTypeError(f"an array of {array.dtype} does not become {want} silently; convert with astype(...)")
        array = _converted(array, want)
        copy = False
    array = np.array(array, order="C", copy=True) if copy else np.ascontiguousarray(array).reshape(array.shape)
    return array


def _converted(array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    kind = array.dtype.kind
    # Numbers beyond 64 bits are objects.
    if kind not in "biuf" and not (kind == "O" and all(isinstance(v, (int, float)) for v in array.flat)):
        as_dtype(array.dtype)
    if not dtype.is_float and kind != "b":
        _check_range(array, dtype)
    try:
        with np.errstate(over="ignore"):
            if kind == "O" and dtype.is_float:
                array = array.astype(np.float64)  # bf16 does not convert from objects
            return array.astype(dtype.numpy)
    except OverflowError as error:
        raise DTypeError(f"cannot make {dtype} of such numbers: {error}") from None


def _check_range(array: np.ndarray[Any, Any], dtype: DType) -> None:
    """Raises `DTypeError` naming the first value that an integer type, or bool, does not hold."""
    limits = None if dtype.kind == "b" else np.iinfo(dtype.numpy)
    low, high = (0, 1) if limits is None else (int(limits.min), int(limits.max))
    values = array if array.dtype.kind in "biuO" else array.astype(np.float64)
    # `high` may not be representable in a float type, but `high + 1`, a power of two, is.
    wrong = (values < low) | (values >= high + 1)
    if values.dtype.kind == "f":
        wrong |= values != np.trunc(values)
    if np.any(wrong):
        value = values[wrong].reshape(-1)[0]
        raise DTypeError(f"{value} does not fit into {dtype}, which holds {low} .. {high} without fractions")


def constant(value: Any, dtype: DTypeLike | None = None, *, name: str = "constant") -> Tensor:
    """A leaf with fixed values: an array (also of another library), a number, or nested sequences of numbers.

    The values are copied, except those of a read-only array (e.g. a mapped file), which is used in place. Python
    numbers become f32 or i64 unless ``dtype`` is given. Scalar constants of equal value and dtype are one leaf.

    Raises:
        DTypeError: a type that opweave does not have, values that ``dtype`` does not hold, or an array in the memory of
            another device than the host.
    """
    if isinstance(value, Tensor):
        return value
    if not isinstance(name, str):
        raise ShapeError(f"the name of a constant is a text, not {name!r:.60}")
    array = host_array(value, dtype, copy=not (isinstance(value, np.ndarray) and not value.flags.writeable))
    dtype = as_dtype(array.dtype)
    shape = check_shape(array.shape, dtype)
    array.flags.writeable = False
    if shape:
        return new_leaf(Leaf("constant", name, array), shape, dtype)
    key = ("constant", dtype, array.tobytes())
    with _NODES_LOCK:
        tensor = _NODES.get(key)
        if tensor is None:
            tensor = _NODES[key] = new_leaf(Leaf("constant", f"{array[()]:g}", array), shape, dtype)
    return tensor


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """``value`` itself if it is a tensor, else a constant; a bare Python number takes the dtype of ``like``."""
    if isinstance(value, Tensor):
        return value
    if like is not None and isinstance(value, (bool, int, float)):
        if isinstance(value, float) and not like.dtype.is_float:
            return constant(value, f32)
        return constant(value, like.dtype)
    return constant(value)
