"""What compiled chains compute, by operation: functions of vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from opweave.ops.activation import QUICK
from opweave_cpu.jit.functions import (
    absolute,
    erf,
    exp,
    expm1,
    gelu,
    gelu_tanh,
    gelu_tanh_backward,
    larger,
    log1p_of,
    logarithm,
    silu,
    silu_backward,
    smaller,
    softplus,
    tanh,
)
from opweave_cpu.jit.vectors import Vector, fma, intrinsic, select

__all__ = ["FORMULAS", "Formula", "formula_of"]


class Formula(NamedTuple):
    """How to compute an operation.

    Attributes:
        make: the vector of the result from those of the sources, then the numbers.
        work: elementary operations for one element.
        numbers: the attributes that it takes, in order, as vectors of the type of the result.
        wide: whether it computes in f64 too.
        adds: the result is added to what it is written over, which is the first argument of ``make``.
    """

    make: Callable[..., Vector]
    work: int = 1
    numbers: tuple[str, ...] = ()
    wide: bool = True
    adds: bool = False


def _sign(x: Vector) -> Vector:
    return select(x > 0.0, 1.0, select(x < 0.0, x.number(-1.0), x))


def _sqrt(x: Vector) -> Vector:
    return intrinsic("sqrt", x)


def _elu(x: Vector, alpha: Vector) -> Vector:
    return select(x > 0.0, x, alpha * expm1(smaller(x, 0.0)))


def _xielu(x: Vector, alpha_p: Vector, alpha_n: Vector, beta: Vector, eps: Vector) -> Vector:
    below = fma(expm1(smaller(x, eps)), alpha_n, (beta - alpha_n) * x)
    return select(x > 0.0, fma(alpha_p, x, beta) * x, below)


def _hardsigmoid(x: Vector) -> Vector:
    return smaller(larger(x + 3.0, 0.0), 6.0) / 6.0


def _clamp(x: Vector, least: Vector, most: Vector) -> Vector:
    return smaller(larger(x, least), most)


def _swiglu_oai(x: Vector, gate: Vector, alpha: Vector, limit: Vector) -> Vector:
    return silu(smaller(gate, limit), alpha) * (_clamp(x, -limit, limit) + 1.0)


def _equal(sign: str, a: Vector, b: Vector) -> Vector:
    return a.compare(sign, b)


def _same(x: Vector) -> Vector:
    return x


def _of(name: str) -> Callable[[Vector], Vector]:
    return partial(intrinsic, name)


FORMULAS: Final[dict[str, Formula]] = {
    "add": Formula(lambda a, b: a + b),
    "sub": Formula(lambda a, b: a - b),
    "mul": Formula(lambda a, b: a * b),
    "div": Formula(lambda a, b: a / b, 4),
    "neg": Formula(lambda x: -x),
    "abs": Formula(absolute),
    "sign": Formula(_sign, 2),
    "square": Formula(lambda x: x * x),
    "reciprocal": Formula(lambda x: 1.0 / x, 4),
    "sqrt": Formula(_sqrt, 4),
    "rsqrt": Formula(lambda x: 1.0 / _sqrt(x), 8),
    "scale": Formula(lambda x, scale, bias: x * scale + bias, 2, ("scale", "bias")),
    "copy": Formula(_same),
    "contiguous": Formula(_same),
    "exp": Formula(exp, 12, wide=False),
    "expm1": Formula(expm1, 12, wide=False),
    "log": Formula(logarithm, 20, wide=False),
    "log1p": Formula(log1p_of, 26, wide=False),
    "tanh": Formula(tanh, 20, wide=False),
    "erf": Formula(erf, 44, wide=False),
    "relu": Formula(lambda x: larger(x, 0.0)),
    "leaky_relu": Formula(lambda x, slope: select(x > 0.0, x, x * slope), 2, ("negative_slope",)),
    "elu": Formula(_elu, 14, ("alpha",), wide=False),
    "xielu": Formula(_xielu, 18, ("alpha_p", "alpha_n", "beta", "eps"), wide=False),
    "softplus": Formula(softplus, 40, wide=False),
    "sigmoid": Formula(lambda x: 1.0 / (exp(-x) + 1.0), 16, wide=False),
    "hardsigmoid": Formula(_hardsigmoid, 6),
    "hardswish": Formula(lambda x: x * _hardsigmoid(x), 7),
    "silu": Formula(silu, 16, wide=False),
    "gelu": Formula(gelu, 32, wide=False),
    "gelu_tanh": Formula(gelu_tanh, 18, wide=False),
    "gelu_quick": Formula(partial(silu, slope=QUICK), 16, wide=False),
    "reglu": Formula(lambda x, gate: x * larger(gate, 0.0), 2),
    "swiglu": Formula(lambda x, gate: x * silu(gate), 17, wide=False),
    "swiglu_oai": Formula(_swiglu_oai, 20, ("alpha", "limit"), wide=False),
    "geglu none": Formula(lambda x, gate: x * gelu(gate), 33, wide=False),
    "geglu tanh": Formula(lambda x, gate: x * gelu_tanh(gate), 19, wide=False),
    "geglu quick": Formula(lambda x, gate: x * silu(gate, QUICK), 17, wide=False),
    "less": Formula(partial(_equal, "<")),
    "less_equal": Formula(partial(_equal, "<=")),
    "equal": Formula(partial(_equal, "==")),
    "not_equal": Formula(partial(_equal, "!=")),
    "minimum": Formula(lambda a, b: select(a.is_nan(), a, select(a < b, a, b)), 2),
    "maximum": Formula(lambda a, b: select(a.is_nan(), a, select(a > b, a, b)), 2),
    "clamp": Formula(_clamp, 2, ("min", "max")),
    "step": Formula(lambda x: select(x > 0.0, x.number(1.0), 0.0)),
    "where": Formula(select),
    "floor": Formula(_of("floor")),
    "ceil": Formula(_of("ceil")),
    "round": Formula(_of("rint")),
    "trunc": Formula(_of("trunc")),
    "cast": Formula(_same),
    "relu_backward": Formula(lambda grad, y: select(y.compare("<=", 0.0), 0.0, grad)),
    "silu_backward": Formula(silu_backward, 20, wide=False),
    "gelu_tanh_backward": Formula(gelu_tanh_backward, 26, wide=False),
    "assign": Formula(_same),
    "accumulate": Formula(lambda old, x: old + x, adds=True),
}
"""By operation; those of geglu by its form too."""


def formula_of(op: str, attrs: Any) -> Formula | None:
    """The formula of an operation with its attributes."""
    return FORMULAS.get(f"{op} {attrs['approximate']}" if op == "geglu" else op)
