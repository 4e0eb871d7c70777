"""Pooling by torch's kernels, one axis as two; integers, which those do not know on every device, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import i64
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.table import INTEGERS, KERNELS
from opweave_torch.memory import tensor
from opweave_torch.native import max_pool_with_indices, out_function


def _plane(x: torch.Tensor) -> torch.Tensor:
    """Shape (batch, channels, height, width)."""
    return x if x.ndim == 4 else x.unsqueeze(2)


def _two(lengths: Sequence[int], missing: int) -> list[int]:
    """Lengths for two axes."""
    return [missing] * (2 - len(lengths)) + list(lengths)


# --- the largest ----------------------------------------------------------------------------------------------------


@KERNELS("max_pool1d", "max_pool2d", workspace=lambda step: {"indices": (i64, step.out.shape)})
def max_pool(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    indices: Arg,
) -> Call:
    # torch computes the index of each maximum in any case.
    sizes = [_two(kernel_size, 1), _two(stride, 1), _two(padding, 0), _two(dilation, 1)]
    results = _plane(tensor(out)), _plane(tensor(indices))
    return partial(max_pool_with_indices(), _plane(tensor(x)), *sizes, ceil_mode, out=results)


@KERNELS("max_pool1d", "max_pool2d", dtypes=INTEGERS)
def max_pool_of_integers(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    """For each element of the kernel one pass over all windows in which it lies inside of the input."""
    most, source = tensor(out), tensor(x)
    calls: list[Call] = [partial(most.fill_, torch.iinfo(most.dtype).min)]
    axes = [
        [_inside(n, windows, k * d - p, s) for k in range(size)]
        for n, windows, size, s, p, d in zip(
            x.shape[2:],
            out.shape[2:],
            attrs["kernel_size"],
            attrs["stride"],
            attrs["padding"],
            attrs["dilation"],
            strict=True,
        )
    ]
    for slices in product(*axes):
        part = most[(..., *[windows for windows, _ in slices])]
        if part.numel():
            calls.append(partial(torch.maximum, part, source[(..., *[elements for _, elements in slices])], out=part))
    return in_order(calls)


def _inside(n: int, windows: int, first: int, stride: int) -> tuple[slice, slice]:
    """The i below ``windows`` for which ``first + stride · i`` is an index of an axis of ``n`` elements, and these
    indices."""
    begin = max(0, -(first // stride))
    end = max(begin, min(windows, (n - 1 - first) // stride + 1))
    start = first + begin * stride
    return slice(begin, end), slice(start, start + (end - begin) * stride, stride)


# --- the mean -------------------------------------------------------------------------------------------------------


@KERNELS("avg_pool1d", "avg_pool2d")
def avg_pool(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
) -> Call:
    return partial(
        out_function("avg_pool2d"),
        _plane(tensor(x)),
        _two(kernel_size, 1),
        _two(stride, 1),
        _two(padding, 0),
        ceil_mode,
        count_include_pad,
        divisor or None,
        out=_plane(tensor(out)),
    )
