"""How operations that work element by element are declared: once, as a function in NumPy with the facts about it.

The operation's builder, its reference, its place in the table of operations, its samples and the cases of the
conformance suite follow from the declaration; backends take the types that their kernels accept, and whether they may
work in place, from the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeVar

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.dtypes import FLOATS, DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import Example, OpDef, define_op, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, Number, composite, float_and_number, floating, pair, wide
from opweave.ops.samples import over_rows

__all__ = ["Binary", "Unary", "binary", "composed", "elementwise", "entered", "no_gradient", "same", "unary"]

B = TypeVar("B", bound=Callable[..., Tensor])


class Unary(Protocol):
    """The builder of an operation with one operand."""

    __name__: str

    def __call__(self, x: Any) -> Tensor: ...


class Binary(Protocol):
    """The builder of an operation with two operands, which broadcast."""

    __name__: str

    def __call__(self, a: Any, b: Any) -> Tensor: ...


def same(x: Tensor, *others: Tensor, **attrs: Any) -> tuple[Shape, DType]:
    """The shape rule of elementwise operations: all operands, and the output, have one shape and dtype."""
    for y in others:
        if y.shape != x.shape or y.dtype is not x.dtype:
            raise ShapeError(f"operands must have one shape and dtype: {x.describe()} and {y.describe()}")
    return x.shape, x.dtype


def no_gradient(grad: Tensor, out: Tensor, *srcs: Tensor, **attrs: Any) -> tuple[None, ...]:
    """The gradient of an operation whose derivative is 0 wherever it has one, whose result is an integer or a bool, or
    whose sources have no gradients."""
    return (None,) * len(srcs)


def composed(gradient: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`composite`, for the gradient of an operation with one operand that is made of several nodes."""
    return composite(gradient)


def elementwise(
    name: str,
    function: Callable[..., Any],
    formula: str,
    *,
    sources: int = 1,
    flops: int = 1,
    dtypes: str = FLOATS,
    values: str = "normal",
    measured: Sequence[str] = (),
    **facts: Any,
) -> OpDef:
    """Define an operation on elements of one shape and dtype, any source of which its output may overwrite.

    Args:
        function: of arrays in float64, or of integers as they are, and of the attributes by name.
        dtypes: names of the types of its operands.
        values: what they are filled with in conformance tests (`Example.values`).
        measured: names of the types in which profiles measure it over matrices.
        facts: further ones, as `OpDef` has them, and others for what is assumed here: ``infer``, ``inplace``,
            ``examples``.
    """

    @wraps(function)
    def reference(*arrays: Array, **attrs: Any) -> Array:
        return np.asarray(function(*map(wide, arrays), **attrs))

    given = {
        "infer": same,
        "inplace": tuple(range(sources)),
        "samples": over_rows(name, operands=sources, dtypes=measured) if measured else None,
        "examples": (Example(dtypes, values),),
        **facts,
    }
    flops_of = flops_per_element(flops)
    return OpDef(name, reference=reference, pointwise=True, sources=sources, flops=flops_of, formula=formula, **given)


def entered(op: OpDef, build: B, function: Callable[..., Any], *, public: bool = True) -> B:
    """Enter an operation into the table, with a builder that has the name and the docstring of ``function``.

    Args:
        public: whether other operations, too, find the builder in the definition.
    """
    build.__name__ = build.__qualname__ = op.name
    build.__doc__, build.__module__ = function.__doc__, function.__module__
    define_op(op).build = build if public else None
    return build


def unary(
    formula: str, *, operand: Callable[[str, Any], Tensor] = floating, only_floats: bool = False, **facts: Any
) -> Callable[[Callable[[Array], Any]], Unary]:
    """Decorator: declares an operation with one operand. The function computes it in NumPy (`elementwise`); its
    docstring is that of the builder, which takes its place.

    Args:
        operand: makes the source of the node of what the builder is given.
        only_floats: integers and bools, which the function would not change, are returned as they are.
        facts: as of `elementwise`.
    """

    def declare(function: Callable[[Array], Any]) -> Unary:
        op = elementwise(function.__name__, function, formula, **facts)

        def build(x: Any) -> Tensor:
            src = operand(op.name, x)
            return src if only_floats and not src.dtype.is_float else node(op, (src,), {})

        return entered(op, build, function)

    return declare


def binary(
    formula: str,
    *,
    operands: Callable[[str, Any, Any], tuple[Tensor, Tensor]] = pair,
    number: Callable[[Tensor, Number], Tensor] | None = None,
    public: bool = True,
    **facts: Any,
) -> Callable[[Callable[[Array, Array], Any]], Binary]:
    """Decorator: declares an operation with two operands, as `unary` does.

    Args:
        operands: makes the two sources of the node, of one shape and dtype.
        number: what is built of a float tensor and a bare number, in either order, instead.
        public: as of `entered`.
        facts: as of `elementwise`.
    """

    def declare(function: Callable[[Array, Array], Any]) -> Binary:
        op = elementwise(function.__name__, function, formula, sources=2, **facts)

        def build(a: Any, b: Any) -> Tensor:
            if number is not None and (met := float_and_number(a, b)) is not None:
                return number(*met)
            return node(op, operands(op.name, a, b), {})

        return entered(op, build, function, public=public)

    return declare
