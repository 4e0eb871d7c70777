"""Products of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from opweave.errors import ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType, f32
from opweave.graph.layout import Shape, broadcast_shapes, is_dense, reshape_strides
from opweave.graph.opdef import OpDef, Sample, build
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.elementwise import add, mul
from opweave.ops.movement import expand_dims, reshape, swapaxes, transpose
from opweave.ops.operands import (
    Array,
    broadcast_to,
    builds,
    cast,
    check_shape_of,
    make,
    misfit,
    no_bools,
    plain,
    promoted,
    rows,
    shows_columns_of_blocks,
    wide,
    wide_weights,
)
from opweave.ops.samples import measured, operand, weight

__all__ = ["linear", "matmul", "outer"]


def _matmul_infer(a: Tensor, b: Tensor) -> tuple[Shape, DType]:
    if a.ndim < 2 or b.ndim < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2] or a.dtype is not b.dtype:
        raise misfit("matmul", "(..., m, k) and (..., k, n) of one dtype, the leading axes equal", a, b)
    return (*a.shape[:-1], b.shape[-1]), a.dtype


MATMUL = OpDef(
    "matmul",
    infer=_matmul_infer,
    reference=lambda a, b: np.matmul(wide(a), wide(b)),
    flops=lambda out: 2 * out.size * out.srcs[0].shape[-1],
    formula="c[m, n] = Σₖ a[m, k] · b[k, n]",
    product=True,
    slack=4.0,
    runs_like="linear",
    samples=measured(
        lambda: [build("matmul", operand(1, n), operand(n, n)) for n in (32, 256, 1024)],
        lambda: [
            build("matmul", operand(b, m, n), operand(b, n, m)) for b, m, n in ((2, 8, 16), (8, 64, 64), (8, 256, 64))
        ],
    ),
)


@builds(MATMUL)
def matmul(a: Any, b: Any) -> Tensor:
    """The matrix product of the last two axes, leading axes broadcast: NumPy's ``matmul``, vectors included.

    ``matmul(x, w.T)`` with a packed matrix ``w`` becomes ``linear(x, w)``, the form that devices are fast at and the
    only one in which quantized weights multiply. The nodes themselves are simpler than the function: both operands of
    one dtype, with at least two axes, the leading ones equal (broadcast with stride 0).

    Raises:
        ShapeError: inner lengths differ, leading axes do not broadcast, or an operand has no axes.
        DTypeError: a quantized operand other than ``w.T``, or two bool ones.
    """
    x = make("matmul", a)
    y = make("matmul", b)
    if not x.ndim or not y.ndim:
        raise ShapeError(f"matmul: a number is no matrix, multiply with *; got {x.describe()} and {y.describe()}")
    if x.shape[-1] != y.shape[-2 if y.ndim > 1 else -1]:
        which = "second last" if y.ndim > 1 else "only"
        raise ShapeError(
            f"matmul: the last axis of the left operand must be as long as the {which} axis of the right one; "
            f"got {x.describe()} and {y.describe()}"
        )
    if _is_transposed_matrix(y):
        return linear(x, transpose(y))
    x, y = promoted("matmul", x, y)
    no_bools("matmul", x, y)
    if x.ndim == 1:
        result = matmul(reshape(x, (1, -1)), y)
        return reshape(result, (*result.shape[:-2], *result.shape[-1:])) if y.ndim > 1 else reshape(result, ())
    if y.ndim == 1:
        result = matmul(x, reshape(y, (-1, 1)))
        return reshape(result, result.shape[:-1])
    if x.ndim > 2 and y.ndim == 2:
        # One large product instead of many small ones, where the rows of x follow each other evenly.
        merged = (prod(x.shape[:-1]), x.shape[-1])
        if reshape_strides(x.shape, x.strides, merged, x.dtype) is not None:
            return reshape(node(MATMUL, (reshape(x, merged), y), {}), (*x.shape[:-1], y.shape[-1]))
    if x.shape[:-2] != y.shape[:-2]:
        try:
            batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
        except ShapeError as error:
            raise ShapeError(f"matmul: leading axes: {error}; got {x.describe()} and {y.describe()}") from None
        x, y = broadcast_to(x, (*batch, *x.shape[-2:])), broadcast_to(y, (*batch, *y.shape[-2:]))
    return node(MATMUL, (x, y), {})


def _is_transposed_matrix(y: Tensor) -> bool:
    """Whether ``y`` shows a packed matrix with its two axes exchanged."""
    if y.ndim != 2 or y.op is None or y.op.name != "transpose":
        return False
    return shows_columns_of_blocks(y) or (not y.is_dense and is_dense(y.shape[::-1], y.strides[::-1], y.dtype))


def _linear_infer(x: Tensor, w: Tensor, b: Tensor | None = None, *, blocks: DType | None = None) -> tuple[Shape, DType]:
    if w.ndim != 2 or x.ndim < 2 or x.shape[-1] != w.shape[1]:
        raise misfit("linear", "x (..., in) and w (out, in)", x, w)
    check_shape_of("linear", "the bias", b, w.shape[:1], "one number a row of w")
    return (*x.shape[:-1], w.shape[0]), x.dtype


def _linear(x: Array, w: Array, b: Array | None = None, *, blocks: DType | None = None) -> Array:
    result: Array = np.matmul(wide(x), wide_weights(w, blocks).T)
    return result if b is None else result + wide(b)


def _linear_samples() -> Iterator[Sample]:
    """One row and many, for weights of all sorts."""
    for dtype in ("f32", "f64", "f16", "bf16", "q8_0", "q4_0", "q4_k"):
        x = dtype if dtype in ("f64", "f16", "bf16") else "f32"
        wide = dtype == "q4_k"  # in blocks of 256
        vectors = ((256, 256), (1024, 1024)) if wide else ((32, 32), (256, 256), (1024, 1024))
        squares = ((8, 256), (32, 512)) if wide else ((8, 64), (32, 256), (256, 512))

        def products(sizes: Sequence[tuple[int, int]], one_row: bool, x: str = x, dtype: str = dtype) -> list[Tensor]:
            return [
                linear(operand(1 if one_row else m, n, dtype=x), weight(m if one_row else n, n, dtype=dtype))
                for m, n in sizes
            ]

        yield Sample(dtype, partial(products, vectors, True), partial(products, squares, False))


LINEAR = OpDef(
    "linear",
    infer=_linear_infer,
    reference=_linear,
    flops=lambda out: 2 * out.size * out.srcs[0].shape[-1],
    formula="y[..., o] = Σᵢ x[..., i] · w[o, i] + b[o]",
    product=True,
    slack=4.0,
    samples=_linear_samples,
)


@builds(LINEAR)
def linear(x: Any, w: Any, b: Any = None) -> Tensor:
    """``x @ w.T + b``: the product with weights as checkpoints store them.

    Args:
        x: shape (..., in).
        w: shape (out, in). A plain one is promoted with ``x``. Beside a quantized one ``x`` keeps its float dtype, and
            integers become f32. Of shape (..., out, in) it is a batch of matrices, whose leading axes broadcast with
            those before the last two of ``x``, as in `matmul`.
        b: shape (out,), or ``None``; beside a quantized ``w`` it takes the dtype of ``x``.

    Nodes have an ``x`` of at least two axes. Those with a quantized ``w`` carry its type as the attribute ``blocks``;
    the others have no attributes. A batch becomes ``matmul``, a quantized one ``expert_linear``, which sends each row
    to its matrix.

    Returns:
        Shape (..., out).

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: quantized ``x`` or ``b``, only bool operands.
        LayoutError: ``w`` is the transpose of a quantized matrix.
    """
    x, w = make("linear", x), make("linear", w)
    rows("linear", x, w)
    if x.ndim == 1:
        result = linear(reshape(x, (1, -1)), w, b)
        return reshape(result, (*result.shape[:-2], *result.shape[-1:]))
    biases = () if b is None else (make("linear", b),)
    if w.ndim > 2:
        return _linear_of_batch(x, w, *biases)
    return node(LINEAR, *with_weights("linear", x, w, *biases))


def with_weights(op: str, x: Tensor, w: Tensor, *biases: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Sources and attributes of a product with weights: all of one dtype; or ``w`` quantized, with its dtype as the
    attribute ``blocks``, and the others of one float type.

    Raises:
        DTypeError: another quantized operand, only bool operands.
        LayoutError: ``w`` is the transpose of a quantized matrix.
    """
    rows(op, w)
    plain(op, x, *biases)
    if w.dtype.is_quantized:
        x = x if x.dtype.is_float else cast(x, f32)
        return (x, w, *[cast(bias, x.dtype) for bias in biases]), {"blocks": w.dtype}
    srcs = promoted(op, x, w, *biases)
    no_bools(op, *srcs)
    return srcs, {}


