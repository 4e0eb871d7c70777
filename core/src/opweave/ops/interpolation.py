"""Resampling of images and other grids to another size."""

from __future__ import annotations

from math import floor, isfinite
from typing import Any, Final, Literal

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.matmul import matmul
from opweave.ops.operands import Array, as_flag, as_number, builds, floating, misfit, unquantized, wide
from opweave.ops.windows import as_lengths

__all__ = ["interpolate"]

Mode = Literal["nearest", "linear", "bilinear", "trilinear", "bicubic"]
Factors = tuple[float, ...] | None

_RANKS: Final = {"nearest": (1, 2, 3), "linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,)}


def axis_taps(length: int, size: int, factor: float, kind: str, align_corners: bool) -> tuple[Array, Array]:
    """From which elements of an axis of ``length`` each of ``size`` samples is computed, and with which weights.

    Element i has the coordinate i. Sample j is taken at j · step with aligned corners, step = (length − 1) / (size −
    1); else at (j + ½) · step − ½, step = 1 / factor; the nearest one is element ⌊j · step⌋.

    Args:
        length, size: of the axis before and after.
        factor: the scale factor that was given, 0 for size / length.
        kind: ``"nearest"``, ``"linear"`` or ``"cubic"`` (Keys, "Cubic convolution interpolation for digital image
            processing", 1981, with a = −¾, as torch and OpenCV have it).
        align_corners: the first and last samples are the first and last elements.

    Returns:
        i64 and f64, both (taps, size); 1, 2 or 4 taps. Places outside of the axis are moved to its ends.
    """
    j = np.arange(size)
    if kind == "nearest":
        # In whole numbers where possible: j · (1 / 49) for j = 49 is less than 1.
        place = np.floor(j / factor).astype(np.int64) if factor else j * length // size
        return np.minimum(place, length - 1)[None], np.ones((1, size))
    if align_corners:
        at = j * ((length - 1) / (size - 1)) if size > 1 else np.zeros(size)
    else:
        at = (j + 0.5) * (1 / factor if factor else length / size) - 0.5
    if kind == "linear":
        at = np.maximum(at, 0.0)
        low = np.minimum(np.floor(at), length - 1)
        t = at - low
        places, weights = low + np.arange(2)[:, None], np.stack([1 - t, t])
    else:
        low = np.floor(at)
        distance = np.abs(at - low - np.arange(-1, 3)[:, None])
        places, weights = low + np.arange(-1, 3)[:, None], _cubic(distance)
    return np.clip(places, 0, length - 1).astype(np.int64), weights


def smoothing_matrix(length: int, size: int, factor: float, kind: str, align_corners: bool) -> Array:
    """The weights of all elements of an axis in each of ``size`` samples: f64, shape (size, length), rows that sum to
    1. Where the axis becomes shorter, the kernel is widened to the distance of samples.

    As Pillow and torch's ``antialias`` do it: linear, or cubic with a = −½. Arguments as for `axis_taps`.
    """
    if align_corners:
        step = (length - 1) / (size - 1) if size > 1 else 0.0
    else:
        step = 1 / factor if factor else length / size
    width = max(step, 1.0)
    reach = (2.0 if kind == "cubic" else 1.0) * width
    weights = np.zeros((size, length))
    for j in range(size):
        center = step * (j + 0.5)
        first, end = max(int(center - reach + 0.5), 0), min(int(center + reach + 0.5), length)
        distance = np.abs((np.arange(first, end) - center + 0.5) / width)
        row = _cubic(distance, -0.5) * (distance < 2) if kind == "cubic" else np.maximum(1 - distance, 0)
        weights[j, first:end] = row / row.sum()
    return weights


def _cubic(d: Array, a: float = -0.75) -> Array:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return np.where(d <= 1, near, far)


def _interpolate_infer(
    x: Tensor, *, size: Shape, scale_factor: Factors, mode: str, align_corners: bool
) -> tuple[Shape, DType]:
    if x.ndim != len(size) + 2 or len(size) not in _RANKS[mode]:
        raise ShapeError(
            f"interpolate: {mode} needs (batch, channels) and {' or '.join(map(str, _RANKS[mode]))} more axes and a "
            f"size for each of these, not {size} for {x.describe()}"
        )
    if min(size) < 1 or min(x.shape[2:]) < 1:
        raise ShapeError(f"interpolate: axes to resample must not be empty: {size} from {x.describe()}")
    return (*x.shape[:2], *size), x.dtype


def tap_kind(mode: str) -> str:
    """What `axis_taps` calls the mode."""
    return {"nearest": "nearest", "bicubic": "cubic"}.get(mode, "linear")


def _interpolate(x: Array, *, size: Shape, scale_factor: Factors, mode: str, align_corners: bool) -> Array:
    y = x if mode == "nearest" else wide(x)
    for axis, n in enumerate(size, 2):
        factor = scale_factor[axis - 2] if scale_factor else 0.0
        places, weights = axis_taps(x.shape[axis], n, factor, tap_kind(mode), align_corners)
        if mode == "nearest":
            y = y.take(places[0], axis)
            continue
        shape = (-1, *[1] * (x.ndim - 1 - axis))
        y = np.sum([y.take(p, axis) * w.reshape(shape) for p, w in zip(places, weights, strict=True)], 0)
    return y


INTERPOLATE: Final = OpDef(
    "interpolate",
    infer=_interpolate_infer,
    reference=_interpolate,
    flops=lambda out: out.size * (0 if out.attrs["mode"] == "nearest" else 4 * (out.ndim - 2)),
    formula="y[n, c, j] = Σ_t weight_t(j) · x[n, c, place_t(j)], axis by axis",
    runs_like="max_pool2d",
)


@builds(INTERPOLATE)
def interpolate(
    x: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: Mode = "nearest",
    align_corners: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``x`` resampled to another size, as ``torch.nn.functional.interpolate``.

    Args:
        x: shape (batch, channels, *spatial): one to three spatial axes for ``nearest``, one for ``linear``, two for
            ``bilinear`` and ``bicubic``, three for ``trilinear``. ``nearest`` takes any plain dtype, integers become
            f32 in the others.
        size: of the spatial axes, one integer or one for each; or
        scale_factor: how many times longer they get (rounded down), one number or one for each, which then also
            decides where samples are taken.
        mode: how a sample is computed: the nearest element, or linear or cubic interpolation along each axis.
        align_corners: the centers of the first and last elements of both grids coincide; otherwise the outer borders
            of these elements do. Not for ``nearest``.
        antialias: low-pass filter along axes that become shorter: each sample is computed from all elements that it
            covers. For ``bilinear`` and ``bicubic``; built from a product with a constant matrix for each axis.

    Nodes carry ``size`` in any case, and ``scale_factor`` or ``None``.

    Raises:
        ShapeError: neither or both of size and scale_factor, another number of axes, empty axes, no such mode, an
            option that the mode does not have.
        DTypeError: a factor that is no positive number, a quantized operand.
    """
    y = unquantized("interpolate", x)
    if not isinstance(mode, str) or mode not in _RANKS:
        raise ShapeError(f"interpolate: there is no mode {mode!r}; there are: {', '.join(_RANKS)}")
    if (size is None) == (scale_factor is None):
        raise ShapeError(f"interpolate: needs either size or scale_factor; the operand is {y.describe()}")
    if mode == "nearest" and align_corners is not None:
        raise ShapeError("interpolate: align_corners is no option of the mode nearest")
    rank = y.ndim - 2
    if rank < 1:
        raise misfit("interpolate", "(batch, channels) and at least one more axis", y)
    factors: Factors = None
    if size is None:
        factors = _factors(scale_factor, y.shape[2:])
        lengths = tuple([floor(n * f) for n, f in zip(y.shape[2:], factors, strict=True)])
    else:
        lengths = as_lengths("interpolate", "size", size, rank)
    aligned = as_flag("interpolate", "align_corners", align_corners)
    if as_flag("interpolate", "antialias", antialias):
        if mode not in ("bilinear", "bicubic"):
            raise ShapeError(f"interpolate: antialias is an option of the modes bilinear and bicubic, not of {mode}")
        y = floating("interpolate", y)
        _interpolate_infer(y, size=lengths, scale_factor=factors, mode=mode, align_corners=aligned)
        return _smoothed(y, lengths, factors, tap_kind(mode), aligned)
    attrs = {"size": lengths, "scale_factor": factors, "mode": mode, "align_corners": aligned}
    return node(INTERPOLATE, (y if mode == "nearest" else floating("interpolate", y),), attrs)


def _smoothed(x: Tensor, size: Shape, factors: Factors, kind: str, align_corners: bool) -> Tensor:
    """The columns, then the rows multiplied by their smoothing matrices."""
    down, across = (
        constant(smoothing_matrix(n, m, factors[i] if factors else 0.0, kind, align_corners), x.dtype)
        for i, (n, m) in enumerate(zip(x.shape[2:], size, strict=True))
    )
    return matmul(down, matmul(x, across.T))


def _factors(value: Any, lengths: Shape) -> tuple[float, ...]:
    rank = len(lengths)
    values = value if isinstance(value, (tuple, list)) else (value,) * rank
    factors = tuple([as_number("interpolate", "scale_factor", f) for f in values])
    if len(factors) != rank or not all(isfinite(f * n) and f > 0 for f, n in zip(factors, lengths, strict=True)):
        raise DTypeError(f"interpolate: scale_factor is a positive number, or {rank} of them, not {value!r}")
    return factors
