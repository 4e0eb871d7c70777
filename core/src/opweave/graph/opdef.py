"""`OpDef`: the definition of an operation, and `OPS`, the table of all operations, which the modules of ``opweave.ops``
fill.

Operators of `Tensor` look operations up in this table by name, so that ``tensor.py`` need not import ``opweave.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.errors import UnknownNameError
from opweave.graph.dtypes import f64

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor

__all__ = [
    "OPS", "ROUGH", "SAMPLE_IDS", "Example", "Gradient", "Infer", "Limits", "OpDef", "Sample", "define_op", "find_op",
    "flops_per_element", "takes_precision",
]  # fmt: skip

Infer = Callable[..., "tuple[Shape, DType]"]
"""The shape rule: ``infer(*srcs, **attrs)`` returns shape and dtype of the output, or raises a typed error."""

Gradient = Callable[..., "Tensor | Sequence[Tensor | None] | None"]
"""``gradient(grad, out, *srcs, **attrs)`` builds the gradients of a loss with respect to the sources, given ``grad``,
the gradient with respect to the output ``out``. It returns for each source a tensor of its shape, or ``None`` where the
gradient is zero: a sequence, or for one source the tensor itself. For an operation that writes, ``grad`` and the first
result have the shape of the whole state: they are the gradients of its next version and of the one that is
overwritten."""


class Limits(NamedTuple):
    """How far the result of a device may be from the reference. 0, 0 requires equal values.

    Attributes:
        nmse: largest mean square error divided by the mean square of the reference.
        error: largest error of one element, divided by its absolute value plus the root mean square of all elements.
    """

    nmse: float
    error: float


class Sample(NamedTuple):
    """Nodes of an operation in several sizes, smallest first, which profiles measure and conformance tests run.

    Their leaves are inputs and weights without bytes. For measuring, floats are 0.5, and integers, which are ids, are
    0 .. `SAMPLE_IDS` - 1 repeated, so tables need at least that many rows.

    Attributes:
        dtype: name of the type under which a profile stores the result: that of the first source, for products that of
            the weights.
        build: makes nodes whose time depends on the bytes that they read and write.
        products: makes nodes whose time depends on floating-point operations; ``None`` if there are none.
    """

    dtype: str
    build: Callable[[], list[Tensor]]
    products: Callable[[], list[Tensor]] | None = None


class Example(NamedTuple):
    """Operands with which conformance tests try an operation that works element by element: all of one type and shape,
    in many shapes and layouts.

    Attributes:
        dtypes: names of the types, which `OpDef.dtypes` unites.
        values: what the operands are filled with, as the cases of ``opweave_conformance`` call it.
        tag: the end of the names of these cases.
        attrs: what the builder is given behind the operands.
    """

    dtypes: str
    values: str = "normal"
    tag: str = ""
    attrs: Mapping[str, Any] = {}


ROUGH: Final[Mapping[Precision, Limits]] = MappingProxyType({"bf16": Limits(3e-5, 4e-2), "int8": Limits(2e-4, 1e-1)})
"""Limits of products that are computed less than exactly. Rounding two operands and the result to 8 significant bits
adds a mean square error of 3 · 2.5e-6. Rounding an activation to 1/127 of the largest of its block of 32 adds about
3e-5 for normally distributed values, and more where a block has one large value."""

SAMPLE_IDS: Final = 8
"""Ids in samples are below this number."""


def flops_per_element(n: int) -> Callable[[Tensor], int]:
    """For ``OpDef.flops``: ``n`` floating-point operations per element of the output."""
    return lambda out: n * out.size


@dataclass(slots=True, eq=False, repr=False)
class OpDef:
    """The definition of an operation: what any backend's kernel for it must do.

    Attributes:
        name: the op's name, as kernels are registered for it.
        family: the module of ``opweave.ops`` that ``reference`` is from, ``"third-party"`` for others.
        infer: the shape rule, called with the source tensors and the attributes.
        reference: the definition of the operation in plain NumPy, with which every device is compared:
            ``reference(*arrays, **attrs)`` returns the result, which is then rounded to the dtype of the output. If
            ``writes`` is set, its first argument is the region to write, which it changes in place.
        build: the public function that checks arguments and makes the node.
        gradient: builds the gradients of the sources (`Gradient`); ``None``: `opweave.gradients` refuses a path through
            the operation. Those of opweave's own operations that are long or are made of other families' operations are
            in `opweave.ops.gradients`, which is imported when gradients are first asked for.
        inplace: positions of sources whose memory the output may overwrite, element by element.
        writes: the node writes into the memory of its first source, a state, and is the next version of it.
        is_view: the node is another window of its source's bytes; no backend computes it.
        indices: positions of sources that contain indices (i32 or i64); the others are data.
        index_out: the output contains indices.
        selects: ``(table, ids)``, positions of two sources: only the rows of the table, along its first axis, that the
            ids contain are read. If a table is copied from the host for each run, only these rows are copied.
        pointwise: each output element depends only on the source elements at the same position.
        flops: returns the number of floating-point operations for an output tensor. Default: one for each element if
            ``pointwise``, else 0.
        formula: the operation in one line of mathematics, for documentation.
        product: most of its work is multiplying and adding: accelerators are much faster, its cost depends on
            floating-point operations, and programs may allow it to be computed less than exactly (``rough``).
        exact: its float result consists of values of the sources, or of values that their type represents exactly;
            devices have to match the reference bit by bit. (Ignored if a source has another float type than the
            result.)
        slack: factor on the default limits of error in f32 and f64, for sums of many terms and for functions that
            devices approximate. It does not apply to half types, whose error is that of the final rounding.
        limits: name of a float type -> limits of error for results of that type, instead of the default.
        rough: precision -> limits of error for kernels that compute in it, for results of all types but f64; empty
            where there is only ``exact``. Default: `ROUGH` for products. What such a kernel makes of NaN, of infinities
            and of numbers that become infinite when they are rounded is unspecified.
        nan: whether devices have to treat NaN and infinities as the reference does. ``False``: their results are
            unspecified, and conformance tests do not use them.
        runs_like: name of an operation that takes about as long for the same bytes and operations; its measurements
            predict the cost of this operation if it has none of its own. Default: ``"add"``.
        samples: returns the nodes with which profiles measure the operation; ``None``: it is not measured.
        attributes: names of attributes that both ``infer`` and ``reference`` take as ``**`` only.
        sources: how many sources it has; 0 where that differs.
        examples: for an operation that works element by element on operands of one type, those that conformance tests
            make its cases of.
    """

    name: str
    _: KW_ONLY
    infer: Infer
    reference: Callable[..., Any]
    inplace: tuple[int, ...] = ()
    writes: bool = False
    is_view: bool = False
    indices: tuple[int, ...] = ()
    index_out: bool = False
    selects: tuple[int, int] | None = None
    pointwise: bool = False
    flops: Callable[[Tensor], int] = None  # type: ignore[assignment]  # set below
    formula: str = ""
    product: bool = False
    exact: bool = False
    slack: float = 1.0
    limits: Mapping[str, Limits] = field(default_factory=dict)
    rough: Mapping[Precision, Limits] = None  # type: ignore[assignment]  # set below
    nan: bool = True
    runs_like: str = "add"
    samples: Callable[[], Iterable[Sample]] | None = None
    gradient: Gradient | None = None
    attributes: tuple[str, ...] = ()
    sources: int = 0
    examples: tuple[Example, ...] = ()
    build: Callable[..., Tensor] | None = field(default=None, init=False)
    family: str = field(init=False)

    def __post_init__(self) -> None:
        defined_in = getattr(self.reference, "__module__", None) or ""
        self.family = defined_in.rpartition(".")[2] if defined_in.startswith("opweave.ops.") else "third-party"
        if self.flops is None:
            self.flops = flops_per_element(1 if self.pointwise else 0)
        if self.rough is None:
            self.rough = ROUGH if self.product else {}

    @property
    def dtypes(self) -> str:
        """Names of the types of operands in the examples, for the declarations of kernels."""
        return " ".join(example.dtypes for example in self.examples)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return find_op, (self.name,)


OPS: Final[dict[str, OpDef]] = {}
"""Every operation by name."""


def define_op(definition: OpDef) -> OpDef:
    """Add an operation to the table and return it.

    Third parties call it for operations of their own. Devices without a kernel for the operation do not support it; the
    ``host`` device runs its reference.

    Raises:
        ValueError: another operation has this name.
        TypeError: ``definition`` is not an `OpDef`.
    """
    if not isinstance(definition, OpDef):
        raise TypeError(f"define_op takes an OpDef, not {definition!r:.60}")
    if OPS.setdefault(definition.name, definition) is not definition:
        raise ValueError(f"the operation {definition.name!r} is already defined by {OPS[definition.name].family}")
    return definition


def find_op(name: str) -> OpDef:
    """The definition of ``name``; raises `UnknownNameError` with suggestions."""
    try:
        return OPS[name]
    except KeyError:
        raise UnknownNameError("operation", name, OPS) from None


def takes_precision(node: Tensor) -> bool:
    """Whether kernels of other precisions than ``"exact"`` may compute a node: its operation has limits of error for
    them (`OpDef.rough`), and its result is of a float type other than f64."""
    return bool(node.op is not None and node.op.rough and node.dtype.is_float and node.dtype is not f64)


def build(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Call ``OpDef.build`` of the operation ``name``; raises `UnknownNameError` if there is none."""
    builder = find_op(name).build
    if builder is None:
        raise UnknownNameError("builder for the operation", name, [n for n, op in OPS.items() if op.build])
    return builder(*args, **kwargs)
