"""Pooling by torch's kernels, one axis as two; integers, which those do not know on every device, window by window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import f32, i64
from opweave.ops.windows import overlap
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.table import INTEGERS, KERNELS
from opweave_torch.memory import tensor
from opweave_torch.native import backward_function, max_pool_with_indices, out_function


def _plane(x: Tensor) -> Tensor:
    """Shape (batch, channels, height, width)."""
    return x if x.ndim == 4 else x.unsqueeze(2)


def _two(lengths: Sequence[int], missing: int) -> list[int]:
    """Lengths for two axes."""
    return [missing] * (2 - len(lengths)) + list(lengths)


def _geometry(attrs: Mapping[str, Any]) -> list[list[int]]:
    """Kernel size, stride and padding for two axes."""
    return [_two(attrs["kernel_size"], 1), _two(attrs["stride"], 1), _two(attrs["padding"], 0)]


# --- the largest ----------------------------------------------------------------------------------------------------


@KERNELS("max_pool1d", "max_pool2d", workspace=lambda step: {"indices": (i64, step.out.shape)})
def max_pool(stream: Stream, op: str, out: Arg, x: Arg, *, indices: Arg, **attrs: Any) -> Call:
    # torch computes the index of each maximum in any case.
    sizes = [*_geometry(attrs), _two(attrs["dilation"], 1), attrs["ceil_mode"]]
    return partial(
        max_pool_with_indices(), _plane(tensor(x)), *sizes, out=(_plane(tensor(out)), _plane(tensor(indices)))
    )


def _largest(step: Step) -> Arrays:
    """The largest elements and their places; f32 for sums of a narrower type."""
    grad, x = step.srcs
    dtype = f32 if x.dtype.is_half else x.dtype
    found = {"most": (dtype, grad.shape), "indices": (i64, grad.shape)}
    wide = {"wide_grad": (f32, grad.shape), "wide_x": (f32, x.shape), "wide_out": (f32, x.shape)}
    return found | (wide if x.dtype.is_half else {})


_BACKWARD: Final = backward_function("max_pool2d_with_indices_backward")


@KERNELS("max_pool_backward", inplace=True, workspace=_largest)
def max_pool_backward(
    stream: Stream, op: str, out: Arg, grad: Arg, x: Arg, *, most: Arg, indices: Arg, **attrs: Any
) -> Call:
    before: list[Call] = []
    after: list[Call] = []
    given, source, result = tensor(grad), tensor(x), tensor(out)
    if x.dtype.is_half:
        narrow = given, source, result
        given, source, result = (tensor(attrs.pop(f"wide_{name}")) for name in ("grad", "x", "out"))
        before = [partial(given.copy_, narrow[0]), partial(source.copy_, narrow[1])]
        after = [partial(narrow[2].copy_, result)]
    # Once the places of the largest elements are known, nothing reads x, over which the result may lie.
    sizes = [*_geometry(attrs), _two(attrs["dilation"], 1), attrs["ceil_mode"]]
    given, source, result, largest, places = (_plane(t) for t in (given, source, result, tensor(most), tensor(indices)))
    return in_order([
        *before,
        partial(max_pool_with_indices(), source, *sizes, out=(largest, places)),
        partial(_BACKWARD, given, source, *sizes, places, grad_input=result),
        *after,
    ])  # fmt: skip


@KERNELS("max_pool1d", "max_pool2d", dtypes=INTEGERS)
def max_pool_of_integers(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    """For each element of the kernel one pass over all windows in which it lies inside of the input."""
    most, source = tensor(out), tensor(x)
    calls: list[Call] = [partial(most.fill_, torch.iinfo(most.dtype).min)]
    sizes = [attrs[name] for name in ("kernel_size", "stride", "padding", "dilation")]
    axes = [
        [overlap(windows, n, s, k * d - p) for k in range(size)]
        for n, windows, size, s, p, d in zip(x.shape[2:], out.shape[2:], *sizes, strict=True)
    ]
    for slices in product(*axes):
        part = most[(..., *[windows for windows, _ in slices])]
        if part.numel():
            calls.append(partial(torch.maximum, part, source[(..., *[elements for _, elements in slices])], out=part))
    return in_order(calls)


# --- the mean -------------------------------------------------------------------------------------------------------


@KERNELS("avg_pool1d", "avg_pool2d")
def avg_pool(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    options = attrs["ceil_mode"], attrs["count_include_pad"], attrs["divisor"] or None
    function = out_function("avg_pool2d")
    return partial(function, _plane(tensor(x)), *_geometry(attrs), *options, out=_plane(tensor(out)))


def _wide_arrays(step: Step) -> Arrays:
    """f32 for what narrower types are added up in: torch would round each sum."""
    wide = {"wide_grad": (f32, step.srcs[0].shape), "wide_out": (f32, step.out.shape)}
    return wide if step.out.dtype.is_half else {}


_MEAN_BACKWARD: Final = backward_function("avg_pool2d_backward")


@KERNELS("avg_pool_backward", workspace=_wide_arrays)
def avg_pool_backward(
    stream: Stream,
    op: str,
    out: Arg,
    grad: Arg,
    *,
    wide_grad: Arg | None = None,
    wide_out: Arg | None = None,
    **attrs: Any,
) -> Call:
    given, result = tensor(grad if wide_grad is None else wide_grad), tensor(out if wide_out is None else wide_out)
    options = *_geometry(attrs), attrs["ceil_mode"], attrs["count_include_pad"], attrs["divisor"] or None
    # torch wants the input only for its shape, which is that of the result.
    spread = partial(_MEAN_BACKWARD, _plane(given), _plane(result), *options, grad_input=_plane(result))
    if wide_grad is None:
        return spread
    return in_order([partial(given.copy_, tensor(grad)), spread, partial(tensor(out).copy_, result)])
