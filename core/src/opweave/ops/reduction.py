"""Reductions over axes, and counting. The nodes drop the reduced axes; ``keepdims`` is a view of the result."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import numpy as np

from opweave.errors import OpweaveError, ShapeError
from opweave.graph.dtypes import DType, f32, i64
from opweave.graph.layout import Shape, normalize_axes
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave.ops.movement import reshape
from opweave.ops.operands import Array, as_axis, as_flag, as_number, builds, cast, explain, pair, unquantized, wide
from opweave.ops.pointwise import entered
from opweave.ops.samples import over_rows

__all__ = ["argmax", "count_equal", "max", "mean", "min", "prod", "sum", "var"]

Axes = int | Sequence[int] | None


class Reduction(Protocol):
    """The builder of an operation that drops axes."""

    __name__: str

    def __call__(self, x: Any, axis: Axes = None, keepdims: bool = False) -> Tensor: ...


def _reduced(x: Tensor, *, axes: tuple[int, ...], **attrs: Any) -> tuple[Shape, DType]:
    return tuple([n for i, n in enumerate(x.shape) if i not in axes]), x.dtype


def _define(name: str, function: Callable[..., Any], formula: str, *, flops: int = 1, **facts: Any) -> OpDef:
    """The definition of an operation that drops ``axes``.

    Args:
        function: of an array in float64 or of integers as they are, of ``axes`` and of the other attributes.
        flops: floating-point operations for each element of the source.
        facts: further ones, as `OpDef` has them, and others for what is assumed here: ``infer``, ``slack``.
    """

    @wraps(function)
    def reference(x: Array, **attrs: Any) -> Any:
        return function(wide(x), **attrs)

    given = {"infer": _reduced, "slack": 2.0, **facts}
    return OpDef(name, reference=reference, flops=lambda out: flops * out.srcs[0].size, formula=formula, **given)


def _reduction(
    formula: str, integers: DType | None = None, **facts: Any
) -> Callable[[Callable[[Array, tuple[int, ...]], Any]], Reduction]:
    """Decorator: declares a reduction without further attributes, as `opweave.ops.pointwise.unary` does; integers are
    reduced in the dtype ``integers`` (``None``: in their own)."""

    def declare(function: Callable[[Array, tuple[int, ...]], Any]) -> Reduction:
        op = _define(function.__name__, function, formula, **facts)

        def build(x: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
            return _reduce(op, x, axis, keepdims, integers)

        return entered(op, build, function)

    return declare


def _count(x: Array | Tensor, axes: tuple[int, ...]) -> int:
    return math.prod([x.shape[a] for a in axes])


def _reduce(op: OpDef, value: Any, axis: Axes, keepdims: bool, integers: DType | None = None, **attrs: Any) -> Tensor:
    """The node, and a view of it; integers are reduced in the dtype ``integers`` (``None``: in their own)."""
    x = unquantized(op.name, value)
    try:
        axes = normalize_axes(tuple(axis) if isinstance(axis, list) else axis, x.ndim)  # type: ignore[arg-type]
    except OpweaveError as error:
        raise explain(error, op.name, x) from None
    except TypeError:
        raise ShapeError(
            f"{op.name}: axis is an integer, a tuple of them or None, not {axis!r}; the operand is {x.describe()}"
        ) from None
    kept = as_flag(op.name, "keepdims", keepdims)
    source = x if integers is None or x.dtype.is_float else cast(x, integers)
    result = node(op, (source,), {"axes": axes, **attrs}) if axes or op is VAR else source
    return reshape(result, tuple([1 if i in axes else n for i, n in enumerate(x.shape)])) if kept else result


@_reduction("Σ x over axes", i64, samples=over_rows("sum", -1))
def sum(x: Array, axes: tuple[int, ...]) -> Any:
    """The sum over one, several or (by default) all axes; 0 over no elements.

    Integers and bools add up in i64 and return it; f16 and bf16 accumulate in f32 and return their own type.

    Raises:
        BoundsError: no such axis.
        ShapeError: an axis named twice.
        DTypeError: a quantized operand.
    """
    return np.sum(x, axes)


@_reduction("Π x over axes", i64, runs_like="sum")
def prod(x: Array, axes: tuple[int, ...]) -> Any:
    """The product over one, several or (by default) all axes; 1 over no elements. Types and errors as `sum`."""
    return np.prod(x, axes)


@_reduction("Σ x / n over axes", f32, runs_like="sum")
def mean(x: Array, axes: tuple[int, ...]) -> Any:
    """The mean over one, several or (by default) all axes; NaN over no elements, f32 of integers. Raises `BoundsError`
    for an axis outside of those of ``x``, `ShapeError` for one named twice, `DTypeError` for a quantized operand."""
    # Not np.mean, which warns of empty operands; devices return NaN without a warning.
    return np.sum(x, axes) / np.float64(_count(x, axes))


def _var(x: Array, *, axes: tuple[int, ...], correction: float) -> Any:
    n = _count(x, axes)
    centered = x - np.sum(x, axes, keepdims=True) / np.float64(n)
    return np.sum(np.square(centered), axes) / np.float64(builtins.max(n - correction, 0.0))


VAR = _define("var", _var, "Σ (x − mean x)² / (n − correction) over axes", flops=4, runs_like="sum")


@builds(VAR)
def var(x: Any, axis: Axes = None, correction: float = 1.0, keepdims: bool = False) -> Tensor:
    """The variance over one, several or (by default) all axes; f32 of integers.

    Args:
        x: any shape.
        axis: as for `sum`.
        correction: subtracted from the number of elements n before dividing: 1 is Bessel's, the estimate from a sample
            (as in torch, other than in NumPy); 0 gives the variance of a whole population. Where n - correction is not
            positive the result is NaN, or infinite if the elements differ.
        keepdims: keep the axes, with length 1.

    Raises:
        BoundsError: no such axis.
        ShapeError: an axis named twice.
        DTypeError: a quantized operand, or a correction that is no number.
    """
    return _reduce(VAR, x, axis, keepdims, f32, correction=as_number("var", "correction", correction))


def _extreme_infer(name: str) -> Callable[..., tuple[Shape, DType]]:
    """The shape rule of ``max`` and ``min``."""

    def infer(x: Tensor, *, axes: tuple[int, ...]) -> tuple[Shape, DType]:
        if not _count(x, axes):
            raise ShapeError(
                f"{name}: of no elements there is none; axes {axes} of the operand {x.describe()} are empty"
            )
        return _reduced(x, axes=axes)

    return infer


@_reduction(
    "max x over axes", infer=_extreme_infer("max"), exact=True, slack=1.0, runs_like="sum", samples=over_rows("max", -1)
)
def max(x: Array, axes: tuple[int, ...]) -> Any:
    """The largest element over one, several or (by default) all axes; NaN if one of them is NaN.

    Raises:
        BoundsError: no such axis.
        ShapeError: an axis named twice, or one of length 0.
        DTypeError: a quantized operand.
    """
    return np.max(x, axes)


@_reduction("min x over axes", infer=_extreme_infer("min"), exact=True, slack=1.0, runs_like="max")
def min(x: Array, axes: tuple[int, ...]) -> Any:
    """The smallest element over one, several or (by default) all axes; NaN if one of them is NaN. Raises `BoundsError`
    for an axis outside of those of ``x``, `ShapeError` for one named twice or of length 0, `DTypeError` for a quantized
    operand."""
    return np.min(x, axes)


def _argmax_infer(x: Tensor, *, axis: int) -> tuple[Shape, DType]:
    if not x.shape[axis]:
        raise ShapeError(f"argmax: of no elements none is the largest; the operand is {x.describe()}")
    return (*x.shape[:axis], *x.shape[axis + 1 :]), i64


ARGMAX = OpDef(
    "argmax",
    infer=_argmax_infer,
    reference=lambda x, *, axis: np.argmax(wide(x), axis),
    index_out=True,
    flops=lambda out: out.srcs[0].size,
    formula="the lowest i with x[i] = max x along axis",
    runs_like="sum",
    samples=over_rows("argmax", -1),
)


@builds(ARGMAX)
def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The index, i64, of the largest element along ``axis``, by default in the flattened tensor.

    The lowest index among equals, on every device; NaN counts as the largest, as in NumPy.

    Raises:
        BoundsError: no such axis.
        ShapeError: it has length 0.
        DTypeError: a quantized operand.
    """
    x = unquantized("argmax", x)
    flat = x if axis is not None else reshape(x, (x.size,))
    at = as_axis("argmax", 0 if axis is None else axis, flat)
    result = node(ARGMAX, (flat,), {"axis": at})
    if not as_flag("argmax", "keepdims", keepdims):
        return result
    return reshape(result, (1,) * x.ndim if axis is None else (*x.shape[:at], 1, *x.shape[at + 1 :]))


def _count_equal_infer(a: Tensor, b: Tensor) -> tuple[Shape, DType]:
    if a.shape != b.shape or a.dtype is not b.dtype:
        raise ShapeError(f"count_equal: operands must have one shape and dtype: {a.describe()} and {b.describe()}")
    return (), i64


COUNT_EQUAL = OpDef(
    "count_equal",
    infer=_count_equal_infer,
    reference=lambda a, b: np.count_nonzero(wide(a) == wide(b)),
    index_out=True,
    flops=lambda out: out.srcs[0].size,
    formula="the number of places where a = b",
    runs_like="sum",
)


@builds(COUNT_EQUAL)
def count_equal(a: Any, b: Any) -> Tensor:
    """The number of places at which two tensors are equal, i64 of shape ().

    The operands are promoted and broadcast. NaN equals nothing.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand.
    """
    return node(COUNT_EQUAL, pair("count_equal", a, b), {})
