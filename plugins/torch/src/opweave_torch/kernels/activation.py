"""Activation functions: torch's own, which compute half types in f32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.binding import in_order, rounded, scalar, widened, widening, widening_arrays
from opweave_torch.kernels.table import HALVES, KERNELS, NUMBERS, WIDE
from opweave_torch.memory import tensor

__all__ = ["gelu_call", "gelu_quick_calls", "unit"]

_NN: Final[Any] = torch._C._nn  # whose functions, other than those of torch.nn.functional, take out=

QUICK: Final = 1.702

unit: Final[dict[str, Callable[..., Any]]] = {
    "sigmoid": torch.sigmoid,
    "hardsigmoid": _NN.hardsigmoid,
    "hardswish": _NN.hardswish,
    "silu": _NN.silu,
    "gelu_tanh": partial(_NN.gelu, approximate="tanh"),
    # From where eˣ is all that counts; torch's 20 shows in f64.
    "softplus": partial(_NN.softplus, threshold=40),
}
"""torch's function for each that has one, taking ``out=``."""

SMALL: Final = 1 << 16
"""Elements up to which torch's own loop for the exact gelu takes less time than oneDNN and a look at the elements."""


def gelu_call(source: torch.Tensor, target: torch.Tensor) -> Call:
    """The exact form. For packed tensors on the CPU torch calls oneDNN, which needs 10 us to start, and makes NaN of
    infinity; torch's own loop does neither."""
    packed = source.is_contiguous() and target.is_contiguous()
    if source.device.type != "cpu" or source.dtype is torch.float64 or not packed:
        return partial(_NN.gelu, source, out=target)
    loop = _gelu_loop(source.view(-1), target.view(-1))
    if source.numel() <= SMALL:
        return loop
    return partial(_large_gelu, source, partial(_NN.gelu, source, out=target), loop)


def _gelu_loop(source: torch.Tensor, target: torch.Tensor) -> Call:
    # A matrix seen by columns does not count as packed; a single element is none for oneDNN either.
    n = len(source)
    even = n - n % 2 if n > 3 else 0
    pieces = [(source[i : i + 1], target[i : i + 1]) for i in range(even, n)]
    if even:
        pieces.append((source[:even].view(-1, 2).t(), target[:even].view(-1, 2).t()))
    return in_order([partial(_NN.gelu, x, out=y) for x, y in pieces])


def _large_gelu(source: torch.Tensor, fast: Call, safe: Call) -> None:
    # A sum that overflows only takes the longer way.
    (fast if math.isfinite(torch.sum(source).item()) else safe)()


@KERNELS("relu", dtypes=NUMBERS, inplace=True)
def relu(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    source = tensor(x)
    return partial(torch.clamp_min, source, scalar(0, source), out=tensor(out))


@KERNELS(*unit, inplace=True)
def activation(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(unit[op], tensor(x), out=tensor(out))


@KERNELS("gelu", inplace=True)
def gelu(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return gelu_call(tensor(x), tensor(out))


def _parameter(value: float, out: Arg) -> float:
    return float(rounded(value, widened(out.dtype)))


@KERNELS("leaky_relu", inplace=True)
def leaky_relu(stream: Stream, op: str, out: Arg, x: Arg, *, negative_slope: float) -> Call:
    return partial(_NN.leaky_relu, tensor(x), _parameter(negative_slope, out), out=tensor(out))


@KERNELS("elu", inplace=True)
def elu(stream: Stream, op: str, out: Arg, x: Arg, *, alpha: float) -> Call:
    return partial(_NN.elu, tensor(x), _parameter(alpha, out), out=tensor(out))


def gelu_quick_calls(source: torch.Tensor, work: torch.Tensor, target: torch.Tensor) -> list[Call]:
    """``source * sigmoid(QUICK * source)`` by way of ``work``, as silu of the scaled operand, scaled back."""
    return [
        partial(torch.mul, source, scalar(QUICK, source), out=work),
        partial(_NN.silu, work, out=work),
        partial(torch.mul, work, scalar(1 / QUICK, work), out=target),
    ]


@KERNELS("gelu_quick", dtypes=WIDE, inplace=True)
def gelu_quick(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    target = tensor(out)
    return in_order(gelu_quick_calls(tensor(x), target, target))


@KERNELS("gelu_quick", dtypes=HALVES, inplace=True, workspace=widening_arrays)
def gelu_quick_of_halves(stream: Stream, op: str, out: Arg, x: Arg, *, wide: Arg) -> Call:
    return widening(out, [x], wide, lambda x, _, target: gelu_quick_calls(x, x, target))
