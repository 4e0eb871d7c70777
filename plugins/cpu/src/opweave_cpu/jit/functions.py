"""Elementary functions of vectors in f32, accurate to a few units in the last place.

Ranges are reduced as in W. J. Cody and W. Waite, "Software Manual for the Elementary Functions", 1980, chapters 5, 6.
Polynomials were fitted here, by weighted least squares whose weights go to the largest error (C. L. Lawson, 1961); the
errors named are the largest relative ones of the function, before rounding. NaN comes through all of them.
"""

from __future__ import annotations

from math import e, factorial, log, log2, pi, sqrt
from typing import Final

from opweave_cpu.jit.vectors import Vector, fma, intrinsic, polynomial, select
from opweave_cpu.kernels.activation import TAIL

__all__ = [
    "absolute", "erf", "exp", "expm1", "gelu", "gelu_tanh", "gelu_tanh_backward", "larger", "log1p_of", "logarithm",
    "silu", "silu_backward", "smaller", "softplus", "tanh",
]  # fmt: skip

_LN2_HIGH: Final = 0.693359375
"""ln 2 in 9 bits, so that its products with whole numbers up to 2**15 are exact."""
_LN2_LOW: Final = log(2) - _LN2_HIGH

_ROUNDER: Final = 1.5 * 2**23
"""Added to a number below 2**22 it leaves the nearest whole number in the last bits."""
_ROUNDER_BITS: Final = 0x4B400000

_EXP: Final = (0.4999999815394633, 0.16666543619531363, 0.04166719989614182, 0.008366520718611915, 0.001388251896227088)
"""(exp(r) - 1 - r) / r² for |r| up to ln(2) / 2; error of exp(r) - 1: 1.4e-8."""

_LOG: Final = (
    0.33333331709694813, -0.2500082105621472, 0.20001226667462602, -0.16623356479391876, 0.1420176246700181,
    -0.1316019505297, 0.12761550360234136, -0.07634429907587083,
)  # fmt: skip
"""(log(1 + f) - f + f²/2) / f³ for 1 + f between √½ and √2; error of log(1 + f): 5.9e-9."""


def absolute(x: Vector) -> Vector:
    return intrinsic("fabs", x) if x.is_float else select(x < 0, -x, x)


def smaller(a: Vector, b: Vector | float) -> Vector:
    """The smaller one; ``a`` where that is NaN."""
    return select(a > b, b, a)


def larger(a: Vector, b: Vector | float) -> Vector:
    """The larger one; ``a`` where that is NaN."""
    return select(a < b, b, a)


def _reduced(x: Vector) -> tuple[Vector, Vector]:
    """A whole number n and r with x = n ln 2 + r, |r| at most about ln(2) / 2."""
    shifted = fma(x, log2(e), _ROUNDER)
    n = shifted - _ROUNDER
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    return shifted.bits("i32") - _ROUNDER_BITS, r


def _power_of_two(n: Vector) -> Vector:
    """2**n for n from -126 to 127."""
    return ((n + 127) << 23).bits("f32")


def exp(x: Vector) -> Vector:
    """e**x, down to the subnormal numbers."""
    n, r = _reduced(smaller(larger(x, -104.0), 89.0))
    p = fma(polynomial(r, _EXP) * r, r, r) + 1.0
    half = n >> 1
    return p * _power_of_two(half) * _power_of_two(n - half)


def expm1(x: Vector) -> Vector:
    """e**x - 1, accurate near 0 too."""
    n, r = _reduced(smaller(larger(x, -18.0), 89.0))
    q = fma(polynomial(r, _EXP) * r, r, r)
    power = _power_of_two(n - 1)  # half of the factor, which for the largest numbers has no representation
    return fma(power, q, power - 0.5) * 2.0


