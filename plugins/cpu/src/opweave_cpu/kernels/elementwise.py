"""Arithmetic, elementary functions and conversion, element by element: one preset call each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType
from opweave_cpu.hardware import has_avx512
from opweave_cpu.kernels.table import HALVES, INTEGERS, KERNELS, NUMBERS, PLAIN, WIDE
from opweave_cpu.tiles import (
    Array,
    Body,
    bind_tiled,
    compute_dtype,
    constant,
    copy_call,
    spread_pass,
    tile_scratch,
)
from opweave_cpu.tunables import SPREAD_PASS

_UFUNCS: Final[dict[str, Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "neg": np.negative,
    "abs": np.absolute,
    "sign": np.sign,
    "square": np.square,
    "reciprocal": np.reciprocal,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
_FUNCTIONS: Final = ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh")


def one_pass(stream: Stream, ufunc: Callable[..., Any], out: Arg, *srcs: Arg, tiles: Arg | None = None) -> Call:
    """The call ``ufunc(*srcs, out)``.

    Half types, for which `tile_scratch` asks for ``tiles``, go through f32: most of NumPy's own loops over half types
    convert one element at a time, and call the C library for each where they need it.
    """
    if tiles is None:
        return spread_pass(stream, ufunc, out.view, *[x.view for x in srcs])
    return bind_tiled(stream, partial(_apply, ufunc), out.view, [x.view for x in srcs], tiles)


def _apply(ufunc: Callable[..., Any], out: Array, *srcs: Array) -> None:
    ufunc(*srcs, out)


_VIEW: Final = attrgetter("view")


def _needs_vectors_of_halves(step: Step) -> str | None:
    return None if has_avx512() else "on this processor NumPy computes f16 one by one"


@KERNELS("add", "sub", "mul", "neg", "abs", "sign", "square", dtypes=NUMBERS, inplace=True)
@KERNELS("div", "reciprocal", inplace=True)
@KERNELS("sqrt", "pow", *_FUNCTIONS, dtypes=WIDE, inplace=True)
@KERNELS(*_FUNCTIONS, dtypes="f16", inplace=True, when=_needs_vectors_of_halves)
@KERNELS("sqrt", "pow", *_FUNCTIONS, dtypes=HALVES, inplace=True, workspace=tile_scratch)
def elementwise(stream: Stream, op: str, out: Arg, *srcs: Arg, tiles: Arg | None = None) -> Call:
    ufunc, target = _UFUNCS[op], out.view
    if tiles is None and target.nbytes < SPREAD_PASS.value:
        # As `one_pass`, in fewer calls while a program is built.
        return partial(ufunc, *map(_VIEW, srcs), target)
    return one_pass(stream, ufunc, out, *srcs, tiles=tiles)


def _rsqrt(out: Array, x: Array) -> None:
    np.sqrt(x, out)
    np.reciprocal(out, out)


@KERNELS("rsqrt", inplace=True, workspace=tile_scratch)
def rsqrt(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg | None = None) -> Call:
    return bind_tiled(stream, _rsqrt, out.view, [x.view], tiles)


@cache
def _whole_pow(dtype: DType) -> Body:
    """Powers of integers; NumPy refuses negative exponents. There the base becomes 0, unless it is 1 or -1, and the
    exponent a positive one that is odd where it was odd."""
    zero, one, largest = constant(0, dtype), constant(1, dtype), constant(np.iinfo(dtype.numpy).max, dtype)

    def body(out: Array, a: Array, b: Array, base: Array, extra: Array) -> None:
        np.less(b, zero, extra)
        np.absolute(a, base)
        np.not_equal(base, one, base)
        np.multiply(base, extra, base)
        np.subtract(one, base, base)
        np.multiply(base, a, base)
        np.add(extra, extra, extra)
        np.bitwise_and(b, largest, out)  # without its sign
        np.bitwise_or(out, extra, extra)  # at least 2 where it was negative
        np.power(base, extra, out)

    return body


@KERNELS("pow", dtypes=INTEGERS, inplace=True, workspace=partial(tile_scratch, tiles=2))
def whole_pow(stream: Stream, op: str, out: Arg, a: Arg, b: Arg, *, tiles: Arg) -> Call:
    return bind_tiled(stream, _whole_pow(out.dtype), out.view, [a.view, b.view], tiles)


@KERNELS("scale", inplace=True, workspace=tile_scratch)
def scale(stream: Stream, op: str, out: Arg, x: Arg, *, scale: float, bias: float, tiles: Arg | None = None) -> Call:
    dtype = compute_dtype(out.dtype)
    factor, offset = constant(scale, dtype), constant(bias, dtype)
    if dtype is out.dtype and (bias == 0 or scale == 1):
        return partial(np.add, x.view, offset, out.view) if bias else partial(np.multiply, x.view, factor, out.view)

    def body(out: Array, x: Array) -> None:
        np.multiply(x, factor, out)
        np.add(out, offset, out)

    return bind_tiled(stream, body, out.view, [x.view], tiles)


@KERNELS("cast", dtypes=PLAIN)
def cast(stream: Stream, op: str, out: Arg, x: Arg, *, dtype: DType) -> Call:
    return copy_call(stream, out.view, x.view)
