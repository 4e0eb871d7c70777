"""Reductions over axes. torch accumulates half types in f32."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, bool_
from opweave_torch.kernels.binding import in_order, scalar, widened
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
    return in_order([partial(torch.sum, tensor(x), axes, out=target), partial(target.div_, count)])


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
    return in_order([partial(torch.var, source, axes, correction=0, out=target), partial(target.div_, 0)])


# --- products -------------------------------------------------------------------------------------------------------


def _product_arrays(step: Step) -> Arrays:
    """The products after each axis, the last axis first: torch multiplies along one at a time. The output takes the
    last ones, if it has their type."""
    wide, shape = widened(step.out.dtype), list(step.srcs[0].shape)
    arrays: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for axis in reversed(step.attrs["axes"]):
        del shape[axis]
        if len(shape) > len(step.out.shape) or wide is not step.out.dtype:
            arrays[f"axis{axis}"] = wide, tuple(shape)
    return arrays


@KERNELS("prod", dtypes=NUMBERS, workspace=_product_arrays)
def product(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...], **products: Arg) -> Call:
    target, source, wide = tensor(out), tensor(x), widened(out.dtype)
    calls: list[Call] = []
    for axis in reversed(axes):
        array = products.get(f"axis{axis}")
        into = target if array is None else tensor(array)
        calls.append(partial(torch.prod, source, axis, dtype=torch_dtype(wide), out=into))
        source = into
    if source is not target:
        calls.append(partial(target.copy_, source))
    return in_order(calls)


# --- indices and counts ---------------------------------------------------------------------------------------------


@KERNELS("argmax", dtypes=PLAIN)
def argmax(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    source = tensor(x)
    if source.dtype is torch.bool:
        source = source.view(torch.uint8)
    return partial(torch.argmax, source, axis, out=tensor(out))


@KERNELS("count_equal", dtypes=PLAIN, workspace=lambda step: {"equal": (bool_, step.srcs[0].shape)})
def count_equal(stream: Stream, op: str, out: Arg, a: Arg, b: Arg, *, equal: Arg) -> Call:
    flags = tensor(equal)
    return in_order([partial(torch.eq, tensor(a), tensor(b), out=flags), partial(_count, flags, tensor(out))])


def _count(flags: Tensor, out: Tensor) -> None:
    # torch.sum with out= would make a copy of the flags in i64.
    out.copy_(torch.count_nonzero(flags))
