"""Arithmetic, elementary functions and conversion, element by element: one preset call each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, f32
from opweave.graph.opdef import OPS
from opweave_torch.kernels.binding import in_order, rounded, same_elements, scalar, widening, widening_arrays
from opweave_torch.kernels.table import HALVES, INTEGERS, KERNELS, NUMBERS, PLAIN, WIDE
from opweave_torch.memory import tensor

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "less": torch.lt,
    "less_equal": torch.le,
    "equal": torch.eq,
    "not_equal": torch.ne,
}
"""torch's own function for each operation that has one, of any family."""


def preset(function: Callable[..., Any], out: Arg, *srcs: Arg) -> Call:
    """The call ``function(*srcs, out=out)``; in place the tensor's method ``function_``, which takes less time."""
    target, operands = tensor(out), [tensor(src) for src in srcs]
    in_place = getattr(Tensor, f"{function.__name__}_", None)
    if in_place is not None and same_elements(target, operands[0]):
        return partial(in_place, *operands)
    return partial(function, *operands, out=target)


def function(stream: Stream, op: str, out: Arg, *srcs: Arg) -> Call:
    """torch's own function, in the types and in place as the definition of the operation has it."""
    return preset(FUNCTIONS[op], out, *srcs)


for _op in FUNCTIONS:
    KERNELS(_op, dtypes=INTEGERS if _op == "sign" else OPS[_op].dtypes, inplace=bool(OPS[_op].inplace))(function)


@KERNELS("square", dtypes=NUMBERS, inplace=True)
def square(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    source = tensor(x)
    return partial(torch.mul, source, source, out=tensor(out))


@KERNELS("sign", inplace=True, workspace=lambda step: {"clamped": (step.out.dtype, step.out.shape)})
def sign(stream: Stream, op: str, out: Arg, x: Arg, *, clamped: Arg) -> Call:
    """torch's own gives 0 for NaN. Adding 0 times the clamped operand, which is finite or NaN, makes it NaN."""
    target, source, finite_or_nan = tensor(out), tensor(x), tensor(clamped)
    return in_order([
        partial(torch.clamp, source, -1.0, 1.0, out=finite_or_nan),
        partial(torch.sign, source, out=target),
        partial(torch.add, target, finite_or_nan, alpha=0.0, out=target),
    ])  # fmt: skip


# --- scale ----------------------------------------------------------------------------------------------------------


def _line(source: Tensor, target: Tensor, scale: float, bias: float) -> Call:
    """``target = scale * source + bias`` in one pass, where both numbers are exact in their dtype."""
    if bias == 0:
        return partial(torch.mul, source, scalar(scale, source), out=target)
    if scale == 1:
        return partial(torch.add, source, scalar(bias, source), out=target)
    return partial(torch.add, scalar(bias, source), source, alpha=scale, out=target)


@KERNELS("scale", dtypes=WIDE, inplace=True)
def scale(stream: Stream, op: str, out: Arg, x: Arg, *, scale: float, bias: float) -> Call:
    return _line(tensor(x), tensor(out), rounded(scale, out.dtype), bias)


def _scale_arrays(step: Step) -> Arrays:
    exact = all(rounded(number, step.out.dtype) == number for number in step.attrs.values())
    return {} if step.attrs["bias"] == 0 or exact else widening_arrays(step)


@KERNELS("scale", dtypes=HALVES, inplace=True, workspace=_scale_arrays)
def scale_of_halves(
    stream: Stream, op: str, out: Arg, x: Arg, *, scale: float, bias: float, wide: Arg | None = None
) -> Call:
    """Both numbers are f32. torch rounds them to the type of the operand, except a factor that is a CPU tensor."""
    factor = rounded(scale, f32)
    if wide is not None:
        return widening(out, [x], wide, lambda x, _, target: [_line(x, target, factor, bias)])
    if bias == 0:
        return partial(torch.mul, tensor(x), torch.tensor(factor), out=tensor(out))
    return _line(tensor(x), tensor(out), scale, bias)


# --- types ----------------------------------------------------------------------------------------------------------


@KERNELS("cast", dtypes=PLAIN)
def cast(stream: Stream, op: str, out: Arg, x: Arg, *, dtype: DType) -> Call:
    return partial(tensor(out).copy_, tensor(x))
