"""Orders and running sums along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import BoundsError
from opweave.graph.dtypes import DType, i64
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef, build, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.indexing import take_along_axis
from opweave.ops.operands import Array, as_axis, as_flag, as_integer, builds, cast, unquantized, wide
from opweave.ops.samples import ROWS, measured, operand, over_rows

__all__ = ["argsort", "cumsum", "top_k"]


def _on_axis(op: str, value: Any, axis: Any) -> tuple[Tensor, int]:
    x = unquantized(op, value)
    return x, as_axis(op, axis, x)


# --- cumsum ---------------------------------------------------------------------------------------------------------

CUMSUM = OpDef(
    "cumsum",
    infer=lambda x, *, axis: (x.shape, x.dtype),
    reference=lambda x, *, axis: np.cumsum(wide(x), axis),
    flops=flops_per_element(1),
    formula="y[i] = Σ x[j] over j ≤ i along axis",
    samples=over_rows("cumsum", -1),
)


@builds(CUMSUM)
def cumsum(x: Any, axis: int = -1) -> Tensor:
    """The running sum along ``axis``, each element included in its own.

    Integers and bools add up in i64 and return it; half types are summed in f32 or wider and rounded once.

    Raises:
        BoundsError: no such axis.
        DTypeError: a quantized operand.
    """
    x, at = _on_axis("cumsum", x, axis)
    return node(CUMSUM, (x if x.dtype.is_float else cast(x, i64),), {"axis": at})


# --- orders ---------------------------------------------------------------------------------------------------------


def _order(x: Array, axis: int, descending: bool) -> Array:
    """Indices that sort ``x``; equals stay in order of their indices, NaN counts as the largest."""
    values = wide(x)
    if not descending:
        return np.argsort(values, axis, kind="stable")
    # Reversing an ascending order also reverses equal elements, so they are reversed before they are sorted.
    backwards = np.argsort(np.flip(values, axis), axis, kind="stable")
    result: Array = x.shape[axis] - 1 - np.flip(backwards, axis)
    return result


ARGSORT = OpDef(
    "argsort",
    infer=lambda x, *, axis, descending, stable: (x.shape, i64),
    reference=lambda x, *, axis, descending, stable: _order(x, axis, descending),
    index_out=True,
    flops=lambda out: out.size * out.srcs[0].shape[out.attrs["axis"]].bit_length(),
    formula="i with x[i[0]] ≤ x[i[1]] ≤ … along axis (≥ if descending)",
    runs_like="top_k",
)


@builds(ARGSORT)
def argsort(x: Any, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices, as i64, that sort ``x`` along ``axis``: ``take_along_axis(x, argsort(x), -1)`` is sorted.

    Of equal elements the one of the lower index comes first, also where descending, on every device. 0 and -0 are
    equal, and so are all NaN, which count as the largest, as in NumPy and torch.

    Args:
        x: at least one axis.
        axis: along which to sort.
        descending: the largest first.
        stable: ``False`` allows equal elements in any order, another one on each device, which may be faster.

    Raises:
        BoundsError: no such axis.
        DTypeError: a quantized operand.
    """
    x, at = _on_axis("argsort", x, axis)
    flags = {"descending": as_flag("argsort", "descending", descending), "stable": as_flag("argsort", "stable", stable)}
    return node(ARGSORT, (x,), {"axis": at, **flags})


def _top_k_infer(x: Tensor, *, k: int, axis: int) -> tuple[Shape, DType]:
    n = x.shape[axis]
    if not 0 <= k <= n:
        raise BoundsError(f"top_k: k = {k} is outside of 0 .. {n}, axis {axis} of the operand {x.describe()}")
    return (*x.shape[:axis], k, *x.shape[axis + 1 :]), i64


TOP_K = OpDef(
    "top_k",
    infer=_top_k_infer,
    reference=lambda x, *, k, axis: np.take(_order(x, axis, True), range(k), axis),
    index_out=True,
    flops=lambda out: out.srcs[0].size,
    formula="the first k of a stable descending argsort along axis",
    runs_like="cumsum",
    samples=measured(lambda: [build("top_k", operand(*s), 2)[1] for s in ROWS]),
)


@builds(TOP_K)
def top_k(x: Any, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The ``k`` largest elements along ``axis``, the largest first, and where they are.

    Among equals the lower index comes first, on every device: 0 and -0 are equal, and so are all NaN, which count as
    the largest. Two nodes: ``top_k`` finds the indices, and
    `take_along_axis` picks the values.

    Args:
        x: at least one axis.
        k: 0 .. length of the axis.
        axis: along which to choose.

    Returns:
        Values, of the dtype of ``x``, and indices, i64; both of the shape of ``x`` but for ``k`` along ``axis``.

    Raises:
        BoundsError: no such axis, or ``k`` is not within its length.
        DTypeError: a quantized operand.
        ShapeError: ``k`` is no integer.
    """
    x, at = _on_axis("top_k", x, axis)
    indices = node(TOP_K, (x,), {"k": as_integer("top_k", "k", k), "axis": at})
    return take_along_axis(x, indices, at), indices
