"""Activation functions, element by element."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from opweave.graph.dtypes import bool_, i32
from opweave.graph.opdef import define_op
from opweave.graph.tensor import Tensor, node
from opweave.ops.elementwise import elementwise
from opweave.ops.operands import Array, as_number, builds, cast, float_pair, floating, unquantized, wide
from opweave.ops.samples import over_rows

__all__ = [
    "elu", "gelu", "gelu_quick", "gelu_tanh", "hardsigmoid", "hardswish", "leaky_relu", "relu", "sigmoid", "silu",
    "softplus", "xielu",
]  # fmt: skip

# --- ramps ----------------------------------------------------------------------------------------------------------

RELU = elementwise(
    "relu", lambda x: np.maximum(wide(x), 0), "max(x, 0)", exact=True, runs_like="silu", samples=over_rows("relu")
)


@builds(RELU)
def relu(x: Any) -> Tensor:
    """``max(x, 0)``; NaN stays NaN, integers stay integers, bool becomes i32.

    Raises:
        DTypeError: a quantized operand.
    """
    x = unquantized("relu", x)
    return node(RELU, (cast(x, i32) if x.dtype is bool_ else x,), {})


LEAKY_RELU = elementwise(
    "leaky_relu",
    lambda x, *, negative_slope: np.where(x > 0, wide(x), negative_slope * wide(x)),
    "x if x > 0, else negative_slope · x",
    flops=2,
    runs_like="silu",
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


ELU = elementwise(
    "elu",
    lambda x, *, alpha: np.where(x > 0, wide(x), alpha * np.expm1(np.minimum(wide(x), 0))),
    "x if x > 0, else α · (eˣ - 1)",
    flops=4,
    runs_like="exp",
)


@builds(ELU)
def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """Exponential linear unit: ``x`` above zero, ``alpha * expm1(x)`` below; integers become f32.

    Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential Linear Units", 2015.

    Raises:
        DTypeError: a quantized operand, or an alpha that is no number.
    """
    return node(ELU, (floating("elu", x),), {"alpha": as_number("elu", "alpha", alpha)})


SOFTPLUS = elementwise("softplus", lambda x: np.logaddexp(wide(x), 0), "ln(1 + eˣ)", flops=4, runs_like="exp")


@builds(SOFTPLUS)
def softplus(x: Any) -> Tensor:
    """``log(1 + exp(x))`` without overflow, a smooth `relu`; integers become f32.

    Raises:
        DTypeError: a quantized operand.
    """
    return node(SOFTPLUS, (floating("softplus", x),), {})


def _xielu(x: Array, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Array:
    x = wide(x)
    below = alpha_n * np.expm1(np.minimum(x, eps)) + (beta - alpha_n) * x
    return np.where(x > 0, (alpha_p * x + beta) * x, below)


XIELU = elementwise(
    "xielu", _xielu, "αₚ x² + β x if x > 0, else αₙ (exp(min(x, ε)) − 1 − x) + β x", flops=8, runs_like="exp"
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


SIGMOID = elementwise(
    "sigmoid",
    lambda x: 1 / (1 + np.exp(-wide(x))),
    "1 / (1 + e⁻ˣ)",
    flops=4,
    runs_like="silu",
    samples=over_rows("sigmoid"),
)


@builds(SIGMOID)
def sigmoid(x: Any) -> Tensor:
    """The logistic function; integers become f32. Raises `DTypeError` for quantized operands."""
    return node(SIGMOID, (floating("sigmoid", x),), {})


def _hardsigmoid(x: Array) -> Array:
    return np.asarray(np.clip(wide(x) + 3, 0, 6) / 6)


HARDSIGMOID = elementwise("hardsigmoid", _hardsigmoid, "min(max(x + 3, 0), 6) / 6", flops=4, runs_like="relu")


@builds(HARDSIGMOID)
def hardsigmoid(x: Any) -> Tensor:
    """`sigmoid` in three straight lines: 0 up to -3, 1 from 3 on; integers become f32. Raises `DTypeError` for a
    quantized operand."""
    return node(HARDSIGMOID, (floating("hardsigmoid", x),), {})


# --- products of x and a function of x ------------------------------------------------------------------------------

_ERFC = np.frompyfunc(math.erfc, 1, 1)


def gelu_of(x: Array) -> Array:
    """The exact form, in float64."""
    x = wide(x)
    # The complement keeps its digits where 1 + erf(x / √2) would cancel.
    result: Array = 0.5 * x * np.asarray(_ERFC(-x / math.sqrt(2)), np.float64)
    return result


GELU = elementwise(
    "gelu", gelu_of, "x · (1 + erf(x / √2)) / 2", flops=5, slack=2.0, runs_like="silu", samples=over_rows("gelu")
)


@builds(GELU)
def gelu(x: Any) -> Tensor:
    """Gaussian error linear unit in the exact (erf) form; integers become f32. Raises `DTypeError` for a quantized
    operand.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return node(GELU, (floating("gelu", x),), {})


