"""Arithmetic element by element, elementary functions, and conversion between types.

Operands of binary operations are promoted to one dtype and broadcast as views, so a kernel always gets operands of
exactly the output's dtype and shape (with stride 0 where broadcast). Half types are computed in f32, and the result is
rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType, DTypeLike, as_dtype
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef, flops_per_element
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.operands import (
    Array,
    as_number,
    builds,
    float_and_number,
    float_pair,
    floating,
    is_number,
    make,
    no_bools,
    pair,
    plain,
    unquantized,
    wide,
)
from opweave.ops.samples import over_rows

__all__ = [
    "abs", "add", "cast", "cos", "div", "exp", "expm1", "log", "log1p", "mul", "neg", "pow", "reciprocal", "rsqrt",
    "scale", "sign", "sin", "sqrt", "square", "sub", "tanh",
]  # fmt: skip


def same(x: Tensor, *others: Tensor, **attrs: Any) -> tuple[Shape, DType]:
    """The shape rule of elementwise operations: all operands, and the output, have one shape and dtype."""
    for y in others:
        if y.shape != x.shape or y.dtype is not x.dtype:
            raise ShapeError(f"operands must have one shape and dtype: {x.describe()} and {y.describe()}")
    return x.shape, x.dtype


def elementwise(
    name: str, reference: Callable[..., Array], formula: str, *, sources: int = 1, flops: int = 1, **facts: Any
) -> OpDef:
    """Define an operation on elements of one shape and dtype, any source of which its output may overwrite.

    Args:
        facts: further ones, as `OpDef` has them.
    """
    return OpDef(
        name,
        infer=same,
        reference=reference,
        inplace=tuple(range(sources)),
        pointwise=True,
        flops=flops_per_element(flops),
        formula=formula,
        **facts,
    )


def _signed(op: OpDef, value: Any) -> Tensor:
    """The node of a unary operation for every plain type but bool."""
    x = unquantized(op.name, value)
    no_bools(op.name, x)
    return node(op, (x,), {})


def _arithmetic(op: OpDef, a: Any, b: Any) -> Tensor:
    srcs = pair(op.name, a, b)
    no_bools(op.name, *srcs)
    return node(op, srcs, {})


# --- arithmetic -----------------------------------------------------------------------------------------------------

ADD = elementwise(
    "add",
    lambda a, b: np.add(wide(a), wide(b)),
    "a + b",
    sources=2,
    samples=over_rows("add", operands=2, dtypes=("f32", "f64", "f16", "bf16", "i32")),
)


@builds(ADD)
def add(a: Any, b: Any) -> Tensor:
    """``a + b``, broadcast and promoted; integers wrap around. A float tensor and a Python number become `scale`.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: quantized or two bool operands, or an integer that the dtype of the other operand does not hold.
    """
    if (met := float_and_number(a, b)) is not None:
        return scale(met[0], 1.0, met[1])
    return _arithmetic(ADD, a, b)


SUB = elementwise("sub", lambda a, b: np.subtract(wide(a), wide(b)), "a - b", sources=2)


@builds(SUB)
def sub(a: Any, b: Any) -> Tensor:
    """``a - b``, broadcast and promoted; integers wrap around. Otherwise as `add`."""
    if isinstance(a, Tensor) and is_number(b) and a.dtype.is_float:
        return scale(a, 1.0, -as_number("sub", "a scalar", b))
    if isinstance(b, Tensor) and is_number(a) and b.dtype.is_float:
        return scale(b, -1.0, a)
    return _arithmetic(SUB, a, b)


MUL = elementwise("mul", lambda a, b: np.multiply(wide(a), wide(b)), "a · b", sources=2)


@builds(MUL)
def mul(a: Any, b: Any) -> Tensor:
    """``a * b``, broadcast and promoted; integers wrap around. Otherwise as `add`."""
    if (met := float_and_number(a, b)) is not None:
        return scale(*met)
    return _arithmetic(MUL, a, b)


DIV = elementwise(
    "div", lambda a, b: np.divide(wide(a), wide(b)), "a / b", sources=2, samples=over_rows("div", operands=2)
)


@builds(DIV)
def div(a: Any, b: Any) -> Tensor:
    """``a / b``, broadcast and promoted; of integers in f32. Raises `ShapeError` for shapes that do not broadcast,
    `DTypeError` for quantized operands."""
    return node(DIV, float_pair("div", a, b), {})


NEG = elementwise("neg", lambda x: np.negative(wide(x)), "-x", exact=True)


@builds(NEG)
def neg(x: Any) -> Tensor:
    """``-x``; integers wrap around.

    Raises:
        DTypeError: a quantized or bool operand.
    """
    return _signed(NEG, x)


ABS = elementwise("abs", lambda x: np.absolute(wide(x)), "|x|", exact=True)


@builds(ABS)
def abs(x: Any) -> Tensor:
    """``|x|``; the smallest integer of a signed type stays as it is, as the type does not hold its opposite. Raises
    `DTypeError` for a quantized or bool operand."""
    return _signed(ABS, x)


SIGN = elementwise("sign", lambda x: np.sign(wide(x)), "-1, 0 or 1, as x < 0, x = 0 or x > 0", exact=True)


@builds(SIGN)
def sign(x: Any) -> Tensor:
    """-1, 0 or 1 with the sign of ``x``; NaN stays NaN. Raises `DTypeError` for a quantized or bool operand."""
    return _signed(SIGN, x)


SQUARE = elementwise("square", lambda x: np.square(wide(x)), "x²")


@builds(SQUARE)
def square(x: Any) -> Tensor:
    """``x * x``; integers wrap around. Raises `DTypeError` for a quantized or bool operand."""
    return _signed(SQUARE, x)


SCALE = elementwise("scale", lambda x, *, scale, bias: wide(x) * scale + bias, "scale · x + bias", flops=2)


@builds(SCALE)
def scale(x: Any, scale: float, bias: float = 0.0) -> Tensor:
    """``scale * x + bias`` with two numbers, in one pass; integers become f32.

    Raises:
        DTypeError: a quantized operand, or a scale or bias that is no number.
    """
    attrs = {"scale": as_number("scale", "scale", scale), "bias": as_number("scale", "bias", bias)}
    return node(SCALE, (floating("scale", x),), attrs)


# --- elementary functions -------------------------------------------------------------------------------------------

EXP = elementwise("exp", lambda x: np.exp(wide(x)), "eˣ", slack=2.0, samples=over_rows("exp"))


@builds(EXP)
def exp(x: Any) -> Tensor:
    """e to the power of ``x``; integers become f32. Raises `DTypeError` for quantized operands."""
    return node(EXP, (floating("exp", x),), {})


LOG = elementwise("log", lambda x: np.log(wide(x)), "ln x", runs_like="exp")


@builds(LOG)
def log(x: Any) -> Tensor:
    """Natural logarithm: NaN below zero, -inf at zero; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return node(LOG, (floating("log", x),), {})


