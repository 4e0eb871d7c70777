"""Activation functions, element by element.

At kinks their gradients are those of torch: 0 for relu at 0.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from opweave.graph.dtypes import FLOATS, NUMBERS
from opweave.graph.opdef import Example
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import abs, exp, square
from opweave.ops.operands import Array, as_number, builds, composite, float_pair, floating
from opweave.ops.pointwise import binary, composed, elementwise, unary
from opweave.ops.selection import countable, minimum, step, where

__all__ = [
    "elu", "gelu", "gelu_quick", "gelu_tanh", "hardsigmoid", "hardswish", "leaky_relu", "relu", "sigmoid", "silu",
    "softplus", "xielu",
]  # fmt: skip

# --- operations of the gradients of activations ---------------------------------------------------------------------


def _relu_backward_gradient(grad: Tensor, out: Tensor, given: Tensor, y: Tensor) -> tuple[Tensor, None]:
    return relu_backward(grad, y), None


@binary(
    "0 if y ≤ 0, else dy", operands=float_pair, exact=True, runs_like="mul", public=False,
    gradient=_relu_backward_gradient,
)  # fmt: skip
def relu_backward(grad: Array, y: Array) -> Any:
    """The gradient of `relu`, given its result ``y``: 0 where ``y`` is 0, ``grad`` elsewhere, also where ``y`` is NaN,
    as in torch. One float dtype and the broadcast shape of both."""
    return np.where(y <= 0, 0, grad)


@composite
def _silu_backward_gradient(grad: Tensor, out: Tensor, given: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(x)
    return silu_backward(grad, x), grad * given * (s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s)))


@binary(
    "dy · s · (1 + x · (1 - s)) with s = 1 / (1 + e⁻ˣ)", operands=float_pair, flops=8, nan=False, runs_like="silu",
    public=False, gradient=_silu_backward_gradient,
)  # fmt: skip
def silu_backward(grad: Array, x: Array) -> Any:
    """The gradient of `silu` at ``x``, times ``grad``: of one float dtype and the broadcast shape of both."""
    s = 1 / (1 + np.exp(-x))
    return grad * s * (1 + x * (1 - s))


@composite
def _gelu_tanh_backward_gradient(grad: Tensor, out: Tensor, given: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """With u = 2 √(2/π) (x + 0.044715 x³), of which gelu_tanh is x · sigmoid(u), and its first two derivatives."""
    k, squared = 2 * math.sqrt(2 / math.pi), square(x)
    s = sigmoid(k * (x * (1.0 + 0.044715 * squared)))
    first, second = k * (1.0 + 3 * 0.044715 * squared), (6 * 0.044715 * k) * x
    bend = s * (1.0 - s) * (2.0 * first + x * ((1.0 - 2.0 * s) * square(first) + second))
    return gelu_tanh_backward(grad, x), grad * given * bend


@binary(
    "dy · s · (1 + x · (1 - s) · u') with u = 2 √(2/π) · (x + 0.044715 x³) and s = 1 / (1 + e⁻ᵘ)",
    operands=float_pair, flops=14, nan=False, runs_like="silu", public=False, gradient=_gelu_tanh_backward_gradient,
)  # fmt: skip
def gelu_tanh_backward(grad: Array, x: Array) -> Any:
    """The gradient of `gelu_tanh` at ``x``, times ``grad``: of one float dtype and the broadcast shape of both."""
    k = 2 * math.sqrt(2 / math.pi)
    s = 1 / (1 + np.exp(-k * (x + 0.044715 * x**3)))
    return grad * s * (1 + x * (1 - s) * k * (1 + 3 * 0.044715 * x**2))


# --- ramps ----------------------------------------------------------------------------------------------------------


@unary("max(x, 0)", operand=countable, exact=True, runs_like="silu", dtypes=NUMBERS, measured=("f32",))
def relu(x: Array) -> Any:
    """``max(x, 0)``; NaN stays NaN, integers stay integers, bool becomes i32.

    Raises:
        DTypeError: a quantized operand.
    """
    return np.maximum(x, 0)


LEAKY_RELU = elementwise(
    "leaky_relu",
    lambda x, *, negative_slope: np.where(x > 0, x, negative_slope * x),
    "x if x > 0, else negative_slope · x",
    flops=2,
    runs_like="silu",
    gradient=lambda grad, out, x, *, negative_slope: where(step(x), grad, grad * negative_slope),
    examples=tuple([Example(FLOATS, tag=f"slope{a}", attrs={"negative_slope": a}) for a in (0.01, -0.5, 1.5)]),
)


@builds(LEAKY_RELU)
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Tensor:
    """``x`` above zero, ``negative_slope * x`` below; integers become f32. With slope 0 it becomes `relu`.

    Raises:
        DTypeError: a quantized operand, or a slope that is no number.
    """
    x = floating("leaky_relu", x)
    slope = as_number("leaky_relu", "negative_slope", negative_slope)
    return node(LEAKY_RELU, (x,), {"negative_slope": slope}) if slope else relu(x)


@composite
def _elu_gradient(grad: Tensor, out: Tensor, x: Tensor, *, alpha: float) -> Tensor:
    return where(step(x), grad, grad * (alpha * exp(minimum(x, 0.0))))


ELU = elementwise(
    "elu",
    lambda x, *, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "x if x > 0, else α · (eˣ - 1)",
    flops=4,
    runs_like="exp",
    gradient=_elu_gradient,
    examples=tuple([Example(FLOATS, tag=f"alpha{a}", attrs={"alpha": a}) for a in (1.0, 0.3)]),
)


@builds(ELU)
def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """Exponential linear unit: ``x`` above zero, ``alpha * expm1(x)`` below; integers become f32.

    Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential Linear Units", 2015.

    Raises:
        DTypeError: a quantized operand, or an alpha that is no number.
    """
    return node(ELU, (floating("elu", x),), {"alpha": as_number("elu", "alpha", alpha)})


def _xielu(x: Array, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Array:
    below = alpha_n * np.expm1(np.minimum(x, eps)) + (beta - alpha_n) * x
    return np.where(x > 0, (alpha_p * x + beta) * x, below)


@composite
def _xielu_gradient(
    grad: Tensor, out: Tensor, x: Tensor, *, alpha_p: float, alpha_n: float, beta: float, eps: float
) -> Tensor:
    slope = alpha_n * where(step(eps - x), exp(minimum(x, 0.0)), 0.0) + (beta - alpha_n)
    return grad * where(step(x), (2 * alpha_p) * x + beta, slope)


XIELU = elementwise(
    "xielu",
    _xielu,
    "αₚ x² + β x if x > 0, else αₙ (exp(min(x, ε)) − 1 − x) + β x",
    flops=8,
    runs_like="exp",
    gradient=_xielu_gradient,
    examples=(Example(FLOATS, attrs={"alpha_p": 0.7, "alpha_n": 1.25, "beta": 0.25}),),
)


@builds(XIELU)
def xielu(x: Any, alpha_p: float = 0.8, alpha_n: float = 0.8, beta: float = 0.5, eps: float = -1e-6) -> Tensor:
    """Expanded integral of the exponential linear unit: a parabola above zero, an exponential below; integers become
    f32. ``eps`` is the largest exponent.

    Huang and Schlag, "Deriving Activation Functions Using Integration", 2025, section 3. Its trainable parameters are
    mapped to ``alpha_p`` and ``alpha_n`` by softplus (plus ``beta`` for the latter) before.

    Raises:
        DTypeError: a quantized operand, or a parameter that is no number.
    """
    given = {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}
    return node(XIELU, (floating("xielu", x),), {k: as_number("xielu", k, v) for k, v in given.items()})


# --- sigmoids -------------------------------------------------------------------------------------------------------


@unary(
    "1 / (1 + e⁻ˣ)", flops=4, runs_like="silu", measured=("f32",),
    gradient=composed(lambda grad, out, x: grad * (out * (1.0 - out))),
)  # fmt: skip
def sigmoid(x: Array) -> Any:
    """The logistic function; integers become f32. Raises `DTypeError` for quantized operands."""
    return 1 / (1 + np.exp(-x))


@unary("ln(1 + eˣ)", flops=4, runs_like="exp", gradient=composed(lambda grad, out, x: grad * sigmoid(x)))
def softplus(x: Array) -> Any:
    """``log(1 + exp(x))`` without overflow, a smooth `relu`; integers become f32.

    Raises:
        DTypeError: a quantized operand.
    """
    return np.logaddexp(x, 0)


def _inside(x: Tensor, low: float, high: float, grad: Tensor) -> Tensor:
    """``grad`` where ``low`` < x < ``high``, else 0."""
    return where(step(x - low), where(step(high - x), grad, 0.0), 0.0)


@unary(
    "min(max(x + 3, 0), 6) / 6", flops=4, runs_like="relu",
    gradient=lambda grad, out, x: _inside(x, -3.0, 3.0, grad * (1 / 6)),
)  # fmt: skip
def hardsigmoid(x: Array) -> Any:
    """`sigmoid` in three straight lines: 0 up to -3, 1 from 3 on; integers become f32. Raises `DTypeError` for a
    quantized operand."""
    return np.clip(x + 3, 0, 6) / 6


# --- products of x and a function of x ------------------------------------------------------------------------------

_ERFC: Final = np.frompyfunc(math.erfc, 1, 1)


def gelu_slope(x: Tensor) -> Tensor:
    """The derivative of `gelu`: Φ(x) + x · φ(x), with the normal distribution Φ and its density φ. Φ is gelu(x) / x,
    near 0 its series."""
    near = 2.0**-16  # nearer to 0, gelu(x) loses digits, and x⁵ is negligible
    series = 0.5 + (x - square(x) * x * (1 / 6)) * (1 / math.sqrt(2 * math.pi))
    distribution = where(step(abs(x) - near), gelu(x) / x, series)
    return distribution + x * exp(-0.5 * square(x)) * (1 / math.sqrt(2 * math.pi))


@unary(
    "x · (1 + erf(x / √2)) / 2", flops=5, slack=2.0, runs_like="silu", measured=("f32",),
    gradient=composed(lambda grad, out, x: grad * gelu_slope(x)),
)  # fmt: skip
def gelu(x: Array) -> Any:
    """Gaussian error linear unit in the exact (erf) form; integers become f32. Raises `DTypeError` for a quantized
    operand.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    # The complement keeps its digits where 1 + erf(x / √2) would cancel.
    return 0.5 * x * np.asarray(_ERFC(-x / math.sqrt(2)), np.float64)


