"""Activations: a few ufunc passes each, in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import inf, pi, sqrt
from typing import Final, NamedTuple

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.activation import QUICK
from opweave_cpu.exponential import exponential
from opweave_cpu.kernels.elementwise import one_pass
from opweave_cpu.kernels.selection import clamping
from opweave_cpu.kernels.table import HALVES, KERNELS, WIDE_NUMBERS
from opweave_cpu.tiles import (
    Array,
    Body,
    bind_tiled,
    compute_dtype,
    constant,
    tile_scratch,
    window,
    worker_scratch,
)
from opweave_cpu.tunables import SPREAD_PASS, TILE
from opweave_cpu.workers import Cut, at, bind_workers, full_cuts, worker_count


@KERNELS("relu", dtypes=WIDE_NUMBERS, inplace=True)
def relu(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    if out.nbytes >= SPREAD_PASS.value:
        return one_pass(stream, clamping(0, inf, out.dtype), out, x)
    return partial(np.maximum, x.view, constant(0, out.dtype), out=out.view)  # NumPy deprecates a third position here


_BITS: Final = as_dtype("i16")
_INFINITY: Final = {"f16": 0x7C00, "bf16": 0x7F80}


@cache
def _relu_bits(dtype: DType) -> Body:
    """Takes the bits as integers, whose sign is that of the number: many times faster than converting. A NaN, whose
    bits are above those of infinity, comes through whatever its sign."""
    zero, magnitude, infinity = constant(0, _BITS), constant(0x7FFF, _BITS), constant(_INFINITY[dtype.name], _BITS)

    def body(out: Array, x: Array, t: Array) -> None:
        np.bitwise_and(x, magnitude, t)
        np.greater(t, infinity, t)
        np.multiply(t, x, t)
        np.maximum(x, zero, out=out)
        np.bitwise_or(out, t, out)

    return body


@KERNELS("relu", dtypes=HALVES, inplace=True, workspace=partial(tile_scratch, tiles=1, dtype=_BITS))
def relu_of_halves(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg) -> Call:
    target, source = (a.view.view(_BITS.numpy) for a in (out, x))
    return bind_tiled(stream, _relu_bits(out.dtype), target, [source], tiles)


@cache
def _leaky_relu_body(dtype: DType, negative_slope: float) -> Body:
    """The larger of x and the product, for a slope above 1 the smaller."""
    slope, choose = constant(negative_slope, dtype), np.maximum if negative_slope <= 1 else np.minimum

    def body(out: Array, x: Array, t: Array) -> None:
        np.multiply(x, slope, t)
        choose(x, t, out=out)

    return body


@cache
def _elu_body(dtype: DType, alpha: float) -> Body:
    """max(x, 0) + alpha * expm1(min(x, 0)), of which one term is 0."""
    zero, factor = constant(0, dtype), constant(alpha, dtype)

    def body(out: Array, x: Array, t: Array) -> None:
        np.minimum(x, zero, out=t)
        np.expm1(t, t)
        np.multiply(t, factor, t)
        np.maximum(x, zero, out=out)
        np.add(out, t, out)

    return body


@cache
def _xielu_body(dtype: DType, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Body:
    """Both branches, of which the one for x below 0 is multiplied by 0 or 1, and the other one sees max(x, 0)."""
    zero, least = constant(0, dtype), constant(eps, dtype)
    curve, slope, bend, rest = (constant(c, dtype) for c in (alpha_p, beta, alpha_n, beta - alpha_n))

    def body(out: Array, x: Array, t: Array, q: Array, below: Array) -> None:
        np.less_equal(x, zero, below)
        np.minimum(x, zero, out=q)
        np.minimum(q, least, out=t)
        np.expm1(t, t)
        np.multiply(t, bend, t)
        np.multiply(t, below, t)
        np.multiply(q, rest, q)
        np.add(t, q, t)
        np.maximum(x, zero, out=q)
        np.multiply(q, curve, out)
        np.add(out, slope, out)
        np.multiply(out, q, out)
        np.add(out, t, out)

    return body


@cache
def _softplus_body(dtype: DType) -> Body:
    """max(x, 0) + log1p(exp(-|x|)), which never overflows."""
    power, base = exponential(dtype)
    zero, factor = constant(0, dtype), constant(-base, dtype)

    def body(out: Array, x: Array, t: Array) -> None:
        np.absolute(x, t)
        np.multiply(t, factor, t)
        power(t, t)
        np.log1p(t, t)
        np.maximum(x, zero, out=out)
        np.add(out, t, out)

    return body


@cache
def _sigmoid_body(dtype: DType) -> Body:
    """1 / (1 + exp(-x)); exp overflows to infinity for x far below 0, whose reciprocal is the right 0."""
    power, base = exponential(dtype)
    one, factor = constant(1, dtype), constant(-base, dtype)

    def body(out: Array, x: Array) -> None:
        np.multiply(x, factor, out)
        power(out, out)
        np.add(out, one, out)
        np.reciprocal(out, out)

    return body


@cache
def _hardsigmoid_body(dtype: DType) -> Body:
    """x / 6 + 1/2 between 0 and 1."""
    sixth, half, zero, one = (constant(c, dtype) for c in (1 / 6, 0.5, 0, 1))

    def body(out: Array, x: Array) -> None:
        np.multiply(x, sixth, out)
        np.add(out, half, out)
        np.clip(out, zero, one, out)

    return body


@cache
def _hardswish_body(dtype: DType) -> Body:
    hardsigmoid = _hardsigmoid_body(dtype)

    def body(out: Array, x: Array, t: Array) -> None:
        hardsigmoid(t, x)
        np.multiply(x, t, out)

    return body


@cache
def silu_body(dtype: DType, slope: float = 1.0) -> Body:
    """x / (1 + exp(-slope * x)), with one scratch array."""
    power, base = exponential(dtype)
    one, factor = constant(1, dtype), constant(-slope * base, dtype)

    def body(out: Array, x: Array, t: Array) -> None:
        np.multiply(x, factor, t)
        power(t, t)
        np.add(t, one, t)
        np.divide(x, t, out)

    return body


@cache
def gelu_tanh_body(dtype: DType) -> Body:
    """x / (1 + exp(-2u)) with 2u = x (a + b x²), with one scratch array."""
    power, base = exponential(dtype)
    a = -2 * sqrt(2 / pi) * base
    linear, cubic, one = constant(a, dtype), constant(a * 0.044715, dtype), constant(1, dtype)

    def body(out: Array, x: Array, t: Array) -> None:
        np.multiply(x, x, t)
        np.multiply(t, cubic, t)
        np.add(t, linear, t)
        np.multiply(t, x, t)
        power(t, t)
        np.add(t, one, t)
        np.divide(x, t, out)

    return body


# The upper tail of the normal distribution is Q(a) = exp(-a²/2) R(a) with R rational, the form of W. J. Cody, "Rational
# Chebyshev approximations for the error function", Math. Comp. 23 (1969) 631-637, which holds the relative error of the
# tail. Numerators and monic denominators, constant term first, fitted here for the two widths: largest relative error
# of R 4.8e-9 on 0 .. 13 and 4.9e-17 on 0 .. 37. All coefficients are positive, so that nothing cancels. Where ``a`` is
# cut, two beyond these ranges, a Q(a) is 0.
TAIL: Final[dict[int, tuple[float, Sequence[float], Sequence[float]]]] = {
    4: (
        15.0,
        (49.93746928442097, 43.443544113005586, 18.056036045272126, 3.9759834776440477, 0.3989482638966621),
        (99.8749380968224, 166.5757935115097, 119.08246047167897, 46.24282014370791, 9.967076762705824),
    ),
    8: (
        39.0,
        (
            146370.75824649932, 226454.43728351465, 173347.0586321812, 84303.57492018725, 28423.00057426589,
            6861.029493118699, 1185.6019401387002, 141.9025676709668, 10.754963556282659, 0.39894228039997653,
        ),
        (
            292741.51649299863, 686482.8108828076, 748057.3950778935, 500087.1692968926, 227814.457512564,
            74163.83912268422, 17551.747646228938, 2998.822037671408, 356.69698843377876, 26.958695742068652,
        ),
    ),
}  # fmt: skip


@cache
def normal_tail(dtype: DType) -> Callable[[Array, Array, Array], None]:
    """``tail(a, p, q)``, which sets ``p`` to a Q(a) for ``a`` from 0 on, where Q is the upper tail of the normal
    distribution. It cuts ``a`` at the limit of ``dtype``; ``q`` is scratch."""
    limit, *coefficients = TAIL[dtype.itemsize]
    numerator, denominator = ([constant(c, dtype) for c in reversed(cs)] for cs in coefficients)
    power, base = exponential(dtype)
    largest, factor = constant(limit, dtype), constant(-0.5 * base, dtype)

    def tail(a: Array, p: Array, q: Array) -> None:
        np.minimum(a, largest, out=a)
        np.multiply(a, numerator[0], p)
        for c in numerator[1:-1]:
            np.add(p, c, p)
            np.multiply(p, a, p)
        np.add(p, numerator[-1], p)
        np.add(a, denominator[0], q)
        for c in denominator[1:]:
            np.multiply(q, a, q)
            np.add(q, c, q)
        np.divide(p, q, p)
        np.multiply(p, a, p)
        np.multiply(a, a, q)
        np.multiply(q, factor, q)
        power(q, q)
        np.multiply(p, q, p)

    return tail


@cache
def gelu_body(dtype: DType) -> Body:
    """x Φ(x) = x/2 + |x|/2 - |x| Q(|x|), where Φ is the normal distribution and Q = 1 - Φ its upper tail.

    Accurate far below 0 too, where 1 + erf(x/√2) would cancel. Minus infinity gives NaN, as in the definition. Takes
    three scratch arrays.
    """
    tail, half = normal_tail(dtype), constant(0.5, dtype)

    def body(out: Array, x: Array, a: Array, p: Array, q: Array) -> None:
        np.absolute(x, a)
        tail(a, p, q)
        np.multiply(x, half, out)
        np.absolute(out, q)
        np.add(out, q, out)
        np.subtract(out, p, out)

    return body


class _Form(NamedTuple):
    """What makes the body for a type and the attributes, how many scratch arrays that needs, and whether the first of
    them may be the output."""

    make: Callable[..., Body]
    tiles: int
    in_output: bool


_FORMS: Final = {
    "leaky_relu": _Form(_leaky_relu_body, 1, True),
    "elu": _Form(_elu_body, 1, False),
    "xielu": _Form(_xielu_body, 3, False),
    "softplus": _Form(_softplus_body, 1, False),
    "sigmoid": _Form(_sigmoid_body, 0, False),
    "hardsigmoid": _Form(_hardsigmoid_body, 0, False),
    "silu": _Form(silu_body, 1, True),
    "gelu": _Form(gelu_body, 3, True),
    "gelu_tanh": _Form(gelu_tanh_body, 1, True),
    "gelu_quick": _Form(partial(silu_body, slope=QUICK), 1, True),
    "hardswish": _Form(_hardswish_body, 1, True),
}


def _workspace(step: Step) -> Arrays:
    return tile_scratch(step, _FORMS[step.op].tiles)


@KERNELS(*_FORMS, inplace=True, workspace=_workspace)
def activation(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg | None = None, **attrs: float) -> Call:
    form = _FORMS[op]
    body = form.make(compute_dtype(out.dtype), **attrs)
    return bind_tiled(stream, body, out.view, [x.view], tiles, in_output=form.in_output)


# --- gradients ------------------------------------------------------------------------------------------------------

_SIGNED: Final = {size: np.dtype(f"i{size}") for size in (2, 4, 8)}
_KEEPS: Final = constant(1, as_dtype("i8"))


def _backward_cuts(out: Arg) -> list[Cut]:
    return full_cuts(out.shape, TILE.value // out.dtype.itemsize)


def _backward_workers(out: Arg) -> int:
    return worker_count(len(_backward_cuts(out)), 4 * out.size)


def _keep_workspace(step: Step) -> Arrays:
    elements = min(step.out.size, TILE.value // step.out.dtype.itemsize)
    return worker_scratch(_backward_workers(step.out), as_dtype("i8"), keep=elements)


@KERNELS("relu_backward", inplace=True, workspace=_keep_workspace)
def relu_backward(stream: Stream, op: str, out: Arg, grad: Arg, y: Arg, *, keep: Arg) -> Call:
    """Keeps all bits of a gradient or none: a product would make NaN of infinity, and NumPy's copy under a mask takes
    four times as long."""
    bits, source, zero = _SIGNED[out.dtype.itemsize], y.view, constant(0, y.dtype)
    target, given = out.view.view(bits), grad.view.view(bits)

    def calls(cut: Cut, worker: int) -> Iterator[Call]:
        some = at(*cut, ...)  # an array also where there are no axes
        kept = window(keep.view[worker], source[some].shape)
        yield partial(np.less_equal, source[some], zero, kept.view(np.bool_))
        yield partial(np.subtract, kept, _KEEPS, kept)
        yield partial(np.bitwise_and, given[some], kept, target[some])

    return bind_workers(stream, _backward_cuts(out), _backward_workers(out), calls)


@cache
def _silu_backward_body(dtype: DType) -> Body:
    sigmoid, one = _sigmoid_body(dtype), constant(1, dtype)

    def body(out: Array, x: Array, grad: Array, s: Array, t: Array) -> None:
        sigmoid(s, x)
        np.subtract(one, s, t)
        np.multiply(t, x, t)
        np.add(t, one, t)
        np.multiply(t, s, t)
        np.multiply(t, grad, out)

    return body


@cache
def _gelu_tanh_backward_body(dtype: DType) -> Body:
    """dy s (1 + (1 - s) x u') with s = sigmoid u and u = x (a + b x²)."""
    a = 2 * sqrt(2 / pi)
    sigmoid, one, linear = _sigmoid_body(dtype), constant(1, dtype), constant(a, dtype)
    cubic, third = constant(a * 0.044715, dtype), constant(3, dtype)

    def body(out: Array, x: Array, grad: Array, s: Array, t: Array, u: Array) -> None:
        np.multiply(x, x, t)
        np.multiply(t, cubic, t)
        np.add(t, linear, u)
        np.multiply(u, x, u)
        sigmoid(s, u)
        np.multiply(t, third, t)
        np.add(t, linear, t)
        np.multiply(t, x, t)
        np.subtract(one, s, u)
        np.multiply(t, u, t)
        np.add(t, one, t)
        np.multiply(t, s, t)
        np.multiply(t, grad, out)

    return body


_BACKWARD: Final = {
    "silu_backward": _Form(_silu_backward_body, 2, True),
    "gelu_tanh_backward": _Form(_gelu_tanh_backward_body, 3, True),
}


@KERNELS(*_BACKWARD, inplace=True, workspace=lambda step: tile_scratch(step, _BACKWARD[step.op].tiles))
def backward(stream: Stream, op: str, out: Arg, grad: Arg, x: Arg, *, tiles: Arg) -> Call:
    body = _BACKWARD[op].make(compute_dtype(out.dtype))
    return bind_tiled(stream, body, out.view, [x.view, grad.view], tiles, in_output=True)
