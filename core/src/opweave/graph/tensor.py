"""Symbolic values: `Tensor`, and how they are made.

A `Tensor` has no memory: programs allocate memory for computed tensors, and a `Leaf` refers to the bytes of a leaf.
Building an equal node twice returns the same object (hash-consing), so ``is`` compares structure, and schedulers find
programs that were built before. An equal node that is built again keeps the name, the scope and the site of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import prod
from os.path import dirname, sep
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakValueDictionary

import numpy as np

from opweave.concurrency import Lock
from opweave.errors import HazardError, ShapeError
from opweave.graph.arrays import host_array
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, f32, u8
from opweave.graph.layout import Shape, Strides, check_shape, dense_strides, is_dense, nbytes
from opweave.graph.leaf import Leaf, Placement
from opweave.graph.operators import Operators
from opweave.graph.scope import SCOPE

if TYPE_CHECKING:
    from types import CodeType

    from opweave.graph.opdef import OpDef
    from opweave.graph.precision import Precision

__all__ = ["Signature", "Tensor", "as_tensor", "constant", "input", "new_leaf", "node", "view_node"]

Window = tuple[DType, Shape, Strides]
_PACKAGE: Final = dirname(dirname(__file__)) + sep


class Signature:
    """Everything about a node that can decide whether a device supports it: op, attributes, dtypes and layouts.

    Interned: equal signatures are one object, so that each device is asked once.

    Attributes:
        op, attrs: the operation and its attributes.
        out, srcs: dtype, shape and strides of the output and of each source.
        memories: for each source the special buffer type in which it lies, ``None`` for ordinary memory; empty if all
            lie in ordinary memory.
        precision: the roughest precision in which a device may compute the node.
        constant: positions of f32 sources that show read-only leaves, which may be rounded once for all runs.
        whole: positions of sources that are whole read-only leaves, which may be repacked once for all runs.
        repacking: the devices that may do that.
    """

    __slots__ = (
        "__weakref__", "_answers", "_support", "_variants", "attrs", "constant", "memories", "op", "out", "precision",
        "repacking", "srcs", "whole",
    )  # fmt: skip

    answers: ClassVar[int] = 0
    """How often what devices answered has become void: kernels and their scratch memory are chosen by limits."""

    def __init__(
        self,
        op: OpDef,
        attrs: dict[str, Any],
        out: Window,
        srcs: tuple[Window, ...],
        memories: tuple[Any, ...] = (),
        precision: Precision = "exact",
        constant: frozenset[int] = frozenset(),
        whole: frozenset[int] = frozenset(),
        repacking: frozenset[Any] = frozenset(),
    ) -> None:
        self.op, self.attrs, self.out, self.srcs, self.memories = op, attrs, out, srcs, memories
        self.precision: Final = precision
        self.constant: Final = constant
        self.whole: Final = whole
        self.repacking: Final = repacking
        self._support: dict[Any, Any] = {}
        self._answers = Signature.answers
        self._variants: dict[tuple[Precision, frozenset[int], frozenset[int], frozenset[Any]], Signature] = {}

    @property
    def support(self) -> dict[Any, Any]:
        """What devices answered, with the limits of their kernels as they are."""
        if self._answers != Signature.answers:
            self._support, self._answers = {}, Signature.answers
        return self._support

    def at(
        self, precision: Precision, constant: frozenset[int], whole: frozenset[int] = frozenset(),
        repacking: frozenset[Any] = frozenset(),
    ) -> Signature:  # fmt: skip
        """This signature with another precision and other read-only sources; equal calls return one object."""
        key = precision, constant, whole, repacking
        known = self._variants.get(key)
        if known is None:
            known = self._variants.setdefault(
                key, Signature(self.op, self.attrs, self.out, self.srcs, self.memories, *key)
            )
        return known

    @property
    def variants(self) -> list[Signature]:
        """The signatures of the same precision that `at` has made of this one."""
        return [made for made in self._variants.values() if made.precision == self.precision]


class Tensor(Operators):
    """A symbolic value: the result of an operation on its sources, or a leaf.

    Built by the functions of `opweave` (``ow.input``, ``ow.matmul``, ...) and by operators; immutable but for its
    name. Comparison is by identity. Programs compute values (``ow.compile``, ``Scheduler.build``).

    Attributes:
        op: the operation, ``None`` for leaves.
        srcs: the tensors from which it is computed.
        attrs: the operation's attributes, normalised.
        dtype, shape: of the value, with axes in NumPy's order.
        strides: in bytes.
        offset: of the first element, in bytes from the first byte of ``root``.
        base: for a view, the dense tensor whose bytes it shows; else ``None``, as NumPy's ``base``.
        state: for a version of a state, the state's leaf; else ``None``.
        leaf: kind, name and bytes of a leaf, else ``None``.
        signature: interned key of op, attributes and layouts, ``None`` for leaves and views.
        scope: the scopes (`opweave.scope`) in which the node was built, ``"encoder/layer3"``; ``""`` for leaves.
    """

    __slots__ = (
        "__weakref__",
        "attrs",
        "base",
        "built_at",
        "dtype",
        "given_name",
        "leaf",
        "offset",
        "op",
        "scope",
        "shape",
        "signature",
        "srcs",
        "state",
        "strides",
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
    scope: str
    given_name: str
    # Where it was built: code and instruction, or the text of `site` if it was loaded.
    built_at: tuple[CodeType, int] | str

    def __new__(cls, *args: Any, **kwargs: Any) -> Tensor:
        raise TypeError("tensors are built by ow.input, ow.constant, ow.weights, ow.state and by operations")

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in messages and reports. Of a node its scope, and behind it the name that `named` gave it, else that
        of the operation: ``"layer3/linear"``. Of a leaf the name that `named` gave it, else its key, without scope."""
        own = self.given_name or (self.leaf.name if self.leaf else self.op.name if self.op else "")
        return f"{self.scope}/{own}" if self.scope else own

    def named(self, name: str) -> Tensor:
        """Give this tensor a name for messages and reports, within its scope; returns the tensor itself."""
        self.given_name = name
        return self

    @property
    def key(self) -> str:
        """The name that a leaf is fed, looked up and saved by, which `named` does not change; of a view that of its
        leaf; ``""`` for computed values."""
        leaf = self.memory.leaf
        return leaf.name if leaf is not None else ""

    @property
    def ndim(self) -> int:
        """Number of axes."""
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
        """Whether it shows the bytes of another tensor, ``base``."""
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
    def placement(self) -> Placement | None:
        """Where a placed leaf, or a view of one, begins: its buffer and the byte there, for transfers on streams
        (`Stream.upload_2d`). ``None``: it has no memory of its own, or not yet."""
        leaf = self.memory.leaf
        if leaf is None or leaf.placement is None:
            return None
        buffer, offset, handle = leaf.placement
        return Placement(self, buffer, offset + self.offset, handle)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie row-major without gaps."""
        return self.base is None or is_dense(self.shape, self.strides, self.dtype)

    @property
    def site(self) -> str:
        """``file:line`` where the tensor was built."""
        if isinstance(self.built_at, str):
            return self.built_at
        code, at = self.built_at
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= at < end and number is not None:
                line = number
        return f"{code.co_filename}:{line}"

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self  # symbolic; and a copy of a state would be another state of the same name

    def _label(self) -> str:
        what = self.op.name if self.op else self.leaf.kind if self.leaf else "tensor"
        label = f" {self.name!r}" if self.name != what else ""
        return f"{what}{label} {self.dtype}{list(self.shape)}"

    def describe(self) -> str:
        """Op, name, type, shape and build site in one line, as error messages show it."""
        return f"{self._label()} (built at {self.site})"

    def __repr__(self) -> str:
        return f"<Tensor {self._label()}>"

    # --- its memory, for other libraries -----------------------------------------------------------------------------

    def __dlpack__(self, **params: Any) -> Any:
        """The memory of a placed leaf (a state, weights), or of a view of one, for another library's ``from_dlpack``.

        The memory is shared, not copied: it changes when a later run writes the leaf. The caller has to wait for runs
        before it reads.

        Raises:
            BufferError: a computed tensor, a leaf without memory, or memory that cannot be exported.
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


