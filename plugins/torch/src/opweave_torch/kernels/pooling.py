"""Pooling by torch's kernels, one axis as two; integers, which those do not know on every device, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import i64
from opweave_torch.kernels.binding import Scratch, in_turn, padded
from opweave_torch.kernels.table import INTEGERS, KERNELS
from opweave_torch.memory import tensor


def _plane(x: torch.Tensor) -> torch.Tensor:
    """Shape (batch, channels, height, width)."""
    return x if x.ndim == 4 else x.unsqueeze(2)


def _two(lengths: Sequence[int], missing: int) -> list[int]:
    """Lengths for two axes."""
    return [missing] * (2 - len(lengths)) + list(lengths)


# --- the largest ----------------------------------------------------------------------------------------------------


def _places_workspace(step: Step) -> int:
    return padded(step.out.size * i64.itemsize)


@KERNELS("max_pool1d", "max_pool2d", workspace=_places_workspace)
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
    workspace: Arg,
) -> Call:
    # Where each one was found is computed in any case.
    places = Scratch(workspace).take(out.shape, i64)
    sizes = [_two(kernel_size, 1), _two(stride, 1), _two(padding, 0), _two(dilation, 1)]
    function = torch.ops.aten.max_pool2d_with_indices.out
    return partial(function, _plane(tensor(x)), *sizes, ceil_mode, out=_plane(tensor(out)), indices=_plane(places))


@KERNELS("max_pool1d", "max_pool2d", dtypes=INTEGERS)
def max_pool_of_integers(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    """For each element of the window one pass over those that have it inside of the input."""
    most, source = tensor(out), tensor(x)
    calls: list[Call] = [partial(most.fill_, torch.iinfo(most.dtype).min)]
    axes = [
        [_meeting(n, places, k * d - p, s) for k in range(size)]
        for n, places, size, s, p, d in zip(
            x.shape[2:],
            out.shape[2:],
            attrs["kernel_size"],
            attrs["stride"],
            attrs["padding"],
            attrs["dilation"],
            strict=True,
        )
    ]
    for window in product(*axes):
        part = most[(..., *[to for to, _ in window])]
        if part.numel():
            calls.append(partial(torch.maximum, part, source[(..., *[of for _, of in window])], out=part))
    return in_turn(calls)


def _meeting(n: int, places: int, first: int, stride: int) -> tuple[slice, slice]:
    """Which of the places ``first + stride · i`` are inside of an axis of ``n`` elements, and where."""
    begin = max(0, -(first // stride))
    end = max(begin, min(places, (n - 1 - first) // stride + 1))
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
        torch._C._nn.avg_pool2d,
        _plane(tensor(x)),
        _two(kernel_size, 1),
        _two(stride, 1),
        _two(padding, 0),
        ceil_mode,
        count_include_pad,
        divisor or None,
        out=_plane(tensor(out)),
    )
