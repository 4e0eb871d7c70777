"""Activation functions: torch's own, which compute half types in f32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.activation import QUICK
from opweave_torch.kernels.binding import in_order, rounded, scalar, widened, widening, widening_arrays
from opweave_torch.kernels.table import HALVES, KERNELS, NUMBERS, WIDE
from opweave_torch.memory import tensor
from opweave_torch.native import backward_function, out_function
from opweave_torch.tunables import limit

__all__ = ["FUNCTIONS", "SMALL", "gelu", "gelu_call", "gelu_quick_calls"]

_GELU: Final = out_function("gelu")

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "sigmoid": torch.sigmoid,
    "hardsigmoid": out_function("hardsigmoid"),
    "hardswish": out_function("hardswish"),
    "silu": out_function("silu"),
    "gelu_tanh": partial(_GELU, approximate="tanh"),
    # Above the threshold torch returns x itself; with its default of 20 the error shows in f64.
    "softplus": partial(out_function("softplus"), threshold=40),
}
"""torch's own function for each operation that has one; all take ``out=``."""

SMALL: Final = limit("small_elements", 1 << 16, 1, 1 << 22)
"""Elements up to which torch's own loop for the exact gelu takes less time than oneDNN and a look at the elements."""


def gelu_call(source: Tensor, target: Tensor) -> Call:
    """The exact form. For dense tensors on the CPU torch calls oneDNN, which takes 10 us to start and makes NaN of
    infinity; torch's own loop does neither."""
    dense = source.is_contiguous() and target.is_contiguous()
    if source.device.type != "cpu" or source.dtype is torch.float64 or not dense:
        return partial(_GELU, source, out=target)
    loop = _gelu_loop(source.view(-1), target.view(-1))
    if source.numel() <= SMALL.value:
        return loop
    return partial(_large_gelu, source, partial(_GELU, source, out=target), loop)


def gelu(source: Tensor, *, out: Tensor) -> None:
    """The exact form on the CPU, by torch's own loop."""
    if source.is_contiguous() and out.is_contiguous():
        _gelu_loop(source.view(-1), out.view(-1))()
    else:
        _GELU(source, out=out)


def _gelu_loop(source: Tensor, target: Tensor) -> Call:
    # torch leaves transposed matrices and single elements to its own loop.
    n = len(source)
    even = n - n % 2 if n > 3 else 0
    parts = [(source[i : i + 1], target[i : i + 1]) for i in range(even, n)]
    if even:
        parts.append((source[:even].view(-1, 2).t(), target[:even].view(-1, 2).t()))
    return in_order([partial(_GELU, x, out=y) for x, y in parts])


def _large_gelu(source: Tensor, fast: Call, safe: Call) -> None:
    # Where the sum of finite elements overflows, the loop is only slower.
    (fast if math.isfinite(torch.sum(source).item()) else safe)()


@KERNELS("relu", dtypes=NUMBERS, inplace=True)
def relu(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    source = tensor(x)
    return partial(torch.clamp_min, source, scalar(0, source), out=tensor(out))


@KERNELS(*FUNCTIONS, inplace=True)
def activation(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(FUNCTIONS[op], tensor(x), out=tensor(out))


_BACKWARD: Final[dict[str, Callable[..., Any]]] = {
    "relu_backward": partial(backward_function("threshold_backward"), threshold=0),
    "silu_backward": backward_function("silu_backward"),
    "gelu_tanh_backward": partial(backward_function("gelu_backward"), approximate="tanh"),
}


@KERNELS(*_BACKWARD, inplace=True)
def backward(stream: Stream, op: str, out: Arg, grad: Arg, x: Arg) -> Call:
    return partial(_BACKWARD[op], tensor(grad), tensor(x), grad_input=tensor(out))


@KERNELS("gelu", inplace=True)
def exact_gelu(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return gelu_call(tensor(x), tensor(out))


@KERNELS("leaky_relu", "elu", inplace=True)
def with_parameter(stream: Stream, op: str, out: Arg, x: Arg, **attrs: float) -> Call:
    """``negative_slope`` or ``alpha``, rounded to the type to compute in."""
    (value,) = attrs.values()
    return partial(out_function(op), tensor(x), float(rounded(value, widened(out.dtype))), out=tensor(out))


def _xielu_arrays(step: Step) -> Arrays:
    shape, dtype = step.out.shape, widened(step.out.dtype)
    names = ("below", "above", *(("wide",) if step.out.dtype is not dtype else ()))
    return {"positive": ("bool", shape), **dict.fromkeys(names, (dtype, shape))}


@KERNELS("xielu", inplace=True, workspace=_xielu_arrays)
def xielu(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    positive: Arg,
    below: Arg,
    above: Arg,
    wide: Arg | None = None,
    alpha_p: float,
    alpha_n: float,
    beta: float,
    eps: float,
) -> Call:
    source, target, mask, low, high = (tensor(arg) for arg in (wide or x, out, positive, below, above))
    calls: list[Call] = [] if wide is None else [partial(source.copy_, tensor(x))]
    numbers = [scalar(value, low) for value in (0, eps, alpha_n, beta - alpha_n, alpha_p, beta)]
    zero, least, bend, rest, curve, slope = numbers
    calls += [
        partial(torch.gt, source, zero, out=mask),
        partial(torch.clamp_max, source, least, out=low),
        partial(torch.expm1, low, out=low),
        partial(torch.mul, low, bend, out=low),
        partial(torch.addcmul, low, source, rest, out=low),
        partial(torch.addcmul, slope, source, curve, out=high),
        partial(torch.mul, high, source, out=high),
        partial(torch.where, mask, high, low, out=low if wide is not None else target),
    ]
    if wide is not None:
        calls.append(partial(target.copy_, low))
    return in_order(calls)


def gelu_quick_calls(source: Tensor, work: Tensor, target: Tensor) -> list[Call]:
    """``source * sigmoid(QUICK * source)`` by way of ``work``, as silu of the scaled operand, scaled back."""
    return [
        partial(torch.mul, source, scalar(QUICK, source), out=work),
        partial(out_function("silu"), work, out=work),
        partial(torch.mul, work, scalar(1 / QUICK, work), out=target),
    ]


@KERNELS("gelu_quick", dtypes=WIDE, inplace=True)
def gelu_quick(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    target = tensor(out)
    return in_order(gelu_quick_calls(tensor(x), target, target))


@KERNELS("gelu_quick", dtypes=HALVES, inplace=True, workspace=widening_arrays)
def gelu_quick_of_halves(stream: Stream, op: str, out: Arg, x: Arg, *, wide: Arg) -> Call:
    return widening(out, [x], wide, lambda x, _, target: gelu_quick_calls(x, x, target))
