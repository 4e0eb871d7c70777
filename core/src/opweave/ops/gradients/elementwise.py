"""Gradients of operations that work element by element: arithmetic, activations, gated units, rounding, selection.

At kinks and ties they are those of torch: 0 for relu at 0, halves for equal operands of maximum and minimum, the
gradient of the inside for a bound of clamp.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, pi, sqrt
from typing import Any, Final

from opweave import ops
from opweave.graph.tensor import Tensor
from opweave.ops.activation import QUICK, gelu_tanh_backward, relu_backward, silu_backward
from opweave.ops.gradients.rules import gradient_of, vanishing
from opweave.ops.operands import composite
from opweave.ops.pooling import MAX_POOL_BACKWARD, max_pool_backward

# --- arithmetic -----------------------------------------------------------------------------------------------------

vanishing("sign", "step", "floor", "ceil", "round", "trunc", "full", "arange", "uniform", "normal")
vanishing("equal", "not_equal", "less", "less_equal", "quantize", "dequantize")


@gradient_of("add")
def _add(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad


@gradient_of("sub")
def _sub(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return grad, -grad


@gradient_of("mul")
def _mul(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return grad * b, grad * a


@gradient_of("div")
@composite
def _div(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    by = grad / b
    return by, -by * out


@gradient_of("neg")
def _neg(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return -grad


@gradient_of("abs")
def _abs(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.sign(x)


@gradient_of("square")
@composite
def _square(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return 2.0 * grad * x


@gradient_of("scale")
def _scale(grad: Tensor, out: Tensor, x: Tensor, *, scale: float, bias: float) -> Tensor:
    return grad if scale == 1 else grad * scale


@gradient_of("cast")
def _cast(grad: Tensor, out: Tensor, x: Tensor, *, dtype: Any) -> Tensor:
    return ops.cast(grad, x.dtype)


@gradient_of("pow")
@composite
def _pow(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    base = ops.where(b, grad * (b * ops.pow(a, b - 1.0)), 0.0)  # 0 · 0⁻¹ would be NaN
    exponent = grad * (out * ops.log(a))
    return base, ops.where(a, exponent, ops.where(ops.step(-b), exponent, 0.0))


# --- elementary functions -------------------------------------------------------------------------------------------


@gradient_of("exp")
def _exp(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * out


@gradient_of("log")
def _log(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad / x


@gradient_of("expm1")
@composite
def _expm1(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (out + 1.0)


@gradient_of("log1p")
@composite
def _log1p(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad / (x + 1.0)


@gradient_of("sin")
@composite
def _sin(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.cos(x)


@gradient_of("cos")
@composite
def _cos(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return -grad * ops.sin(x)


@gradient_of("tanh")
@composite
def _tanh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (1.0 - ops.square(out))


@gradient_of("sqrt")
@composite
def _sqrt(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return 0.5 * grad / out


@gradient_of("rsqrt")
@composite
def _rsqrt(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return -0.5 * grad * out * ops.square(out)


@gradient_of("reciprocal")
@composite
def _reciprocal(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return -grad * ops.square(out)


# --- activations ----------------------------------------------------------------------------------------------------


@gradient_of("relu")
def _relu(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    if grad.op is MAX_POOL_BACKWARD and grad.srcs[1] is out:
        # Only the largest element of a window gets a gradient, so relu_backward need only look at that element. Then
        # max_pool_backward is the last reader of ``out``, and its result may be written over it.
        pool = ops.max_pool1d if out.ndim == 3 else ops.max_pool2d
        return max_pool_backward(relu_backward(grad.srcs[0], pool(out, **grad.attrs)), out, **grad.attrs)
    return relu_backward(grad, out)


@gradient_of("relu_backward")
def _relu_backward(grad: Tensor, out: Tensor, given: Tensor, y: Tensor) -> tuple[Tensor, None]:
    return relu_backward(grad, y), None


@gradient_of("leaky_relu")
def _leaky_relu(grad: Tensor, out: Tensor, x: Tensor, *, negative_slope: float) -> Tensor:
    return ops.where(ops.step(x), grad, grad * negative_slope)


@gradient_of("elu")
@composite
def _elu(grad: Tensor, out: Tensor, x: Tensor, *, alpha: float) -> Tensor:
    return ops.where(ops.step(x), grad, grad * (alpha * ops.exp(ops.minimum(x, 0.0))))


@gradient_of("xielu")
@composite
def _xielu(grad: Tensor, out: Tensor, x: Tensor, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
    slope = alpha_n * ops.where(ops.step(eps - x), ops.exp(ops.minimum(x, 0.0)), 0.0) + (beta - alpha_n)
    return grad * ops.where(ops.step(x), (2 * alpha_p) * x + beta, slope)


@gradient_of("softplus")
@composite
def _softplus(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * ops.sigmoid(x)


@gradient_of("sigmoid")
@composite
def _sigmoid(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return grad * (out * (1.0 - out))


def _inside(x: Tensor, low: float, high: float, grad: Tensor) -> Tensor:
    """``grad`` where ``low`` < x < ``high``, else 0."""
    return ops.where(ops.step(x - low), ops.where(ops.step(high - x), grad, 0.0), 0.0)


@gradient_of("hardsigmoid")
def _hardsigmoid(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return _inside(x, -3.0, 3.0, grad * (1 / 6))


@gradient_of("hardswish")
@composite
def _hardswish(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    middle = grad * (x * (1 / 3) + 0.5)
    return ops.where(ops.step(x + 3.0), ops.where(ops.step(3.0 - x), middle, grad), 0.0)


@gradient_of("silu")
def _silu(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return silu_backward(grad, x)


@gradient_of("silu_backward")
@composite
def _silu_backward(grad: Tensor, out: Tensor, given: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    s = ops.sigmoid(x)
    return silu_backward(grad, x), grad * given * (s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s)))


@gradient_of("gelu_tanh")
def _gelu_tanh(grad: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return gelu_tanh_backward(grad, x)


@gradient_of("gelu_tanh_backward")
@composite
def _gelu_tanh_backward(grad: Tensor, out: Tensor, given: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """With u = 2 √(2/π) (x + 0.044715 x³), of which gelu_tanh is x · sigmoid(u), and its first two derivatives."""
    k, squared = 2 * sqrt(2 / pi), ops.square(x)
    s = ops.sigmoid(k * (x * (1.0 + 0.044715 * squared)))
    first, second = k * (1.0 + 3 * 0.044715 * squared), (6 * 0.044715 * k) * x
    bend = s * (1.0 - s) * (2.0 * first + x * ((1.0 - 2.0 * s) * ops.square(first) + second))
    return gelu_tanh_backward(grad, x), grad * given * bend


def _silu_slope(x: Tensor, slope: float) -> Tensor:
    """The derivative of x · sigmoid(slope · x)."""
    s = ops.sigmoid(slope * x)
    return s * (1.0 + slope * x * (1.0 - s))


def _gelu_slope(x: Tensor) -> Tensor:
    """Φ(x) + x · φ(x), with the normal distribution Φ and its density φ. Φ is gelu(x) / x, near 0 its series."""
    near = 2.0**-16  # nearer to 0, gelu(x) loses digits, and x⁵ is negligible
    series = 0.5 + (x - ops.square(x) * x * (1 / 6)) * (1 / sqrt(2 * pi))
    distribution = ops.where(ops.step(ops.abs(x) - near), ops.gelu(x) / x, series)
    return distribution + x * ops.exp(-0.5 * ops.square(x)) * (1 / sqrt(2 * pi))


def _gelu_quick_slope(x: Tensor) -> Tensor:
    return _silu_slope(x, QUICK)


_SLOPES: Final = {
    "gelu": _gelu_slope,
    "gelu_quick": _gelu_quick_slope,
}


def _weighed(slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return composite(lambda grad, out, x: grad * slope(x))


for _name, _slope in _SLOPES.items():
    gradient_of(_name)(_weighed(_slope))


# --- gated units ----------------------------------------------------------------------------------------------------


@gradient_of("reglu")
@composite
def _reglu(grad: Tensor, out: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return grad * ops.relu(gate), relu_backward(grad * x, gate)


@gradient_of("geglu")
@composite
def _geglu(grad: Tensor, out: Tensor, x: Tensor, gate: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    name = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}[approximate]
    dgate = gelu_tanh_backward(grad * x, gate) if name == "gelu_tanh" else grad * x * _SLOPES[name](gate)
    return grad * getattr(ops, name)(gate), dgate


@gradient_of("swiglu")
@composite
def _swiglu(grad: Tensor, out: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return grad * ops.silu(gate), silu_backward(grad * x, gate)


@gradient_of("swiglu_oai")
@composite
def _swiglu_oai(
    grad: Tensor, out: Tensor, x: Tensor, gate: Tensor, *, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    value, bounded = ops.clamp(x, -limit, limit), ops.minimum(gate, limit)
    dx = grad * (bounded * ops.sigmoid(alpha * bounded))
    dgate = grad * (value + 1.0) * _silu_slope(bounded, alpha)
    return _clamp(dx, out, x, min=-limit, max=limit), _clamp(dgate, out, gate, min=-inf, max=limit)


# --- selection ------------------------------------------------------------------------------------------------------


@gradient_of("maximum", "minimum")
def _extreme(grad: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    assert out.op is not None
    larger, smaller = ops.step(a - b), ops.step(b - a)
    first, second = (larger, smaller) if out.op.name == "maximum" else (smaller, larger)
    half = grad * 0.5
    return (
        ops.where(first, grad, ops.where(second, 0.0, half)),
        ops.where(second, grad, ops.where(first, 0.0, half)),
    )


@gradient_of("clamp")
def _clamp(grad: Tensor, out: Tensor, x: Tensor, *, min: float, max: float) -> Tensor:
    if min > -inf:
        grad = ops.where(ops.step(min - x), 0.0, grad)
    return ops.where(ops.step(x - max), 0.0, grad) if max < inf else grad


@gradient_of("where")
def _where(grad: Tensor, out: Tensor, condition: Tensor, a: Tensor, b: Tensor) -> tuple[None, Tensor, Tensor]:
    return None, ops.where(condition, grad, 0.0), ops.where(condition, 0.0, grad)