def _linear_of_batch(x: Tensor, w: Tensor, *biases: Tensor) -> Tensor:
    """`linear` of an ``x`` of at least two axes with a batch of matrices."""
    *lead, outputs, inputs = w.shape
    if x.shape[-1] != inputs or any(b.shape != (outputs,) for b in biases):
        raise misfit("linear", "x (..., in), w (..., out, in) and b (out,)", x, w, *biases)
    try:
        batch = broadcast_shapes(x.shape[:-2], tuple(lead))
    except ShapeError as error:
        raise ShapeError(f"linear: leading axes: {error}; got {x.describe()} and {w.describe()}") from None
    (x, w, *biases_alike), _ = with_weights("linear", x, w, *biases)
    if w.dtype.is_quantized:
        count, each = prod(lead), x.shape[-2]
        # The number of the matrix for each row.
        ids = np.broadcast_to(np.arange(count, dtype=np.int32).reshape(*lead, 1), (*batch, each)).reshape(-1, 1)
        flat = reshape(broadcast_to(x, (*batch, each, inputs)), (len(ids), inputs))
        matrices = reshape(w, (count, outputs, inputs))
        result = opdef.build("expert_linear", flat, matrices, constant(ids, name="matrix"))
        result = reshape(result, (*batch, each, outputs))
    else:
        result = matmul(x, swapaxes(w, -1, -2))
    return add(result, biases_alike[0]) if biases_alike else result


def outer(a: Any, b: Any) -> Tensor:
    """All products of an element of ``a`` and one of ``b``: ``a[:, None] * b``, which is the node that it makes.

    Args:
        a: shape (m,).
        b: shape (n,), promoted with ``a``.

    Returns:
        Shape (m, n).

    Raises:
        ShapeError: an operand that is no vector.
        DTypeError: quantized or two bool operands.
    """
    x, y = make("outer", a), make("outer", b)
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeError(f"outer: needs two vectors, flatten what is none; got {x.describe()} and {y.describe()}")
    plain("outer", x, y)
    return mul(expand_dims(x, 1), y)
