"""Samples of images at positions that tensors contain, by interpolation between the elements around them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.table import operator
from opweave_onnx.trace import Call

__all__ = ["channels_first", "gathered"]


def gathered(x: Tensor, batch: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Elements of images, shape places[0].shape + (channels,). Indices outside of an image are moved to its border.

    Args:
        x: shape (n, channels, ...).
        batch: i32, the number of the image; broadcasts to the places.
        places: for each axis of an image the indices, whole numbers of a float type; all of one shape.
    """
    lengths = x.shape[2:]
    rows = ow.reshape(ow.transpose(x, (0, *range(2, x.ndim), 1)), (x.shape[0] * prod(lengths), x.shape[1]))
    at = batch
    for place, n in zip(places, lengths, strict=True):
        # Limited as integers: NaN and large numbers become some integer first.
        at = at * n + ow.clamp(place.astype("i32"), 0, n - 1)
    return ow.embedding(rows, at)


def channels_first(x: Tensor) -> Tensor:
    """``x`` with its last axis moved behind the first one."""
    return ow.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def _inside(places: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """1.0 where all indices are within an image, else 0.0; with a last axis of length 1."""
    found: Any = None
    for place, n in zip(places, lengths, strict=True):
        here = ow.minimum(ow.less_equal(0.0, place), ow.less(place, float(n)))
        found = here if found is None else ow.minimum(found, here)
    return ow.expand_dims(found.astype(places[0].dtype), -1)


# --- grids ----------------------------------------------------------------------------------------------------------

_CUBIC = -0.75


def _parts(fraction: Tensor, mode: str) -> list[Tensor]:
    """The weights of the elements around a position, given its distance from the element before it: two for ``linear``,
    four for ``cubic`` (R. Keys, "Cubic convolution interpolation for digital image processing", 1981)."""
    if mode == "linear":
        return [1.0 - fraction, fraction]
    a = _CUBIC

    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1.0

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    other = 1.0 - fraction
    return [far(fraction + 1.0), near(fraction), near(other), far(other + 1.0)]


def _padded(place: Tensor, n: int, mode: str, align_corners: bool) -> Tensor:
    """Positions along an axis of length ``n``, with those outside moved into it as the padding mode says."""
    if mode == "border":
        return ow.clamp(place, 0.0, n - 1.0)
    if mode != "reflection":
        return place
    low, span = (0.0, n - 1.0) if align_corners else (-0.5, float(n))
    if span <= 0:
        return place * 0.0
    moved = (place - low) * (1 / (2 * span))
    folded = (moved - ow.floor(moved)) * (2 * span)  # from 0 to 2 span
    return ow.clamp(low + ow.minimum(folded, 2 * span - folded), 0.0, n - 1.0)


@operator("GridSample")
def _grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    """Samples of ``x`` at the positions in a grid, whose coordinates go from -1 to 1 along each axis."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(call.get("mode", "linear"), call.get("mode", "linear"))
    padding, corners = call.get("padding_mode", "zeros"), bool(call.get("align_corners", 0))
    if mode not in ("linear", "nearest", "cubic") or padding not in ("zeros", "border", "reflection"):
        raise ShapeError(f"there is no mode {mode!r} with padding_mode {padding!r}")
    lengths, rank, dtype = x.shape[2:], x.ndim - 2, x.dtype
    if grid.shape[-1] != rank:
        raise ShapeError(f"{grid.describe()} does not tell places of {x.describe()}")
    wide = dtype if dtype.itemsize >= 4 and dtype.is_float else f32
    places = []
    for i, n in enumerate(lengths):
        g = grid[..., rank - 1 - i].astype(wide)
        place = (g + 1.0) * ((n - 1) / 2) if corners else (g + 1.0) * (n / 2) - 0.5
        places.append(place if mode == "cubic" else _padded(place, n, padding, corners))
    image = x.astype(wide)
    batch = call.tensor(np.arange(x.shape[0], dtype=np.int32).reshape(-1, *[1] * rank))

    def pick(ids: list[Tensor]) -> Tensor:
        if mode == "cubic":
            ids = [ow.round(_padded(p, n, padding, corners)) for p, n in zip(ids, lengths, strict=True)]
        values = gathered(image, batch, ids)
        # With other padding modes all positions are inside. NaN is inside of no image.
        return ow.where(_inside(ids, lengths), values, 0.0) if padding == "zeros" else values

    if mode == "nearest":
        result = pick([ow.round(p) for p in places])
    else:
        first = [ow.floor(p) for p in places]
        parts = [_parts(p - f, mode) for p, f in zip(places, first, strict=True)]
        before = 0 if mode == "linear" else 1
        result = None
        for taps in product(range(len(parts[0])), repeat=rank):
            share = parts[0][taps[0]]
            for axis in range(1, rank):
                share = share * parts[axis][taps[axis]]
            part = pick([f + float(t - before) for f, t in zip(first, taps, strict=True)]) * ow.expand_dims(share, -1)
            result = part if result is None else result + part
    assert result is not None
    return channels_first(result).astype(dtype)
