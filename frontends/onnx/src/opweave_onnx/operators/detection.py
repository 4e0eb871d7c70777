"""Regions of images, and which of them to keep."""

from __future__ import annotations

from functools import reduce
from math import ceil
from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.sampling import channels_first, gathered
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call


@operator("NonMaxSuppression", raw=True)
def _non_max_suppression(
    call: Call, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None
) -> Any:
    centers = bool(call.get("center_point_box", 0))

    def select(boxes: Array, scores: Array, *given: Array) -> Array:
        limits = [None if v is None else v.reshape(()).item() for v in given]
        return _suppressed(boxes, scores, limits[0] or 0, limits[1] or 0.0, limits[2], centers)

    return call.found(select, boxes, scores, most, overlap, least)


def _suppressed(boxes: Array, scores: Array, most: int, overlap: float, least: float | None, centers: bool) -> Array:
    """Rows (batch, class, box): of each class the boxes of the highest scores, without those that overlap a chosen one
    by more than a share of their union."""
    found = []
    for batch in range(boxes.shape[0]):
        corners = boxes[batch].astype(np.float64)
        if centers:
            x, y, w, h = corners.T
            corners = np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], 1)
        low = np.minimum(corners[:, :2], corners[:, 2:])
        high = np.maximum(corners[:, :2], corners[:, 2:])
        areas = (high - low).prod(1)
        for kind in range(scores.shape[1]):
            row = scores[batch, kind]
            order = np.argsort(-row, kind="stable")
            if least is not None:
                order = order[row[order] > least]
            chosen: list[int] = []
            while order.size and len(chosen) < most:
                first, order = order[0], order[1:]
                chosen.append(first)
                sides = np.minimum(high[first], high[order]) - np.maximum(low[first], low[order])
                common = np.maximum(sides, 0).prod(1)
                union = areas[first] + areas[order] - common
                order = order[~((union > 0) & (common > overlap * union))]
            found += [(batch, kind, box) for box in chosen]
    return np.array(found, np.int64).reshape(-1, 3)


@host_operation("roi_align")
def _roi_align(
    x: Array, rois: Array, images: Array, *, size: Any, ratio: int, scale: float, mode: str, half_pixel: bool
) -> Array:
    """The mean, or the largest, of samples in each cell of a region of an image."""
    height, width = x.shape[2:]
    result = np.zeros((rois.shape[0], x.shape[1], *size))
    shift = 0.5 if half_pixel else 0.0
    for number, (roi, image) in enumerate(zip(rois.astype(np.float64), images, strict=True)):
        left, top, right, bottom = roi * scale - shift
        spans = np.array([bottom - top, right - left])
        if not half_pixel:
            spans = np.maximum(spans, 1.0)
        cell = spans / size
        counts = [ratio if ratio > 0 else max(ceil(c), 1) for c in cell]
        places = [
            start + (np.arange(n)[:, None] + (np.arange(k) + 0.5) / k) * c
            for start, n, k, c in zip((top, left), size, counts, cell, strict=True)
        ]
        y, z = places[0].reshape(-1), places[1].reshape(-1)
        samples = _interpolated(x[image].astype(np.float64), y, z, height, width, mode)
        cells = samples.reshape(x.shape[1], size[0], counts[0], size[1], counts[1])
        result[number] = cells.mean((2, 4)) if mode == "avg" else cells.max((2, 4))
    return result


def _interpolated(image: Array, y: Array, x: Array, height: int, width: int, mode: str) -> Array:
    """Samples at all pairs of positions by bilinear interpolation; with ``max`` the largest of the four weighted
    neighbours instead of their sum."""
    outside = ((y < -1) | (y > height))[:, None] | ((x < -1) | (x > width))[None, :]
    rows, columns = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
    top, left = rows.astype(int), columns.astype(int)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    dy, dx = (rows - top)[:, None], (columns - left)[None, :]
    parts = [
        image[:, top[:, None], left] * (1 - dy) * (1 - dx),
        image[:, top[:, None], right] * (1 - dy) * dx,
        image[:, bottom[:, None], left] * dy * (1 - dx),
        image[:, bottom[:, None], right] * dy * dx,
    ]
    total = np.sum(parts, 0) if mode == "avg" else np.max(parts, 0)
    return np.where(outside, 0, total)


