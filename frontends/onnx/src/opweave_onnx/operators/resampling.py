"""Resampling: Resize in all its modes."""

from __future__ import annotations

from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.movement import axis_of, taken
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call


class Axis(NamedTuple):
    """How one axis is resampled.

    Attributes:
        length, size: of the axis before and after.
        scale: the factor by which the axis is resampled.
        region: start and end of the part that is resampled, as fractions of the length, for ``tf_crop_and_resize``.
    """

    length: int
    size: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)

    def places(self, mode: str, dtype: Any) -> Array:
        """The coordinates of the samples, computed in ``dtype``; element i has the coordinate i. Raises `ShapeError`
        for an unknown mode."""
        i = np.arange(self.size, dtype=dtype)
        n, scale = self.length, np.asarray(self.scale, dtype)
        match mode:
            case "half_pixel":
                return np.asarray((i + 0.5) / scale - 0.5)
            case "half_pixel_symmetric":
                wanted = scale * n
                offset = n / 2 * (1 - self.size / wanted)
                return np.asarray(offset + (i + 0.5) / scale - 0.5)
            case "pytorch_half_pixel":
                return np.asarray((i + 0.5) / scale - 0.5) if self.size > 1 else np.zeros_like(i)
            case "align_corners":
                wanted = scale * n
                return np.asarray(i * (n - 1) / (wanted - 1)) if wanted != 1 else np.zeros_like(i)
            case "asymmetric":
                return np.asarray(i / scale)
            case "tf_half_pixel_for_nn":
                return np.asarray((i + 0.5) / scale)
            case "tf_crop_and_resize":
                start, end = self.region
                if self.size > 1:
                    return start * (n - 1) + i * (end - start) * (n - 1) / (self.size - 1)
                return np.full_like(i, 0.5 * (start + end) * (n - 1))
        raise ShapeError(f"there is no coordinate_transformation_mode {mode!r}")


def _nearest(places: Array, mode: str, scale: float) -> Array:
    match mode:
        case "round_prefer_floor":
            return np.ceil(places - 0.5)
        case "round_prefer_ceil":
            return np.floor(places + 0.5)
        case "floor":
            return np.floor(places)
        case "ceil":
            return np.ceil(places)
        case "runtime":  # the text before version 11 names no rule; this is ONNX Runtime's
            return np.ceil(places) if scale < 1 else np.floor(places)
    raise ShapeError(f"there is no nearest_mode {mode!r}")


def _kernel(distance: Array, mode: str, a: float) -> Array:
    """The weight of an element at a distance from a sample; ``a`` is the parameter of Keys's cubic kernel."""
    d = np.abs(distance)
    if mode == "linear":
        return np.asarray(np.maximum(1 - d, 0))
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, near, np.where(d < 2, far, 0)))