def logarithm(x: Vector) -> Vector:
    """ln x: minus infinity at 0, NaN below."""
    tiny = x < 1.1754943508222875e-38
    bits = select(tiny, x * 8388608.0, x).bits("i32")
    # The exponent that brings the fraction to between √½ and √2.
    raised = bits - 0x3F3504F3
    n = (raised >> 23) + select(tiny, x.number(-23, "i32"), 0)
    f = ((raised & 0x7FFFFF) + 0x3F3504F3).bits("f32") - 1.0
    square = f * f
    tail = fma(polynomial(f, _LOG) * f, square, square * -0.5)
    whole = n.to("f32")
    result = fma(whole, _LN2_HIGH, fma(whole, _LN2_LOW, tail) + f)
    result = select(x.compare("==", float("inf")), x, result)
    result = select(x.compare("==", 0.0), float("-inf"), result)
    return select(x < 0.0, float("nan"), select(x.is_nan(), x, result))


def log1p_of(x: Vector) -> Vector:
    """ln(1 + x), accurate near 0 too: the rounding error of 1 + x is the same in both factors (W. Kahan)."""
    u = x + 1.0
    down = u - 1.0
    result = logarithm(u) * (x / down)
    result = select(down.compare("==", 0.0), x, result)
    return select(u.compare("==", float("inf")), x, result)


def softplus(x: Vector) -> Vector:
    """max(x, 0) + log1p(exp(-|x|)), which never overflows."""
    return larger(x, 0.0) + log1p_of(exp(-absolute(x)))


def tanh(x: Vector) -> Vector:
    """(e - 1) / (e + 1) with e = exp(2 |x|), and the sign of x."""
    q = expm1(smaller(absolute(x), 10.0) * 2.0)
    return intrinsic("copysign", q / (q + 2.0), x)


def silu(x: Vector, slope: float | Vector = 1.0) -> Vector:
    """x / (1 + exp(-slope x)); exp overflows to infinity for x far below 0, for which the result is the right 0."""
    return x / (exp(x * (-slope)) + 1.0)


def gelu_tanh(x: Vector) -> Vector:
    """x / (1 + exp(-2u)) with 2u = x (a + b x²)."""
    a = -2 * sqrt(2 / pi)
    return x / (exp(fma(x * x, a * 0.044715, a) * x) + 1.0)


def silu_backward(grad: Vector, x: Vector) -> Vector:
    """dy s (1 + x (1 - s)) with s = 1 / (1 + exp(-x)); where exp overflows, 0."""
    s = 1.0 / (exp(-x) + 1.0)
    return grad * s * fma(x, 1.0 - s, 1.0)


def gelu_tanh_backward(grad: Vector, x: Vector) -> Vector:
    """dy s (1 + x (1 - s) 2u') with s = 1 / (1 + exp(-2u)) and 2u = x (a + b x²)."""
    a = 2 * sqrt(2 / pi)
    square = x * x
    s = 1.0 / (exp(fma(square, -a * 0.044715, -a) * x) + 1.0)
    slope = fma(square, 3 * a * 0.044715, a)
    return grad * s * fma(x * (1.0 - s), slope, 1.0)


def _upper_tail(a: Vector) -> Vector:
    """Q(a), the upper tail of the normal distribution from 0 on: see `TAIL`. ``a`` is not above its limit."""
    _, numerator, denominator = TAIL[4]
    return polynomial(a, numerator) / polynomial(a, (*denominator, 1.0)) * exp(a * a * -0.5)


def gelu(x: Vector) -> Vector:
    """x/2 + |x|/2 - |x| Q(|x|), where Q is the upper tail of the normal distribution."""
    whole = absolute(x)
    a = smaller(whole, TAIL[4][0])
    return x * 0.5 + whole * 0.5 - _upper_tail(a) * a


_ERF: Final = [2 / sqrt(pi) * (-1) ** n / (factorial(n) * (2 * n + 1)) for n in range(11)]
"""The Taylor series of erf(x) / x in x²: its last term is below half a unit in the last place of erf(1)."""


def erf(x: Vector) -> Vector:
    """Up to |x| = 1 the Taylor series, which keeps the digits near 0; from there on 1 - 2 Q(√2 |x|)."""
    a = absolute(x)
    near = polynomial(a * a, _ERF) * a
    far = 1.0 - _upper_tail(smaller(a * sqrt(2), TAIL[4][0])) * 2.0
    return intrinsic("copysign", select(a < 1.0, near, far), x)
