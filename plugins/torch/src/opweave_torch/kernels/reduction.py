"""Reductions over axes. torch accumulates half types in f32."""

from __future__ import annotations

import math
from functools import partial

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave_torch.kernels.binding import BOOL, Scratch, in_turn, padded, scalar, widened
from opweave_torch.kernels.table import FLOATS, HALVES, KERNELS, NUMBERS, PLAIN, WIDE
from opweave_torch.memory import tensor, torch_dtype


@KERNELS("sum", dtypes=NUMBERS)
@KERNELS("mean", dtypes=HALVES)
def total(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    return partial(torch.sum if op == "sum" else torch.mean, tensor(x), axes, out=tensor(out))


@KERNELS("mean", dtypes=WIDE)
def mean(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    """What torch's own does, in less time."""
    target = tensor(out)
    count = scalar(x.size // out.size, target)
    return in_turn([partial(torch.sum, tensor(x), axes, out=target), partial(target.div_, count)])


@KERNELS("max", "min", dtypes=PLAIN)
def extremum(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    return partial(torch.amax if op == "max" else torch.amin, tensor(x), axes, out=tensor(out))


@KERNELS("var", dtypes=FLOATS)
def variance(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...], correction: float) -> Call:
    target, source = tensor(out), tensor(x)
    if not axes:  # which means all of them to torch; the variance of each element is wanted
        source, axes = source.unsqueeze(-1), (-1,)
    if x.size // out.size > correction:
        return partial(torch.var, source, axes, correction=correction, out=target)
    # torch would warn each time: NaN, or infinite where elements differ.
    return in_turn([partial(torch.var, source, axes, correction=0, out=target), partial(target.div_, 0)])


# --- products -------------------------------------------------------------------------------------------------------


def _products(step: Step) -> list[tuple[int, ...]]:
    """The shapes after each axis that is reduced, the last axis first: torch multiplies along one at a time."""
    shape, shapes = list(step.srcs[0].shape), []
    for axis in reversed(step.attrs["axes"]):
        del shape[axis]
        shapes.append(tuple(shape))
    return shapes


def _products_workspace(step: Step) -> int:
    between = _products(step) if step.out.dtype.is_half else _products(step)[:-1]
    return sum(padded(math.prod(shape) * widened(step.out.dtype).itemsize) for shape in between)


@KERNELS("prod", dtypes=NUMBERS, workspace=_products_workspace)
def product(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...], workspace: Arg | None) -> Call:
    target, source, scratch = tensor(out), tensor(x), Scratch(workspace)
    wide = widened(out.dtype)
    calls: list[Call] = []
    for axis, shape in zip(reversed(axes), _products(Step(op, out, (x,), {"axes": axes})), strict=True):
        last = len(shape) == len(out.shape) and wide is out.dtype
        into = target if last else scratch.take(shape, wide)
        calls.append(partial(torch.prod, source, axis, dtype=torch_dtype(wide), out=into))
        source = into
    if source is not target:
        calls.append(partial(target.copy_, source))
    return in_turn(calls)


# --- places and counts ----------------------------------------------------------------------------------------------


@KERNELS("argmax", dtypes=PLAIN)
def argmax(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    source = tensor(x)
    if source.dtype is torch.bool:
        source = source.view(torch.uint8)
    return partial(torch.argmax, source, axis, out=tensor(out))


def _count_workspace(step: Step) -> int:
    return step.srcs[0].size


@KERNELS("count_equal", dtypes=PLAIN, workspace=_count_workspace)
def count_equal(stream: Stream, op: str, out: Arg, a: Arg, b: Arg, *, workspace: Arg) -> Call:
    same = Scratch(workspace).take(a.shape, BOOL)
    return in_turn([partial(torch.eq, tensor(a), tensor(b), out=same), partial(_count, same, tensor(out))])


def _count(flags: torch.Tensor, out: torch.Tensor) -> None:
    # A sum of flags would make a copy of them in i64.
    out.copy_(torch.count_nonzero(flags))