def _weights(axis: Axis, places: Array, mode: str, a: float, antialias: bool, exclude_outside: bool) -> Array:
    """The matrix (size, length) that resamples an axis."""
    scale = min(axis.scale, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / scale
    first = floor(places.min() - reach) if places.size else 0
    last = ceil(places.max() + reach) if places.size else 0
    elements = np.arange(first, last + 1)
    parts = _kernel((places[:, None] - elements) * scale, mode, a)
    inside = (elements >= 0) & (elements < axis.length)
    if exclude_outside:
        parts = parts * inside
    if antialias or exclude_outside:
        parts = parts / parts.sum(1, keepdims=True)
    result = np.zeros((axis.size, axis.length))
    np.add.at(result.T, np.clip(elements, 0, axis.length - 1), parts.T)
    return result


@operator("Resize", raw=True)
def _resize(call: Call, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    x = call.tensor(x)
    if call.before(11):  # Resize(x, scales)
        return _resampled(call, x, _given_scales(call, x, roi), "asymmetric", "runtime")
    mode = call.get("coordinate_transformation_mode", "half_pixel")
    at = [axis_of(x, a) for a in call.get("axes", ())] or list(range(x.ndim))
    axes = [Axis(n, n, 1.0) for n in x.shape]
    regions = call.known(roi).reshape(-1) if mode == "tf_crop_and_resize" and roi is not None else None
    if sizes is not None:
        wanted = list(call.integers(sizes))
        factors = [w / x.shape[a] for w, a in zip(wanted, at, strict=True)]
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = min(factors) if policy == "not_larger" else max(factors)
            wanted = [floor(one * x.shape[a] + 0.5) for a in at]
            factors = [one] * len(at)
    else:
        factors = [float(f) for f in call.known(scales).reshape(-1)]
        wanted = [floor(np.float32(x.shape[a]) * np.float32(f)) for a, f in zip(at, factors, strict=True)]
    for i, (a, w, f) in enumerate(zip(at, wanted, factors, strict=True)):
        region = (0.0, 1.0) if regions is None else (float(regions[i]), float(regions[len(at) + i]))
        axes[a] = Axis(x.shape[a], w, f, region)
    return _resampled(call, x, axes, mode, call.get("nearest_mode", "round_prefer_floor"))


@operator("Upsample", raw=True)
def _upsample(call: Call, x: Any, scales: Any = None) -> Any:
    x = call.tensor(x)
    if call.before(7):
        scales = np.array([1.0, 1.0, call.get("height_scale", 1.0), call.get("width_scale", 1.0)])
    elif call.before(9):
        scales = np.array(call.get("scales", ()))
    return _resampled(call, x, _given_scales(call, x, scales), "asymmetric", "runtime")


def _given_scales(call: Call, x: Tensor, scales: Any) -> list[Axis]:
    """How axes are resampled before version 11, computed in f32 as ONNX Runtime does. An axis whose length stays is not
    resampled."""
    factors = call.known(scales).reshape(-1).astype(np.float32)
    sizes = [floor(np.float32(n) * f) for n, f in zip(x.shape, factors, strict=True)]
    return [Axis(n, m, 1.0 if n == m else float(f)) for n, m, f in zip(x.shape, sizes, factors, strict=True)]


def _resampled(call: Call, x: Tensor, axes: list[Axis], transform: str, nearest: str) -> Tensor:
    mode = call.get("mode", "nearest")
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    build = _sampled if mode == "nearest" else composite(_sampled)
    return build(call, x, axes, mode, transform, nearest)


def _sampled(call: Call, x: Tensor, axes: list[Axis], mode: str, transform: str, nearest: str) -> Tensor:
    if mode not in ("nearest", "linear", "cubic"):
        raise ShapeError(f"there is no mode {mode!r}")
    outside = np.zeros([1] * x.ndim, bool)
    dtype = x.dtype
    for i, axis in enumerate(axes):
        if axis.size == axis.length and axis.scale == 1.0 and axis.region == (0.0, 1.0):
            continue
        # Nearest elements change where rounding does. Scales are f32, and 1 / (1/3) is 3 in f32 only.
        places = axis.places(transform, np.float32 if mode == "nearest" else np.float64)
        beyond = (places < 0) | (places > axis.length - 1)
        outside = outside | beyond.reshape([-1 if j == i else 1 for j in range(x.ndim)])
        if mode == "nearest":
            ids = np.clip(_nearest(places, nearest, axis.scale), 0, axis.length - 1).astype(np.int64)
            x = taken(x, ow.constant(ids), i)
            continue
        weights = _weights(axis, places, mode, call.get("cubic_coeff_a", -0.75), bool(call.get("antialias", 0)),
                           bool(call.get("exclude_outside", 0)))  # fmt: skip
        wide = x if x.dtype.is_float else x.astype("f32")
        matrix = ow.constant(weights.astype(wide.dtype.numpy))
        x = ow.swapaxes(ow.linear(ow.swapaxes(wide, i, -1), matrix), i, -1)
    if transform == "tf_crop_and_resize" and outside.any():
        fill = ow.constant(call.get("extrapolation_value", 0.0), x.dtype)
        x = ow.where(ow.constant(np.ascontiguousarray(np.broadcast_to(outside, x.shape))), fill, x)
    if not dtype.is_float and x.dtype.is_float:
        limits = np.iinfo(dtype.numpy)
        x = ow.clamp(ow.round(x), float(limits.min), float(limits.max))
    return x.astype(dtype)
