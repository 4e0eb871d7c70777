"""Arithmetic, casts, activations and comparisons that take several operators or need other types."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.contract import Step
from opweave.graph.dtypes import DType, bool_, f64
from opweave.ops.activation import QUICK
from opweave_ort.kernels.direct import spread
from opweave_ort.kernels.table import F32, NUMBERS, PLAIN, emits
from opweave_ort.model import Model, Operand


def _number(model: Model, value: Any, out: Operand) -> str:
    with np.errstate(over="ignore"):
        return model.constant(value, out.dtype)


@emits("square", dtypes=NUMBERS)
def square(m: Model, op: str, out: Operand, x: Operand) -> str:
    value = m.expanded(x)
    return m("Mul", value, value)


@emits("rsqrt")
def rsqrt(m: Model, op: str, out: Operand, x: Operand) -> str:
    return m("Reciprocal", m("Sqrt", m.expanded(x)))


@emits("scale")
def scale(m: Model, op: str, out: Operand, x: Operand, *, scale: float, bias: float) -> str:
    value = m.expanded(x)
    if scale != 1:
        value = m("Mul", value, _number(m, scale, out))
    if bias != 0 or scale == 1:
        value = m("Add", value, _number(m, bias, out))
    return value


@emits("expm1")
def expm1(m: Model, op: str, out: Operand, x: Operand) -> str:
    """(u − 1) · x / ln u with u = eˣ, whose rounding error cancels: Kahan, in Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002, section 1.14.1. In f64."""
    value = m.cast(m.expanded(x), x.dtype, f64)
    one = m.constant(1.0, f64)
    u = m("Exp", value)
    less = m("Sub", u, one)
    result = m("Div", m("Mul", less, value), m("Log", u))
    # ln u is 0 and ∞ where u is 1, 0 and ∞; far from 1 there is nothing to cancel.
    result = m("Where", m("Less", m("Abs", value), one), result, less)
    return m.cast(m("Where", m("Equal", u, one), value, result), f64, x.dtype)


@emits("log1p")
def log1p(m: Model, op: str, out: Operand, x: Operand) -> str:
    """ln u · x / (u − 1) with u = 1 + x, as `expm1`."""
    value = m.cast(m.expanded(x), x.dtype, f64)
    one = m.constant(1.0, f64)
    u = m("Add", value, one)
    near = m("Mul", m("Log", u), m("Div", value, m("Sub", u, one)))
    result = m("Where", m("Less", m("Abs", value), one), near, m("Log", u))
    return m.cast(m("Where", m("Equal", u, one), value, result), f64, x.dtype)


@emits("trunc")
def trunc(m: Model, op: str, out: Operand, x: Operand) -> str:
    value = m.expanded(x)
    return m("Where", m("Less", value, _number(m, 0, out)), m("Ceil", value), m("Floor", value))


def _cast_why_not(step: Step) -> str | None:
    source, target = step.srcs[0].dtype, step.out.dtype
    if source.is_float and target.is_integer and target.itemsize == 1:
        return "what a float beyond the range of a byte becomes differs"
    return None


@emits("cast", dtypes=PLAIN)
def cast(m: Model, op: str, out: Operand, x: Operand, *, dtype: DType) -> str:
    value = m.expanded(x)
    if dtype is bool_ and x.dtype is not bool_:
        # A cast truncates fractions first.
        return m("Not", m("Equal", value, m.constant(0, x.dtype)))
    return m.cast(value, x.dtype, out.dtype)


@emits("copy", "contiguous", dtypes=PLAIN, moves=True)
def copy(m: Model, op: str, out: Operand, x: Operand) -> str:
    return m.expanded(x)


@emits("not_equal", dtypes=PLAIN)
def not_equal(m: Model, op: str, out: Operand, a: Operand, b: Operand) -> str:
    return m("Not", m("Equal", *spread(m, out, a, b)))


@emits("step", dtypes=NUMBERS)
def step(m: Model, op: str, out: Operand, x: Operand) -> str:
    return m.cast(m("Greater", m.expanded(x), _number(m, 0, out)), bool_, out.dtype)


@emits("clamp", dtypes=NUMBERS)
def clamp(m: Model, op: str, out: Operand, x: Operand, *, min: float, max: float) -> str:
    value = m.expanded(x)
    if min != -np.inf:
        value = m("Max", value, _number(m, min, out))
    if max != np.inf:
        value = m("Min", value, _number(m, max, out))
    return value


# --- activations and gates ------------------------------------------------------------------------------------------


@emits("silu")
def silu(m: Model, op: str, out: Operand, x: Operand) -> str:
    value = m.expanded(x)
    return m("Mul", value, m("Sigmoid", value))


@emits("relu_backward")
def relu_backward(m: Model, op: str, out: Operand, grad: Operand, y: Operand) -> str:
    zero = _number(m, 0, out)
    return m("Where", m("LessOrEqual", m.expanded(y), zero), zero, m.expanded(grad))


@emits("silu_backward", "gelu_tanh_backward")
def weighed_backward(m: Model, op: str, out: Operand, grad: Operand, x: Operand) -> str:
    """The gradient of x · sigmoid(u), where u is x or a polynomial of it."""
    value, one = m.expanded(x), _number(m, 1, out)
    inner, within = value, value  # u, and x times its derivative
    if op == "gelu_tanh_backward":
        k = 2 * np.sqrt(2 / np.pi)
        square, linear = m("Mul", value, value), _number(m, k, out)
        inner, within = [
            m("Mul", value, m("Add", m("Mul", square, _number(m, c * k, out)), linear))
            for c in (0.044715, 3 * 0.044715)
        ]
    s = m("Sigmoid", inner)
    slope = m("Mul", s, m("Add", m("Mul", within, m("Sub", one, s)), one))
    return m("Mul", m.expanded(grad), slope)


def _quick(m: Model, value: str, slope: float, out: Operand) -> str:
    return m("Mul", value, m("Sigmoid", m("Mul", value, _number(m, slope, out))))


@emits("gelu_quick")
def gelu_quick(m: Model, op: str, out: Operand, x: Operand) -> str:
    return _quick(m, m.expanded(x), QUICK, out)


@emits("reglu")
def reglu(m: Model, op: str, out: Operand, x: Operand, gate: Operand) -> str:
    return m("Mul", m.expanded(x), m("Relu", gate.name))


@emits("geglu", dtypes=F32)
def geglu(m: Model, op: str, out: Operand, x: Operand, gate: Operand, *, approximate: str) -> str:
    if approximate == "quick":
        return m("Mul", m.expanded(x), _quick(m, gate.name, QUICK, out))
    return m("Mul", m.expanded(x), m("Gelu", gate.name, approximate=approximate))


@emits("swiglu")
def swiglu(m: Model, op: str, out: Operand, x: Operand, gate: Operand) -> str:
    return m("Mul", m.expanded(x), m("Mul", gate.name, m("Sigmoid", gate.name)))


@emits("swiglu_oai")
def swiglu_oai(m: Model, op: str, out: Operand, x: Operand, gate: Operand, *, alpha: float, limit: float) -> str:
    high, low = _number(m, limit, out), _number(m, -limit, out)
    value = m("Add", m("Min", m("Max", m.expanded(x), low), high), _number(m, 1, out))
    return m("Mul", _quick(m, m("Min", gate.name, high), alpha, out), value)


@emits("minimum", "maximum", dtypes="bool")
def logic(m: Model, op: str, out: Operand, a: Operand, b: Operand) -> str:
    return m("And" if op == "minimum" else "Or", *spread(m, out, a, b))
