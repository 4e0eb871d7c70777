"""Arithmetic element by element, elementary functions, and conversion between types.

Operands of binary operations are promoted to one dtype and broadcast as views, so a kernel always gets operands of
exactly the output's dtype and shape (with stride 0 where broadcast). Half types are computed in f32, and the result is
rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import DTypeError
from opweave.graph import opdef
from opweave.graph.dtypes import FLOATS, INTEGERS, NUMBERS, DType, DTypeLike, as_dtype
from opweave.graph.layout import Shape
from opweave.graph.opdef import Example, OpDef, flops_per_element
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.operands import (
    Array,
    as_number,
    builds,
    composite,
    float_pair,
    floating,
    is_number,
    make,
    no_bools,
    pair,
    plain,
    unquantized,
)
from opweave.ops.pointwise import binary, composed, elementwise, no_gradient, unary
from opweave.ops.samples import over_rows

__all__ = [
    "abs", "add", "cast", "cos", "div", "exp", "expm1", "log", "log1p", "mul", "neg", "pow", "reciprocal", "rsqrt",
    "scale", "sign", "sin", "sqrt", "square", "sub", "tanh",
]  # fmt: skip


def _signed(op: str, value: Any) -> Tensor:
    """The operand of a function on every plain type but bool."""
    x = unquantized(op, value)
    no_bools(op, x)
    return x


def _terms(op: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    srcs = pair(op, a, b)
    no_bools(op, *srcs)
    return srcs


# --- arithmetic -----------------------------------------------------------------------------------------------------


SCALE = elementwise(
    "scale",
    lambda x, *, scale, bias: x * scale + bias,
    "scale · x + bias",
    flops=2,
    gradient=lambda grad, out, x, *, scale, bias: grad if scale == 1 else grad * scale,
    examples=(
        Example(FLOATS, attrs={"scale": -1.5, "bias": 0.25}),
        Example(FLOATS, tag="nobias", attrs={"scale": 3.0}),
    ),
)


@builds(SCALE)
def scale(x: Any, scale: float, bias: float = 0.0) -> Tensor:
    """``scale * x + bias`` with two numbers, in one pass; integers become f32.

    Raises:
        DTypeError: a quantized operand, or a scale or bias that is no number.
    """
    attrs = {"scale": as_number("scale", "scale", scale), "bias": as_number("scale", "bias", bias)}
    return node(SCALE, (floating("scale", x),), attrs)


@binary(
    "a + b",
    operands=_terms,
    number=lambda x, number: scale(x, 1.0, number),
    dtypes=NUMBERS,
    measured=("f32", "f64", "f16", "bf16", "i32"),
    gradient=lambda grad, out, a, b: (grad, grad),
)
def add(a: Array, b: Array) -> Any:
    """``a + b``, broadcast and promoted; integers wrap around. A float tensor and a Python number become `scale`.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: quantized or two bool operands, or an integer that the dtype of the other operand does not hold.
    """
    return np.add(a, b)


SUB = elementwise(
    "sub", lambda a, b: np.subtract(a, b), "a - b", sources=2, dtypes=NUMBERS,
    gradient=lambda grad, out, a, b: (grad, -grad),
)  # fmt: skip


@builds(SUB)
def sub(a: Any, b: Any) -> Tensor:
    """``a - b``, broadcast and promoted; integers wrap around. Otherwise as `add`."""
    if isinstance(a, Tensor) and is_number(b) and a.dtype.is_float:
        return scale(a, 1.0, -as_number("sub", "a scalar", b))
    if isinstance(b, Tensor) and is_number(a) and b.dtype.is_float:
        return scale(b, -1.0, a)
    return node(SUB, _terms("sub", a, b), {})


@binary(
    "a · b",
    operands=_terms,
    number=lambda x, number: scale(x, number),
    dtypes=NUMBERS,
    gradient=lambda grad, out, a, b: (grad * b, grad * a),
)
def mul(a: Array, b: Array) -> Any:
    """``a * b``, broadcast and promoted; integers wrap around. Otherwise as `add`."""
    return np.multiply(a, b)


@composite
def _div_gradient(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    by = grad / b
    return by, -by * out


@binary("a / b", operands=float_pair, values="positive", measured=("f32",), gradient=_div_gradient)
def div(a: Array, b: Array) -> Any:
    """``a / b``, broadcast and promoted; of integers in f32. Raises `ShapeError` for shapes that do not broadcast,
    `DTypeError` for quantized operands."""
    return np.divide(a, b)


@unary("-x", operand=_signed, exact=True, dtypes=NUMBERS, gradient=lambda grad, out, x: -grad)
def neg(x: Array) -> Any:
    """``-x``; integers wrap around.

    Raises:
        DTypeError: a quantized or bool operand.
    """
    return np.negative(x)


@unary("-1, 0 or 1, as x < 0, x = 0 or x > 0", operand=_signed, exact=True, dtypes=NUMBERS, gradient=no_gradient)
def sign(x: Array) -> Any:
    """-1, 0 or 1 with the sign of ``x``; NaN stays NaN. Raises `DTypeError` for a quantized or bool operand."""
    return np.sign(x)


@unary("|x|", operand=_signed, exact=True, dtypes=NUMBERS, gradient=lambda grad, out, x: grad * sign(x))
def abs(x: Array) -> Any:
    """``|x|``; the smallest integer of a signed type stays as it is, as the type does not hold its opposite. Raises
    `DTypeError` for a quantized or bool operand."""
    return np.absolute(x)


@unary("x²", operand=_signed, dtypes=NUMBERS, gradient=composed(lambda grad, out, x: 2.0 * grad * x))
def square(x: Array) -> Any:
    """``x * x``; integers wrap around. Raises `DTypeError` for a quantized or bool operand."""
    return np.square(x)


# --- elementary functions -------------------------------------------------------------------------------------------


@unary("eˣ", slack=2.0, measured=("f32",), gradient=lambda grad, out, x: grad * out)
def exp(x: Array) -> Any:
    """e to the power of ``x``; integers become f32. Raises `DTypeError` for quantized operands."""
    return np.exp(x)


@unary("ln x", runs_like="exp", values="positive", gradient=lambda grad, out, x: grad / x)
def log(x: Array) -> Any:
    """Natural logarithm: NaN below zero, -inf at zero; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return np.log(x)