@operator("RoiAlign")
def _roi_align_node(call: Call, x: Tensor, rois: Tensor, images: Tensor) -> Tensor:
    size = call.get("output_height", 1), call.get("output_width", 1)
    transform = call.get("coordinate_transformation_mode", "half_pixel" if call.version >= 16 else "output_half_pixel")
    ratio, scale, mode = call.get("sampling_ratio", 0), call.get("spatial_scale", 1.0), call.get("mode", "avg")
    half_pixel = transform == "half_pixel"
    if ratio > 0:
        return _aligned(call, x, rois, images, size, ratio, scale, mode, half_pixel)
    return _roi_align(x, rois, images, shape=(rois.shape[0], x.shape[1], *size), dtype=x.dtype, size=size,
                      ratio=ratio, scale=scale, mode=mode, half_pixel=half_pixel)  # fmt: skip


def _aligned(
    call: Call, x: Tensor, rois: Tensor, images: Tensor, size: tuple[int, int], ratio: int, scale: float, mode: str,
    half_pixel: bool,
) -> Tensor:  # fmt: skip
    """`_roi_align` built from operations that devices have, for a number of samples that does not depend on the sizes
    of the regions."""
    dtype = x.dtype
    wide = dtype if dtype.itemsize >= 4 else f32
    corners = rois.astype(wide) * scale - (0.5 if half_pixel else 0.0)
    places, inside = [], []
    for start, n, length in ((1, size[0], x.shape[2]), (0, size[1], x.shape[3])):
        span = corners[:, start + 2] - corners[:, start]
        span = span if half_pixel else ow.maximum(span, 1.0)
        steps = ((np.arange(n)[:, None] + (np.arange(ratio) + 0.5) / ratio) / n).reshape(-1)
        place = ow.expand_dims(corners[:, start], 1) + ow.expand_dims(span, 1) * ow.constant(steps, wide)
        inside.append(ow.minimum(ow.less_equal(-1.0, place), ow.less_equal(place, float(length))))
        places.append(ow.clamp(place, 0.0, length - 1.0))
    y, z = ow.expand_dims(places[0], 2), ow.expand_dims(places[1], 1)
    shape = (rois.shape[0], y.shape[1], z.shape[2])
    image, batch = x.astype(wide), ow.reshape(images.astype("i32"), (-1, 1, 1))
    parts = []
    for down, right in np.ndindex(2, 2):
        ids = [ow.floor(y) + float(down), ow.floor(z) + float(right)]  # beyond the border a part counts 0
        dy, dx = y - ow.floor(y), z - ow.floor(z)
        share = (dy if down else 1.0 - dy) * (dx if right else 1.0 - dx)
        found = gathered(image, batch, [ow.broadcast_to(i, shape) for i in ids])
        parts.append(found * ow.expand_dims(share, -1))
    total = reduce(ow.add if mode == "avg" else ow.maximum, parts)
    there = ow.minimum(ow.expand_dims(inside[0], 2), ow.expand_dims(inside[1], 1))
    total = ow.where(ow.expand_dims(there, -1), total, 0.0)
    cells = ow.reshape(total, (rois.shape[0], size[0], ratio, size[1], ratio, x.shape[1]))
    reduced = ow.mean(cells, (2, 4)) if mode == "avg" else ow.max(cells, (2, 4))
    return channels_first(reduced).astype(dtype)


@host_operation("max_roi_pool")
def _max_roi_pool(x: Array, rois: Array, *, size: Any, scale: float) -> Array:
    """The largest element of each cell of a region."""
    height, width = x.shape[2:]
    result = np.zeros((rois.shape[0], x.shape[1], *size), x.dtype)
    for number, roi in enumerate(rois):
        left, top, right, bottom = [round(float(v) * scale) for v in roi[1:]]
        spans = max(bottom - top + 1, 1), max(right - left + 1, 1)
        for i, j in np.ndindex(*size):
            cells = []
            for k, start, n, limit in ((i, top, 0, height), (j, left, 1, width)):
                first = int(np.floor(k * spans[n] / size[n])) + start
                last = ceil((k + 1) * spans[n] / size[n]) + start
                cells.append(slice(min(max(first, 0), limit), min(max(last, 0), limit)))
            part = x[int(roi[0]), :, cells[0], cells[1]]
            result[number, :, i, j] = part.max((1, 2)) if part.size else 0
    return result


@operator("MaxRoiPool")
def _max_roi_pool_node(call: Call, x: Tensor, rois: Tensor) -> Tensor:
    size = call.get("pooled_shape", ())
    return _max_roi_pool(x, rois, shape=(rois.shape[0], x.shape[1], *size), dtype=x.dtype, size=size,
                         scale=call.get("spatial_scale", 1.0))  # fmt: skip


@host_operation("det")
def _det(x: Array) -> Array:
    """The determinant of each matrix."""
    return np.asarray(np.linalg.det(x.astype(np.float64)))


@operator("Det")
def _det_node(call: Call, x: Tensor) -> Tensor:
    return _det(x, shape=x.shape[:-2], dtype=x.dtype)