# --- making tensors -------------------------------------------------------------------------------------------------

_NODES: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
_SIGNATURES: WeakValueDictionary[Any, Signature] = WeakValueDictionary()
_NODES_LOCK: Final = Lock()
"""Held while a node is looked up or made, so that two threads never get two equal nodes. It is reentrant, because shape
rules may build nodes."""


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
    tensor.scope = SCOPE.get() if op is not None else ""
    tensor.given_name = ""
    tensor.built_at = _call_site()
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
    """A view of ``src`` whose window, relative to ``src.root``, is ``(shape, strides, offset)``: the existing one if an
    equal one lives.

    Args:
        after: further sources, of which the view shows no element: what depends on it depends on them too.

    Raises:
        ShapeError: more than 8 axes.
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


def with_sources(tensor: Tensor, srcs: tuple[Tensor, ...]) -> Tensor:
    """The node of the same operation, attributes, scope and name on other sources, which have the shapes and, up to the
    size of their elements, the strides of its own ones; ``tensor`` itself if they are its own ones."""
    op = tensor.op
    assert op is not None
    if srcs == tensor.srcs:
        return tensor
    token = SCOPE.set(tensor.scope)
    try:
        if op.is_view:
            strides, offset, old, size = tensor.strides, tensor.offset, tensor.dtype.itemsize, srcs[0].dtype.itemsize
            if size != old:
                strides, offset = tuple([s // old * size for s in strides]), offset // old * size
            made = view_node(op, srcs[0], tensor.attrs, tensor.shape, strides, offset, srcs[1:])
        else:
            made = node(op, srcs, tensor.attrs)
    finally:
        SCOPE.reset(token)
    made.given_name = made.given_name or tensor.given_name
    return made


def shows_columns_of_blocks(x: Tensor) -> bool:
    """Whether ``x`` is the transpose of a quantized matrix, which only matmul takes, on its right side."""
    return x.dtype.block > 1 and x.op is not None and x.op.name == "transpose" and x.attrs["axes"][-1] != x.ndim - 1


def new_leaf(leaf: Leaf, shape: Shape, dtype: DType) -> Tensor:
    """A leaf tensor around ``leaf``."""
    tensor = _new(None, (), {}, dtype, shape, dense_strides(shape, dtype))
    tensor.leaf = leaf
    return tensor


def input(name: str, shape: int | Iterable[int], dtype: DTypeLike = f32, *, borrowed: bool = False) -> Tensor:
    """A value that is fed for each run. A second call with equal arguments returns the same tensor.

    Args:
        name: how it is fed: ``program.run({"x": array})``.
        shape: lengths of up to 8 axes, or one length.
        dtype: a `DType` or its name.
        borrowed: fed arrays are not copied; the caller must not change them until the run is complete.

    Raises:
        ShapeError: a missing name, more than 8 axes, or a length that is negative or no integer.
        LayoutError: the last axis does not consist of whole blocks of a quantized dtype.
        UnknownNameError, DTypeError: no such dtype; see `as_dtype`.
    """
    dtype = as_dtype(dtype)
    shape = check_shape(shape, dtype)
    if not isinstance(name, str) or not name:
        raise ShapeError(f"an input needs a name: ow.input('x', shape), not {name!r:.60}")
    key = ("input", name, shape, dtype, borrowed)
    with _NODES_LOCK:
        tensor = _NODES.get(key)
        if tensor is None:
            tensor = _NODES[key] = new_leaf(Leaf("input", name, borrowed=borrowed), shape, dtype)
    return tensor


def constant(value: Any, dtype: DTypeLike | None = None, *, name: str = "constant") -> Tensor:
    """A leaf with fixed values.

    Scalar constants of equal value and dtype are one leaf.

    Args:
        value: an array (also of another library), a number, or nested sequences of numbers, of up to 8 axes. The values
            are copied, except those of a read-only array (e.g. a mapped file) that is dense and of ``dtype``, which is
            used in place. A tensor is returned as it is.
        dtype: by default that of the array; f32, i64 or bool for Python's numbers. (The first time that an array of
            float64 without a ``dtype`` meets narrower floats, which then become f64, `OpweaveWarning` is given.)
        name: for messages and reports. Scalars are named by their value.

    Raises:
        ShapeError: more than 8 axes, or a name that is no text.
        DTypeError: a type that opweave does not have, values that ``dtype`` does not hold, or an array in the memory of
            another device than the host.
        UnknownNameError: no such dtype.
    """
    if isinstance(value, Tensor):
        return value
    if not isinstance(name, str):
        raise ShapeError(f"the name of a constant is a text, not {name!r:.60}")
    array = host_array(value, dtype, copy=not (isinstance(value, np.ndarray) and not value.flags.writeable))
    inferred = dtype is None
    dtype = as_dtype(array.dtype)
    shape = check_shape(array.shape, dtype)
    array.flags.writeable = False
    if shape:
        return new_leaf(Leaf("constant", name, array, inferred=inferred), shape, dtype)
    key = ("constant", dtype, array.tobytes())
    with _NODES_LOCK:
        tensor = _NODES.get(key)
        if tensor is None:
            tensor = _NODES[key] = new_leaf(Leaf("constant", f"{array[()]:g}", array), shape, dtype)
    return tensor


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """``value`` itself if it is a tensor, else a constant. A Python number takes the dtype of ``like``; a float takes
    f32 where that is no float type."""
    if isinstance(value, Tensor):
        return value
    if like is not None and isinstance(value, (bool, int, float)):
        if isinstance(value, float) and not like.dtype.is_float:
            return constant(value, f32)
        return constant(value, like.dtype)
    return constant(value)
