"""Pooling."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.table import operator
from opweave_onnx.operators.windows import Windows, read_windows
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

MAX = {1: ow.max_pool1d, 2: ow.max_pool2d}
MEAN = {1: ow.avg_pool1d, 2: ow.avg_pool2d}


def _is_plain(windows: Windows) -> bool:
    """Whether the core's pooling has such windows."""
    half = all(2 * p <= k for p, k in zip(windows.before, windows.kernel, strict=True))
    return windows.before == windows.after and half and not any(windows.beyond) and len(windows.kernel) in MAX


@operator("MaxPool")
def _max_pool(call: Call, x: Tensor) -> Any:
    windows = read_windows(call, x, call.get("kernel_shape", ()))
    rank = len(windows.kernel)
    if _is_plain(windows) and not call.wants(1):
        return MAX[rank](x, windows.kernel, windows.strides, windows.before, windows.dilations)
    least = -np.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    best, index = None, None
    places = _flat_places(x, windows, bool(call.get("storage_order", 0))) if call.wants(1) else None
    for offset, part in windows.slices(windows.pad(x, least)):
        where = None if places is None else ow.constant(np.ascontiguousarray(places[offset]))
        if best is None:
            best, index = part, None if where is None else ow.broadcast_to(where, part.shape)
            continue
        if where is not None:
            index = ow.where(ow.greater(part, best), where, index)
        best = ow.maximum(best, part)
    assert best is not None
    return (best, ow.contiguous(index)) if index is not None else ow.contiguous(best)


def _flat_places(x: Tensor, windows: Windows, by_column: bool) -> dict[tuple[int, ...], Array]:
    """For each element of the kernel the flat indices of this element in all windows."""
    lengths = x.shape[2:]
    result = {}
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(lengths)) * prod(lengths)
    steps = np.cumprod([1, *lengths[:-1]] if by_column else [1, *lengths[:0:-1]])
    steps = steps if by_column else steps[::-1]
    for offset in np.ndindex(*windows.kernel):
        place = planes
        for i, (o, d, s, n, p) in enumerate(
            zip(offset, windows.dilations, windows.strides, windows.places, windows.before, strict=True)
        ):
            along = np.arange(n) * s + o * d - p
            place = place + (along * steps[i]).reshape([-1 if j == i else 1 for j in range(len(lengths))])
        result[offset] = place.astype(np.int64)
    return result


@operator("AveragePool")
def average_pool(call: Call, x: Tensor) -> Tensor:
    windows = read_windows(call, x, call.get("kernel_shape", ()))
    with_pads = bool(call.get("count_include_pad", 0))
    if _is_plain(windows) and set(windows.dilations) == {1}:
        return MEAN[len(windows.kernel)](x, windows.kernel, windows.strides, windows.before, False, with_pads)
    counts = ow.constant(_counts(x, windows, with_pads))
    return composite(lambda x: _total(windows, x) / counts.astype(x.dtype))(x)


def _total(windows: Windows, x: Tensor) -> Tensor:
    """The sum of each window."""
    return reduce(ow.add, [part for _, part in windows.slices(windows.pad(x, 0.0))])


def _counts(x: Tensor, windows: Windows, with_pads: bool) -> Array:
    """How many elements of each window the mean counts."""
    result = np.ones((), np.int64)
    w = windows
    for i, n in enumerate(x.shape[2:]):
        places = (np.arange(w.places[i]) * w.strides[i] - w.before[i])[:, None] + np.arange(w.kernel[i]) * w.dilations[
            i
        ]
        first, last = (-w.before[i], n + w.after[i]) if with_pads else (0, n)
        counts = ((places >= first) & (places < last)).sum(1)
        result = result[..., None] * counts
    return np.maximum(result, 1).astype(np.float32)


@operator("LpPool")
@composite
def _lp_pool(call: Call, x: Tensor) -> Tensor:
    windows = read_windows(call, x, call.get("kernel_shape", ()))
    p = call.get("p", 2.0 if call.before(2) else 2)
    total = _total(windows, ow.square(x) if p == 2 else ow.pow(ow.abs(x), float(p)))
    return ow.sqrt(total) if p == 2 else ow.pow(total, 1 / p)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(call: Call, x: Tensor) -> Tensor:
    axes = tuple(range(2, x.ndim))
    match call.node.op:
        case "GlobalAveragePool":
            return ow.mean(x, axes, True)
        case "GlobalMaxPool":
            return ow.max(x, axes, True)
    p = float(call.get("p", 2.0 if call.before(2) else 2))
    return composite(lambda x: ow.pow(ow.sum(ow.pow(ow.abs(x), p), axes, True), 1 / p))(x)
