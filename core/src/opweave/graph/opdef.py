"""What an operation is: one `OpDef` each, entered into the table `OPS` by the modules of ``opweave.ops``.

The tensor's operators dispatch into this table by name, which is how ``tensor.py`` can lie below ``ops/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.errors import UnknownNameError

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.tensor import Tensor

__all__ = ["OPS", "SAMPLE_IDS", "Infer", "Limits", "OpDef", "Sample", "define_op", "find_op", "flops_per_element"]

Infer = Callable[..., "tuple[Shape, DType]"]
"""The shape rule: ``infer(*srcs, **attrs)`` gives shape and dtype of the output, or raises a typed error."""


class Limits(NamedTuple):
    """How far a device's result may be from the reference. 0, 0 means: not at all.

    Attributes:
        nmse: mean square error divided by the mean square of the reference.
        error: largest error of an element, relative to the element plus the root mean square of all.
    """

    nmse: float
    error: float


class Sample(NamedTuple):
    """Nodes of an operation at several sizes, tiny ones first, by which profiles measure it and conformance tries it.

    Their leaves are inputs and weights without bytes. When they are measured floats are 0.5, and integers, ids, are
    0 .. `SAMPLE_IDS` - 1 in turn, so tables have at least so many rows.

    Attributes:
        dtype: the type by which a profile keeps the result: that of the first source, of products that of the weights.
        build: makes the nodes whose seconds count by the bytes that they move.
        products: makes the nodes whose seconds count by floating-point operations, where these decide.
    """

    dtype: str
    build: Callable[[], list[Tensor]]
    products: Callable[[], list[Tensor]] | None = None


SAMPLE_IDS: Final = 8
"""Rows that the ids of samples name."""


def flops_per_element(n: int) -> Callable[[Tensor], int]:
    """Cost of an op that does ``n`` floating-point operations per element of its output."""
    return lambda out: n * out.size


class OpDef:
    """The definition of an operation: what any backend's kernel for it must do.

    Attributes:
        name: the op's name, as kernels are registered for it.
        family: the module of ``opweave.ops`` that defines it, ``"third-party"`` for others.
        infer: the shape rule, called with the source tensors and the attributes.
        reference: the op in plain NumPy, the definition and the oracle: ``reference(*arrays, **attrs)`` returns the
            result, which is then rounded to the output's dtype. Where ``writes`` is set its first argument is the
            region to write, which it changes in place.
        build: the public function that checks arguments and makes the node.
        inplace: the sources whose memory the output may overwrite, element by element.
        writes: the node writes into the memory of its first source, a state, and is the next version of it.
        is_view: the node only shows its source's bytes otherwise; it never reaches a backend.
        indices: positions of sources that hold indices (i32 or i64); the rest is data.
        index_out: the output holds indices.
        selects: ``(table, ids)``, two sources: of the table only those rows along its first axis are read that the ids
            name. Where a table is brought from the host for each run, the others stay there.
        pointwise: each output element depends on the source elements at the same place only.
        flops: floating-point operations for an output tensor.
        formula: the op in one line of mathematics, for documentation.
        product: most of its work is multiplying and adding up: what ``compute_dtype`` computes in a half type, what
            accelerators do much faster, and what costs by floating-point operations.
        exact: its float result has only values that the sources have, or that their type holds exactly; devices give
            them bit by bit. (It is not asked where a source is of another float type than the result.)
        slack: how many times larger than by default a device's error may be in f32 and f64: for sums of many terms and
            for functions that devices approximate. Half types are rounded once at the end, whatever came before.
        limits: precision (a float type's name) -> how far results of that type may be off, in place of the default.
        nan: what the reference makes of NaN and infinities is what devices have to make of them. ``False``: it is open,
            and conformance tries none.
        runs_like: name of an operation that takes about as long for as many bytes and operations: by its measurements
            the cost is predicted where this operation has none. Default: ``"add"``.
        samples: gives the nodes by which profiles measure the operation; without, it is not measured by itself.
    """

    __slots__ = (
        "build", "exact", "family", "flops", "formula", "index_out", "indices", "infer", "inplace", "is_view", "limits",
        "name", "nan", "pointwise", "product", "reference", "runs_like", "samples", "selects", "slack", "writes",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        *,
        infer: Infer,
        reference: Callable[..., Any],
        family: str = "third-party",
        inplace: tuple[int, ...] = (),
        writes: bool = False,
        is_view: bool = False,
        indices: tuple[int, ...] = (),
        index_out: bool = False,
        selects: tuple[int, int] | None = None,
        pointwise: bool = False,
        flops: Callable[[Tensor], int] | None = None,
        formula: str = "",
        product: bool = False,
        exact: bool = False,
        slack: float = 1.0,
        limits: Mapping[str, Limits] = MappingProxyType({}),
        nan: bool = True,
        runs_like: str = "add",
        samples: Callable[[], Iterable[Sample]] | None = None,
    ) -> None:
        self.name: Final = name
        self.family: Final = family
        self.infer: Final = infer
        self.reference: Final = reference
        self.inplace: Final = inplace
        self.writes: Final = writes
        self.is_view: Final = is_view
        self.indices: Final = indices
        self.index_out: Final = index_out
        self.selects: Final = selects
        self.pointwise: Final = pointwise
        self.flops: Final = flops or flops_per_element(1 if pointwise else 0)
        self.formula: Final = formula
        self.product: Final = product
        self.exact: Final = exact
        self.slack: Final = slack
        self.limits: Final = limits
        self.nan: Final = nan
        self.runs_like: Final = runs_like
        self.samples: Final = samples
        self.build: Callable[..., Tensor] | None = None

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return find_op, (self.name,)


OPS: Final[dict[str, OpDef]] = {}
"""Every operation by name."""


def define_op(definition: OpDef) -> OpDef:
    """Enter an operation into the table.

    Third parties use this too: a device that does not know the op refuses it with a reason, and the ``host`` device
    runs its reference.

    Raises:
        ValueError: the name is taken by another definition.
        TypeError: no `OpDef`.
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


def build(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Call the public builder of an operation by its name."""
    builder = find_op(name).build
    if builder is None:
        raise UnknownNameError("builder for the operation", name, [n for n, op in OPS.items() if op.build])
    return builder(*args, **kwargs)