EXPM1 = elementwise("expm1", lambda x: np.expm1(wide(x)), "eˣ - 1", runs_like="exp")


@builds(EXPM1)
def expm1(x: Any) -> Tensor:
    """``e**x - 1``, exact also near zero; integers become f32. Raises `DTypeError` for a quantized operand."""
    return node(EXPM1, (floating("expm1", x),), {})


LOG1P = elementwise("log1p", lambda x: np.log1p(wide(x)), "ln(1 + x)", runs_like="exp")


@builds(LOG1P)
def log1p(x: Any) -> Tensor:
    """``log(1 + x)``, exact also near zero: NaN below -1, -inf at -1; integers become f32. Raises `DTypeError` for a
    quantized operand."""
    return node(LOG1P, (floating("log1p", x),), {})


SIN = elementwise("sin", lambda x: np.sin(wide(x)), "sin x", runs_like="exp")


@builds(SIN)
def sin(x: Any) -> Tensor:
    """Sine of an angle in radians, NaN of infinities; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return node(SIN, (floating("sin", x),), {})


COS = elementwise("cos", lambda x: np.cos(wide(x)), "cos x", runs_like="exp")


@builds(COS)
def cos(x: Any) -> Tensor:
    """Cosine of an angle in radians, NaN of infinities; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return node(COS, (floating("cos", x),), {})


TANH = elementwise("tanh", lambda x: np.tanh(wide(x)), "tanh x", samples=over_rows("tanh"))