@unary("eˣ - 1", runs_like="exp", gradient=composed(lambda grad, out, x: grad * (out + 1.0)))
def expm1(x: Array) -> Any:
    """``e**x - 1``, exact also near zero; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.expm1(x)


@unary("ln(1 + x)", runs_like="exp", values="positive", gradient=composed(lambda grad, out, x: grad / (x + 1.0)))
def log1p(x: Array) -> Any:
    """``log(1 + x)``, exact also near zero: NaN below -1, -inf at -1; integers become f32. Raises `DTypeError` for a
    quantized operand."""
    return np.log1p(x)


@unary("sin x", runs_like="exp", gradient=composed(lambda grad, out, x: grad * opdef.build("cos", x)))
def sin(x: Array) -> Any:
    """Sine of an angle in radians, NaN of infinities; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return np.sin(x)


@unary("cos x", runs_like="exp", gradient=composed(lambda grad, out, x: -grad * sin(x)))
def cos(x: Array) -> Any:
    """Cosine of an angle in radians, NaN of infinities; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return np.cos(x)


@unary("tanh x", measured=("f32",), gradient=composed(lambda grad, out, x: grad * (1.0 - square(out))))
def tanh(x: Array) -> Any:
    """Hyperbolic tangent; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.tanh(x)


# --- powers and roots -----------------------------------------------------------------------------------------------


@unary("√x", values="positive", measured=("f32",), gradient=composed(lambda grad, out, x: 0.5 * grad / out))
def sqrt(x: Array) -> Any:
    """Square root, NaN below zero; integers become f32. Raises `DTypeError` for a quantized operand."""
    return np.sqrt(x)


@unary(
    "1 / √x", flops=2, runs_like="sqrt", values="positive",
    gradient=composed(lambda grad, out, x: -0.5 * grad * out * square(out)),
)  # fmt: skip
def rsqrt(x: Array) -> Any:
    """Reciprocal of the square root: NaN below zero, infinite at zero; integers become f32. Raises `DTypeError` for a
    quantized operand."""
    return 1 / np.sqrt(x)


@unary("1 / x", runs_like="div", values="positive", gradient=composed(lambda grad, out, x: -grad * square(out)))
def reciprocal(x: Array) -> Any:
    """``1 / x``, infinite at zero; integers become f32. Raises `DTypeError` for a quantized operand."""
    return 1 / x


def _pow(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(np.power(a, b))
    # 1 / a**|b| without its fraction is 0, but for a = 1 and a = -1.
    parts = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0))
    return np.where(b < 0, parts, np.power(a, np.maximum(b, 0))).astype(a.dtype)


@composite
def _pow_gradient(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    base = opdef.build("where", b, grad * (b * pow(a, b - 1.0)), 0.0)  # 0 · 0⁻¹ would be NaN
    exponent = grad * (out * log(a))
    at_zero = opdef.build("where", opdef.build("step", -b), exponent, 0.0)
    return base, opdef.build("where", a, exponent, at_zero)


POW = elementwise(
    "pow", _pow, "aᵇ", sources=2, flops=2, runs_like="exp", gradient=_pow_gradient,
    examples=(Example(FLOATS, "positive"), Example(INTEGERS)),
)  # fmt: skip
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
    return node(POW, _terms("pow", a, b), {})


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
    gradient=lambda grad, out, x, *, dtype: grad.astype(x.dtype),
    inplace=(0,),
    sources=1,
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
