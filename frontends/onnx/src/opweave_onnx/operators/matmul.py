"""Products."""

from __future__ import annotations

import string
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.activation import activated
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.movement import with_axis_at
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

__all__ = ["integer_product", "product"]


@host_operation("matmul_integer")
def _matmul_integer(a: Array, b: Array) -> Array:
    """a · b of integers, which wraps around."""
    return np.asarray(np.matmul(a, b))


def product(a: Tensor, b: Tensor) -> Tensor:
    """NumPy's ``matmul``, of integers too."""
    if a.dtype.is_float:
        return ow.matmul(a, b)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ShapeError(f"{a.describe()} and {b.describe()} do not multiply")
    return _matmul_integer(a, b, shape=shape, dtype=a.dtype)


@operator("MatMul")
def _matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return product(a, b)


@operator("Gemm")
def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = ow.swapaxes(a, 0, 1) if call.get("transA", 0) else a
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if call.before(7) and c is not None and not call.get("broadcast", 0):
        wanted = (a.shape[0], b.shape[0 if call.get("transB", 0) else 1])
        if c.shape != wanted:
            raise ShapeError(f"C is {c.describe()}, not of {wanted}, and broadcast is 0, its default before version 7")
    if a.dtype.is_integer:
        result = product(a, ow.swapaxes(b, 0, 1) if call.get("transB", 0) else b)
        return result if c is None else result + c
    turned = bool(call.get("transB", 0))
    if alpha == 1.0 and (c is None or beta == 0.0):
        return ow.linear(a, b) if turned else ow.matmul(a, b)
    if turned and c is not None and c.shape == (b.shape[0],) and alpha == beta == 1.0:
        return ow.linear(a, b, c)
    return _scaled_product(a, b, None if beta == 0.0 else c, turned, alpha, beta)


@composite
def _scaled_product(a: Tensor, b: Tensor, c: Tensor | None, turned: bool, alpha: float, beta: float) -> Tensor:
    result = ow.linear(a, b) if turned else ow.matmul(a, b)
    result = result if alpha == 1.0 else result * alpha
    return result if c is None else result + (c if beta == 1.0 else c * beta)


@operator("FusedGemm", domain=MICROSOFT)
@composite
def _fused_gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    params = [f"activation_{name}" for name in ("alpha", "beta", "gamma")]
    given = tuple([call.get(name, 0.0) for name in params if call.has(name)])
    return activated(call, _gemm(call, a, b, c), given)


@operator("FusedMatMul", domain=MICROSOFT)
def _fused_matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    a = with_axis_at(a, 0, -2) if call.get("transBatchA", 0) else a
    b = with_axis_at(b, 0, -2) if call.get("transBatchB", 0) else b
    a = ow.swapaxes(a, -1, -2) if call.get("transA", 0) and a.ndim > 1 else a
    b = ow.swapaxes(b, -1, -2) if call.get("transB", 0) and b.ndim > 1 else b
    alpha = call.get("alpha", 1.0)
    return ow.matmul(a, b) if alpha == 1.0 else _scaled_product(a, b, None, False, alpha, 1.0)


# --- sums over named axes -------------------------------------------------------------------------------------------


@operator("Einsum")
def _einsum(call: Call, *inputs: Tensor) -> Tensor:
    return (composite(einsum) if len(inputs) > 2 else einsum)(call.get("equation", ""), inputs)


def einsum(equation: str, inputs: Any) -> Tensor:
    """NumPy's ``einsum``, built from transposes and products.

    Raises:
        ShapeError: an equation that does not fit.
    """
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(inputs):
        raise ShapeError(f"the equation {equation!r} has {len(terms)} terms for {len(inputs)} operands")
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in equation]
    extra = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, inputs, strict=True)]
    dots = "".join(free[: max([n for t, n in zip(terms, extra, strict=True) if "..." in t], default=0)])
    terms = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, extra, strict=True)]
    if not arrow:
        letters = "".join(terms)
        right = ("..." if dots else "") + "".join(sorted(c for c in set(letters) - set(dots) if letters.count(c) == 1))
    right = right.replace("...", dots)
    result, have = _unrepeated(inputs[0], terms[0])
    for position, (term, operand) in enumerate(zip(terms[1:], inputs[1:], strict=True), 1):
        y, other = _unrepeated(operand, term)
        later = set("".join(terms[position + 1 :])) | set(right)
        result, have = _contracted(result, have, y, other, later)
    gone = tuple([i for i, c in enumerate(have) if c not in right])
    if gone:
        dtype = result.dtype
        result, have = ow.sum(result, gone).astype(dtype), "".join(c for c in have if c in right)
    return ow.transpose(result, [have.index(c) for c in right])


