"""Resampling by torch's kernels, which take f32 for the coordinates of f32 and half types: as they are where the steps
are fractions that f32 holds, else in f64."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import f64
from opweave.ops.interpolation import axis_taps
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.table import FLOATS, KERNELS, PLAIN
from opweave_torch.memory import tensor
from opweave_torch.native import out_function

_NAMES: Final = {
    ("nearest", 1): "upsample_nearest1d",
    ("nearest", 2): "upsample_nearest2d",
    ("nearest", 3): "upsample_nearest3d",
    ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d",
    ("bicubic", 2): "upsample_bicubic2d",
    ("trilinear", 3): "upsample_trilinear3d",
}


def _is_exact(step: Step) -> bool:
    """Whether coordinates in f32 are those that are meant: multiples of 1/1024, and not too many of them."""
    attrs = step.attrs
    if attrs["align_corners"]:
        return False
    factors = attrs["scale_factor"] or (0.0,) * len(attrs["size"])
    for n, size, factor in zip(step.srcs[0].shape[2:], attrs["size"], factors, strict=True):
        units = 1024 / factor if factor else 1024 * n / size
        if units != round(units) or 2 * units * size >= 1 << 24:
            return False
    return True


def _copies_an_axis(step: Step) -> bool:
    """Whether torch would copy elements along an axis on which others are meant: it keeps its length, by a factor that
    is not 1."""
    attrs, lengths = step.attrs, step.srcs[0].shape[2:]
    if attrs["align_corners"] or not attrs["scale_factor"]:
        return False
    return any(
        n == m and f not in (0.0, 1.0) for n, m, f in zip(lengths, attrs["size"], attrs["scale_factor"], strict=True)
    )


def _native(mode: str, attrs: dict[str, Any], x: Tensor, out: Tensor) -> Call:
    function = out_function(_NAMES[mode, len(attrs["size"])])
    factors = attrs["scale_factor"] or (None,) * len(attrs["size"])
    options = () if mode == "nearest" else (attrs["align_corners"],)
    return partial(function, x, attrs["size"], *options, *factors, out=out)


# --- weighted sums of neighbours ------------------------------------------------------------------------------------


def _why_not_weighted(step: Step) -> str | None:
    if step.attrs["mode"] == "nearest":
        return "it sums weighted elements, and does not take the nearest one"
    return "torch copies an axis that keeps its length, whatever its factor" if _copies_an_axis(step) else None


def _f64_arrays(step: Step) -> Arrays:
    if step.out.dtype is f64 or _is_exact(step):
        return {}
    return {"wide": (f64, step.srcs[0].shape), "result": (f64, step.out.shape)}


@KERNELS("interpolate", dtypes=FLOATS, when=_why_not_weighted, workspace=_f64_arrays)
def weighted(stream: Stream, op: str, out: Arg, x: Arg, *, mode: str, **given: Any) -> Call:
    source, target = tensor(x), tensor(out)
    if "wide" not in given or source.device.type == "mps":  # which has no f64
        return _native(mode, given, source, target)
    x64, y64 = tensor(given["wide"]), tensor(given["result"])
    return in_order([partial(x64.copy_, source), _native(mode, given, x64, y64), partial(target.copy_, y64)])


# --- nearest elements -----------------------------------------------------------------------------------------------


def _why_not_nearest(step: Step) -> str | None:
    return None if step.attrs["mode"] == "nearest" else "it takes the nearest element, and no weighted sum"


def _is_native(step: Step) -> bool:
    return step.out.dtype.is_float and _is_exact(step) and not _copies_an_axis(step)


def _intermediate_arrays(step: Step) -> Arrays:
    """The results after each axis but the last one."""
    if _is_native(step):
        return {}
    shape, size = step.srcs[0].shape, step.attrs["size"]
    return {f"axes{i}": (step.out.dtype, (*shape[:2], *size[:i], *shape[2 + i :])) for i in range(1, len(size))}


@KERNELS("interpolate", dtypes=PLAIN, when=_why_not_nearest, workspace=_intermediate_arrays)
def nearest(
    stream: Stream, op: str, out: Arg, x: Arg, *, axes1: Arg | None = None, axes2: Arg | None = None, **attrs: Any
) -> Call:
    source, target = tensor(x), tensor(out)
    if _is_native(Step(op, out, (x,), attrs)):
        return _native("nearest", attrs, source, target)
    calls: list[Call] = []
    results = [*[tensor(array) for array in (axes1, axes2) if array is not None], target]
    for i, result in enumerate(results):
        factor = attrs["scale_factor"][i] if attrs["scale_factor"] else 0.0
        indices, _ = axis_taps(x.shape[2 + i], attrs["size"][i], factor, "nearest", False)
        index = torch.from_numpy(indices[0]).to(target.device)
        calls.append(partial(torch.index_select, source, 2 + i, index, out=result))
        source = result
    return in_order(calls)
