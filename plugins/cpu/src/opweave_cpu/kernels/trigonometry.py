"""Trigonometric and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

from functools import cache, partial
from math import factorial, pi, sqrt
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave_cpu.kernels.activation import normal_tail
from opweave_cpu.kernels.elementwise import one_pass
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, Body, bind_tiled, compute_dtype, constant, tile_scratch

_UFUNCS: Final[dict[str, Any]] = {
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
}


@KERNELS(*_UFUNCS, inplace=True, workspace=tile_scratch)
def trigonometry(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg | None = None) -> Call:
    return one_pass(stream, _UFUNCS[op], out, x, tiles=tiles)


_TERMS: Final = {4: 11, 8: 19}
"""Of the Taylor series of erf, by bytes of the type: its last one is below half a unit in the last place of erf(1)."""


@cache
def _erf_body(dtype: DType) -> Body:
    """Up to |x| = 1 the Taylor series of erf, which keeps the digits near 0; from there on 1 - 2 Q(√2 |x|), where Q is
    the upper tail of the normal distribution. Takes four scratch arrays."""
    series = [
        constant(2 / sqrt(pi) * (-1) ** n / (factorial(n) * (2 * n + 1)), dtype)
        for n in reversed(range(_TERMS[dtype.itemsize]))
    ]
    tail, one, two, root = normal_tail(dtype), constant(1, dtype), constant(2, dtype), constant(sqrt(2), dtype)

    def body(out: Array, x: Array, a: Array, p: Array, q: Array, s: Array) -> None:
        np.absolute(x, a)
        np.maximum(a, one, out=s)
        np.multiply(s, root, s)
        tail(s, p, q)
        np.divide(p, s, p)
        np.multiply(p, two, p)
        np.subtract(one, p, p)
        np.greater_equal(a, one, s)
        np.multiply(p, s, p)
        np.minimum(a, one, out=a)
        np.multiply(a, a, q)
        np.multiply(q, series[0], s)
        for c in series[1:-1]:
            np.add(s, c, s)
            np.multiply(s, q, s)
        np.add(s, series[-1], s)
        np.multiply(s, a, s)
        np.less(a, one, q)
        np.multiply(s, q, s)
        np.add(p, s, p)
        np.copysign(p, x, out)

    return body


@KERNELS("erf", inplace=True, workspace=partial(tile_scratch, tiles=4))
def erf(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg | None = None) -> Call:
    return bind_tiled(stream, _erf_body(compute_dtype(out.dtype)), out.view, [x.view], tiles)