def _unrepeated(x: Tensor, term: str) -> tuple[Tensor, str]:
    """An operand and its term with each letter once: the diagonal of axes that have the same letter."""
    if len(term) != x.ndim:
        raise ShapeError(f"the term {term!r} does not name the axes of {x.describe()}")
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            i = term.index(letter)
            j = term.index(letter, i + 1)
            x = ow.diagonal(x, 0, i, j)
            term = term[:i] + term[i + 1 : j] + term[j + 1 :] + letter
    return x, term


def _contracted(a: Tensor, left: str, b: Tensor, right: str, later: set[str]) -> tuple[Tensor, str]:
    """The product of two operands, summed over the axes that nothing later names."""
    for x, own, other in ((a, left, right), (b, right, left)):  # axes of one operand only
        alone = tuple([i for i, c in enumerate(own) if c not in other and c not in later])
        if alone:
            reduced, kept = ow.sum(x, alone).astype(x.dtype), "".join(c for c in own if c in other or c in later)
            a, left, b, right = (reduced, kept, b, right) if own is left and x is a else (a, left, reduced, kept)
    batch = [c for c in left if c in right and c in later]
    inner = [c for c in left if c in right and c not in later]
    rows = [c for c in left if c not in right]
    columns = [c for c in right if c not in left]
    sizes = dict(zip(left, a.shape, strict=True)) | {
        c: n for c, n in zip(right, b.shape, strict=True) if n != 1 or c not in left
    }
    lengths = [int(np.prod([sizes[c] for c in part], dtype=np.int64)) for part in (batch, rows, inner, columns)]
    x = ow.transpose(_spread(a, left, sizes), [left.index(c) for c in batch + rows + inner])
    y = ow.transpose(_spread(b, right, sizes), [right.index(c) for c in batch + inner + columns])
    x, y = ow.reshape(x, (lengths[0], lengths[1], lengths[2])), ow.reshape(y, (lengths[0], lengths[2], lengths[3]))
    result = product(x, y) if inner else x * y
    letters = batch + rows + columns
    return ow.reshape(result, [sizes[c] for c in letters]), "".join(letters)


def _spread(x: Tensor, term: str, sizes: Any) -> Tensor:
    """Axes of length 1 broadcast to what the other operand has."""
    return ow.broadcast_to(x, [sizes[c] for c in term])


# --- integers with zero points --------------------------------------------------------------------------------------


EXACT: Final = 1 << 24
"""f32 represents every integer up to this number, so sums that do not exceed it are exact in any order."""


def integer_product(call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    """The product of integers of 8 bits or less, i32, each minus its zero point: one number, or one for each row of
    ``a`` or column of ``b``.

    It is computed exactly in f32, in parts of the inner axis that are so short that no sum exceeds `EXACT`.
    """
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ShapeError(f"{a.describe()} and {b.describe()} do not multiply")
    if a_zero is not None:
        a_zero = ow.expand_dims(a_zero, -1) if a_zero.ndim and a_zero.size > 1 else ow.reshape(a_zero, ())
    if b_zero is not None and b_zero.size == 1:
        b_zero = ow.reshape(b_zero, ())
    (x, largest), (y, most) = _moved(call, a, a_zero), _moved(call, b, b_zero)
    at_once, length = max(EXACT // max(largest * most, 1), 1), a.shape[-1]
    total: Any = None
    for first in range(0, length, at_once):
        some = slice(first, first + at_once)
        rows = y[..., some, :] if y.ndim > 1 else y[some]
        part = ow.matmul(x[..., some], rows).astype("i32")
        total = part if total is None else total + part
    assert total is not None
    return total  # type: ignore[no-any-return]


def _moved(call: Call, x: Tensor, zero: Tensor | None) -> tuple[Tensor, int]:
    """Integers minus their zero points as f32, and the largest magnitude that they can have. For known integers the
    difference is computed once for a model."""
    array = call.trace.session.array
    known, shift = array(x), None if zero is None else array(zero.root)
    if known is not None and (zero is None or shift is not None):
        less = np.zeros((), np.int32) if zero is None or shift is None else shift.astype(np.int32).reshape(zero.shape)
        values = known.astype(np.int32) - less
        largest = int(np.abs(values).max(initial=0))
        key = less.shape, less.tobytes()
        return call.trace.session.derived(x, key, lambda: values.astype(np.float32)), largest
    limits = np.iinfo(x.dtype.numpy)
    if zero is None:
        return x.astype("f32"), max(-limits.min, limits.max)
    least, most = (limits.min, limits.max) if shift is None else (int(shift.min()), int(shift.max()))
    return x.astype("f32") - zero.astype("f32"), max(limits.max - least, most - limits.min)


@operator("MatMulInteger")
def _matmul_integers(
    call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    return integer_product(call, a, b, a_zero, b_zero)
