"""Linear algebra beyond products: the Hadamard transform, triangular systems, doubly stochastic matrices."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import (
    Array,
    as_flag,
    as_integer,
    as_number,
    broadcast_to,
    builds,
    floating,
    floats,
    misfit,
    wide,
)

__all__ = ["hadamard_transform", "sinkhorn", "solve_triangular"]

# --- Hadamard transform ---------------------------------------------------------------------------------------------


def hadamard_matrix(n: int) -> Array:
    """Sylvester's Hadamard matrix, shape (n, n): entry (i, j) is −1 where i & j has an odd number of bits."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def hadamard_factors(n: int) -> tuple[int, int]:
    """Two nearly equal powers of two whose product is ``n``. The matrix of ``n`` is the Kronecker product of their two,
    so that a row of ``n``, as a matrix of this shape, is transformed by two small products."""
    outer = 1 << (n.bit_length() - 1) // 2
    return outer, n // outer


def _hadamard_infer(x: Tensor, *, scale: float) -> tuple[Shape, DType]:
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        raise ShapeError(f"hadamard_transform: the last axis must be a power of two long, not {x.describe()}")
    return x.shape, x.dtype


def _hadamard(x: Array, *, scale: float) -> Array:
    return wide(x) @ hadamard_matrix(x.shape[-1]) * scale


HADAMARD_TRANSFORM: Final = OpDef(
    "hadamard_transform",
    infer=_hadamard_infer,
    reference=_hadamard,
    flops=lambda out: out.size * max(1, out.shape[-1].bit_length() - 1),
    formula="yᵢ = scale · Σⱼ (−1)^popcount(i & j) xⱼ",
    slack=4.0,
)


@builds(HADAMARD_TRANSFORM)
def hadamard_transform(x: Any, scale: float = 1.0) -> Tensor:
    """The Walsh–Hadamard transform of the last axis, in natural (Sylvester's) order, times ``scale``.

    With scale 1 / √n it is its own inverse. Models use it to spread outliers before activations are quantized.
    Integers become f32.

    Args:
        x: shape (..., n), n a power of two.
        scale: multiplies the result.

    Raises:
        ShapeError: another length.
        DTypeError: a quantized operand, a scale that is no number.
    """
    y = floating("hadamard_transform", x)
    return node(HADAMARD_TRANSFORM, (y,), {"scale": as_number("hadamard_transform", "scale", scale)})


# --- triangular systems ---------------------------------------------------------------------------------------------


def _solve_infer(a: Tensor, b: Tensor, *, upper: bool, unitriangular: bool) -> tuple[Shape, DType]:
    _check_system(a, b)
    if a.shape[:-2] != b.shape[:-2]:
        raise ShapeError(f"solve_triangular: the leading axes of {a.describe()} and {b.describe()} differ")
    return b.shape, b.dtype


def _check_system(a: Tensor, b: Tensor) -> None:
    """Raises `ShapeError` unless A is square and has as many rows as b."""
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] != b.shape[-2]:
        raise misfit("solve_triangular", "A (..., n, n) and b (..., n, columns)", a, b)


def _solve(a: Array, b: Array, *, upper: bool, unitriangular: bool) -> Array:
    a, x = wide(a), np.array(wide(b))
    n = a.shape[-1]
    for i in range(n - 1, -1, -1) if upper else range(n):
        known = slice(i + 1, n) if upper else slice(0, i)
        x[..., i, :] -= (a[..., i, known, None] * x[..., known, :]).sum(-2)
        if not unitriangular:
            x[..., i, :] /= a[..., i, i, None]
    return x


SOLVE_TRIANGULAR: Final = OpDef(
    "solve_triangular",
    infer=_solve_infer,
    reference=_solve,
    inplace=(1,),
    flops=lambda out: out.size * out.shape[-2],
    formula="x with A x = b, row by row: xᵢ = (bᵢ − Σ aᵢⱼ xⱼ) / aᵢᵢ over the j before i (behind i for upper)",
    slack=16.0,
)


@builds(SOLVE_TRIANGULAR)
def solve_triangular(a: Any, b: Any, *, upper: bool = False, unitriangular: bool = False) -> Tensor:
    """The solution x of A · x = b for triangular A, by substitution; as `torch.linalg.solve_triangular`.

    Operands are promoted to one float dtype; leading axes are broadcast. A zero on the diagonal gives infinities or
    NaN.

    Args:
        a: shape (..., n, n); the other triangle is not read.
        b: shape (..., n, columns).
        upper: A is upper triangular instead of lower.
        unitriangular: the diagonal is taken as 1, and not read.

    Returns:
        Shape (..., n, columns).

    Raises:
        ShapeError: A that is not square, or does not fit to ``b``.
        DTypeError: a quantized operand.
    """
    op = "solve_triangular"
    m, x = floats(op, a, b)
    _check_system(m, x)
    try:
        lead = np.broadcast_shapes(m.shape[:-2], x.shape[:-2])
    except ValueError:
        raise ShapeError(f"{op}: the leading axes of {m.describe()} and {x.describe()} do not broadcast") from None
    attrs = {"upper": as_flag(op, "upper", upper), "unitriangular": as_flag(op, "unitriangular", unitriangular)}
    srcs = (broadcast_to(m, (*lead, *m.shape[-2:])), broadcast_to(x, (*lead, *x.shape[-2:])))
    return node(SOLVE_TRIANGULAR, srcs, attrs)


# --- doubly stochastic matrices -------------------------------------------------------------------------------------


def _sinkhorn_infer(x: Tensor, *, iterations: int, eps: float) -> tuple[Shape, DType]:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or not x.shape[-1]:
        raise misfit("sinkhorn", "square matrices (..., n, n)", x)
    return x.shape, x.dtype


def _sinkhorn(x: Array, *, iterations: int, eps: float) -> Array:
    m: Array = np.exp(wide(x) - wide(x).max(-1, keepdims=True))
    m = m / m.sum(-1, keepdims=True) + eps
    m = m / (m.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdims=True) + eps)
        m = m / (m.sum(-2, keepdims=True) + eps)
    return m


SINKHORN: Final = OpDef(
    "sinkhorn",
    infer=_sinkhorn_infer,
    reference=_sinkhorn,
    flops=flops_per_element(40),
    formula="softmax of the rows, plus ε; then columns and rows in turn are divided by their sum plus ε, columns last",
    slack=4.0,
)


@builds(SINKHORN)
def sinkhorn(x: Any, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Matrices of logits as nearly doubly stochastic ones: rows and columns that sum to 1.

    Sinkhorn and Knopp, "Concerning Nonnegative Matrices and Doubly Stochastic Matrices", 1967, begun by a softmax of
    the rows, as hyper-connections mix their streams: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025,
    equation 9. Integers become f32.

    Args:
        x: shape (..., n, n).
        iterations: how often the columns are normalised, at least 1; rows once less, after the softmax.
        eps: added after the softmax, and to every sum.

    Raises:
        ShapeError: matrices that are not square or have no rows; ``iterations`` is no integer.
        DTypeError: a quantized operand, less than one iteration, an ``eps`` that is no number.
    """
    y = floating("sinkhorn", x)
    count, small = as_integer("sinkhorn", "iterations", iterations), as_number("sinkhorn", "eps", eps)
    if count < 1:
        raise DTypeError(f"sinkhorn: iterations is at least 1, not {count}")
    return node(SINKHORN, (y,), {"iterations": count, "eps": small})