@unary(
    "x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2", flops=9, runs_like="silu", measured=("f32",),
    gradient=lambda grad, out, x: gelu_tanh_backward(grad, x),
)  # fmt: skip
def gelu_tanh(x: Array) -> Any:
    """`gelu` approximated by a hyperbolic tangent, torch's ``approximate="tanh"``; integers become f32.

    The second form of Hendrycks and Gimpel. Raises `DTypeError` for a quantized operand.
    """
    # (1 + tanh u) / 2 is the sigmoid of 2u, which keeps its digits far below zero.
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


QUICK: Final = 1.702
"""The slope at which the sigmoid comes closest to the distribution function of the normal distribution."""


def silu_slope(x: Tensor, steepness: float) -> Tensor:
    """The derivative of x · sigmoid(steepness · x)."""
    s = sigmoid(steepness * x)
    return s * (1.0 + steepness * x * (1.0 - s))


@unary(
    "x / (1 + e^(-1.702 x))", flops=5, runs_like="silu",
    gradient=composed(lambda grad, out, x: grad * silu_slope(x, QUICK)),
)  # fmt: skip
def gelu_quick(x: Array) -> Any:
    """`gelu` approximated by ``x * sigmoid(1.702 * x)``; integers become f32.

    The third form of Hendrycks and Gimpel. Raises `DTypeError` for a quantized operand.
    """
    return x / (1 + np.exp(-QUICK * x))


@unary("x / (1 + e⁻ˣ)", flops=4, measured=("f32",), gradient=lambda grad, out, x: silu_backward(grad, x))
def silu(x: Array) -> Any:
    """Sigmoid linear unit (swish): ``x * sigmoid(x)``; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return x / (1 + np.exp(-x))


@composite
def _hardswish_gradient(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    middle = grad * (x * (1 / 3) + 0.5)
    return where(step(x + 3.0), where(step(3.0 - x), middle, grad), 0.0)


@unary("x · min(max(x + 3, 0), 6) / 6", flops=5, runs_like="relu", gradient=_hardswish_gradient)
def hardswish(x: Array) -> Any:
    """``x * hardsigmoid(x)``; integers become f32. Raises `DTypeError` for a quantized operand.

    Howard et al., "Searching for MobileNetV3", 2019.
    """
    return x * (np.clip(x + 3, 0, 6) / 6)
