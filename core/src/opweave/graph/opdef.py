"""What an operation is: one `OpDef` each, entered into the table `OPS` by the modules of ``opweave.ops``.

The tensor's operators dispatch into this table by name, which is how ``tensor.py`` can lie below ``ops/``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from opweave.errors import UnknownNameError

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.tensor import Tensor

__all__ = ["OPS", "Infer", "OpDef", "define_op", "find_op", "flops_per_element"]

Infer = Callable[..., "tuple[Shape, DType]"]
"""The shape rule: ``infer(*srcs, **attrs)`` gives shape and dtype of the output, or raises a typed error."""


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
    """

    __slots__ = (
        "build", "family", "flops", "formula", "index_out", "indices", "infer", "inplace", "is_view", "name",
        "pointwise", "reference", "selects", "writes",
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