def silu_of(x: Array, slope: float = 1.0) -> Array:
    """``x * sigmoid(slope * x)``, in float64."""
    x = wide(x)
    result: Array = x / (1 + np.exp(-slope * x))
    return result


def gelu_tanh_of(x: Array) -> Array:
    """The form with tanh, in float64."""
    x = wide(x)
    # (1 + tanh u) / 2 is the sigmoid of 2u, which keeps its digits far below zero.
    result: Array = x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


GELU_TANH = elementwise(
    "gelu_tanh",
    gelu_tanh_of,
    "x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2",
    flops=9,
    runs_like="silu",
    samples=over_rows("gelu_tanh"),
)


@builds(GELU_TANH)
def gelu_tanh(x: Any) -> Tensor:
    """`gelu` approximated by a hyperbolic tangent, torch's ``approximate="tanh"``; integers become f32.

    The second form of Hendrycks and Gimpel. Raises `DTypeError` for a quantized operand.
    """
    return node(GELU_TANH, (floating("gelu_tanh", x),), {})


QUICK: Final = 1.702
"""The slope at which the sigmoid comes closest to the distribution function of the normal distribution."""


def gelu_quick_of(x: Array) -> Array:
    """The form with a sigmoid, in float64."""
    return silu_of(x, QUICK)


GELU_QUICK = elementwise("gelu_quick", gelu_quick_of, "x / (1 + e^(-1.702 x))", flops=5, runs_like="silu")


@builds(GELU_QUICK)
def gelu_quick(x: Any) -> Tensor:
    """`gelu` approximated by ``x * sigmoid(1.702 * x)``; integers become f32.

    The third form of Hendrycks and Gimpel. Raises `DTypeError` for a quantized operand.
    """
    return node(GELU_QUICK, (floating("gelu_quick", x),), {})


SILU = elementwise("silu", silu_of, "x / (1 + e⁻ˣ)", flops=4, samples=over_rows("silu"))


@builds(SILU)
def silu(x: Any) -> Tensor:
    """Sigmoid linear unit (swish): ``x * sigmoid(x)``; integers become f32. Raises `DTypeError` for a quantized
    operand."""
    return node(SILU, (floating("silu", x),), {})


HARDSWISH = elementwise(
    "hardswish", lambda x: wide(x) * _hardsigmoid(x), "x · min(max(x + 3, 0), 6) / 6", flops=5, runs_like="relu"
)


@builds(HARDSWISH)
def hardswish(x: Any) -> Tensor:
    """``x * hardsigmoid(x)``; integers become f32. Raises `DTypeError` for a quantized operand.

    Howard et al., "Searching for MobileNetV3", 2019.
    """
    return node(HARDSWISH, (floating("hardswish", x),), {})


# --- operations of the gradients of activations ---------------------------------------------------------------------

RELU_BACKWARD = define_op(
    elementwise(
        "relu_backward",
        lambda grad, y: np.where(y <= 0, 0, wide(grad)),
        "0 if y ≤ 0, else dy",
        sources=2,
        exact=True,
        runs_like="mul",
    )
)


def _silu_backward(grad: Array, x: Array) -> Array:
    x, s = wide(x), 1 / (1 + np.exp(-wide(x)))
    result: Array = wide(grad) * s * (1 + x * (1 - s))
    return result


SILU_BACKWARD = define_op(
    elementwise(
        "silu_backward", _silu_backward, "dy · s · (1 + x · (1 - s)) with s = 1 / (1 + e⁻ˣ)",
        sources=2, flops=8, nan=False, runs_like="silu",
    )
)  # fmt: skip


def _gelu_tanh_backward(grad: Array, x: Array) -> Array:
    x, k = wide(x), 2 * math.sqrt(2 / math.pi)
    s = 1 / (1 + np.exp(-k * (x + 0.044715 * x**3)))
    result: Array = wide(grad) * s * (1 + x * (1 - s) * k * (1 + 3 * 0.044715 * x**2))
    return result


GELU_TANH_BACKWARD = define_op(
    elementwise(
        "gelu_tanh_backward",
        _gelu_tanh_backward,
        "dy · s · (1 + x · (1 - s) · u') with u = 2 √(2/π) · (x + 0.044715 x³) and s = 1 / (1 + e⁻ᵘ)",
        sources=2, flops=14, nan=False, runs_like="silu",
    )
)  # fmt: skip


def relu_backward(grad: Tensor, y: Tensor) -> Tensor:
    """The gradient of `relu`, given its result ``y``: 0 where ``y`` is 0, ``grad`` elsewhere, also where ``y`` is NaN,
    as in torch. One float dtype and the broadcast shape of both."""
    return node(RELU_BACKWARD, float_pair("relu_backward", grad, y), {})


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `silu` at ``x``, times ``grad``: of one float dtype and the broadcast shape of both."""
    return node(SILU_BACKWARD, float_pair("silu_backward", grad, x), {})


def gelu_tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `gelu_tanh` at ``x``, times ``grad``: of one float dtype and the broadcast shape of both."""
    return node(GELU_TANH_BACKWARD, float_pair("gelu_tanh_backward", grad, x), {})