@builds(TANH)
def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent; integers become f32. Raises `DTypeError` for a quantized operand."""
    return node(TANH, (floating("tanh", x),), {})


# --- powers and roots -----------------------------------------------------------------------------------------------

SQRT = elementwise("sqrt", lambda x: np.sqrt(wide(x)), "√x", samples=over_rows("sqrt"))


@builds(SQRT)
def sqrt(x: Any) -> Tensor:
    """Square root, NaN below zero; integers become f32. Raises `DTypeError` for a quantized operand."""
    return node(SQRT, (floating("sqrt", x),), {})


RSQRT = elementwise("rsqrt", lambda x: 1 / np.sqrt(wide(x)), "1 / √x", flops=2, runs_like="sqrt")


@builds(RSQRT)
def rsqrt(x: Any) -> Tensor:
    """Reciprocal of the square root: NaN below zero, infinite at zero; integers become f32. Raises `DTypeError` for a
    quantized operand."""
    return node(RSQRT, (floating("rsqrt", x),), {})


RECIPROCAL = elementwise("reciprocal", lambda x: 1 / wide(x), "1 / x", runs_like="div")


@builds(RECIPROCAL)
def reciprocal(x: Any) -> Tensor:
    """``1 / x``, infinite at zero; integers become f32. Raises `DTypeError` for a quantized operand."""
    return node(RECIPROCAL, (floating("reciprocal", x),), {})


def _pow(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(np.power(wide(a), wide(b)))
    # 1 / a**|b| without its fraction is 0, but for a = 1 and a = -1.
    parts = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0))
    return np.where(b < 0, parts, np.power(a, np.maximum(b, 0))).astype(a.dtype)


POW = elementwise("pow", _pow, "aᵇ", sources=2, flops=2, runs_like="exp")
_NAMED_POWERS = {2: square, 0.5: sqrt, -0.5: rsqrt, -1: reciprocal}


@builds(POW)
def pow(a: Any, b: Any) -> Tensor:
    """``a ** b``, broadcast and promoted: NaN for a fractional power of a negative number.

    Integers stay integers and wrap around; with a negative exponent the result is rounded towards zero, as in torch.
    A float tensor to the bare number 2, 0.5, -0.5 or -1 becomes `square`, `sqrt`, `rsqrt` or `reciprocal`, as NumPy's
    operator does.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: quantized or two bool operands; an integer tensor with a negative integer as a bare number.
    """
    if isinstance(a, Tensor) and is_number(b):
        if a.dtype.is_float and b in _NAMED_POWERS:
            return _NAMED_POWERS[b](a)
        if a.dtype.is_integer and isinstance(b, int):
            if b < 0:
                raise DTypeError(f"pow: integers have no power {b}; cast first; the operand is {a.describe()}")
            if b == 2:
                return square(a)
    return _arithmetic(POW, a, b)


# --- types ----------------------------------------------------------------------------------------------------------


def _cast_infer(x: Tensor, *, dtype: DType) -> tuple[Shape, DType]:
    plain("cast", x)
    if dtype.block > 1:
        raise DTypeError(f"cast: nodes that encode {dtype} are those of quantize; the operand is {x.describe()}")
    return x.shape, dtype


CAST = OpDef(
    "cast",
    infer=_cast_infer,
    reference=lambda x, *, dtype: x.astype(dtype.numpy),
    inplace=(0,),
    pointwise=True,
    flops=flops_per_element(0),
    formula="x in another type",
    samples=over_rows("cast", "f16"),
)


@builds(CAST)
def cast(x: Any, dtype: DTypeLike) -> Tensor:
    """``x`` converted to another type; ``x`` itself if it has it.

    Floats are rounded to nearest, towards zero when they become integers (undefined where they do not fit); everything
    but zero becomes True. To and from quantized types it makes the nodes of `quantize` and `dequantize`.

    Raises:
        DTypeError: a quantized type that values are not encoded to, or from integers.
        LayoutError: a quantized type, and a last axis that does not consist of whole blocks.
        UnknownNameError: no such dtype.
    """
    y: Tensor = make("cast", x)
    dtype = as_dtype(dtype)
    if y.dtype is dtype:
        return y
    if y.dtype.block > 1:
        return cast(opdef.build("dequantize", y), dtype)
    if dtype.block > 1:
        return opdef.build("quantize", y, dtype)
    if not y.shape and y.leaf is not None and y.leaf.kind == "constant" and dtype.block == 1:
        with np.errstate(all="ignore"):
            return constant(CAST.reference(y.leaf.data, dtype=dtype))  # a number is converted at once
    return node(CAST, (y,), {"dtype": dtype})
