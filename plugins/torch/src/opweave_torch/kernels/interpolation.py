"""Resampling by torch's kernels, which take f32 for the coordinates of f32 and half types: as they are where the steps
are fractions that f32 holds, else in f64."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DTYPES
from opweave.ops.interpolation import axis_taps
from opweave_torch.kernels.binding import Scratch, in_turn, padded
from opweave_torch.kernels.table import FLOATS, KERNELS, PLAIN
from opweave_torch.memory import tensor

F64: Final = DTYPES["f64"]

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


def _native(mode: str, attrs: dict[str, Any], x: torch.Tensor, out: torch.Tensor) -> Call:
    function = getattr(torch.ops.aten, _NAMES[mode, len(attrs["size"])]).out
    factors = attrs["scale_factor"] or (None,) * len(attrs["size"])
    options = () if mode == "nearest" else (attrs["align_corners"],)
    return partial(function, x, attrs["size"], *options, *factors, out=out)


# --- mixed ----------------------------------------------------------------------------------------------------------


def _widens(step: Step) -> bool:
    return step.out.dtype is not F64 and not _is_exact(step)


def _is_nearest(step: Step) -> str | None:
    return "the nearest element is chosen, not mixed" if step.attrs["mode"] == "nearest" else None


def _mixed_workspace(step: Step) -> int:
    if not _widens(step):
        return 0
    return sum([padded(arg.size * F64.itemsize) for arg in (step.srcs[0], step.out)])


@KERNELS("interpolate", dtypes=FLOATS, when=_is_nearest, workspace=_mixed_workspace)
def mixed(stream: Stream, op: str, out: Arg, x: Arg, *, mode: str, workspace: Arg | None, **attrs: Any) -> Call:
    source, target = tensor(x), tensor(out)
    if workspace is None or source.device.type == "mps":  # which has no f64
        return _native(mode, attrs, source, target)
    scratch = Scratch(workspace)
    wide, result = scratch.take(x.shape, F64), scratch.take(out.shape, F64)
    return in_turn([partial(wide.copy_, source), _native(mode, attrs, wide, result), partial(target.copy_, result)])


# --- chosen ---------------------------------------------------------------------------------------------------------


def _is_native(step: Step) -> bool:
    return step.out.dtype.is_float and _is_exact(step)


def _between_shapes(step: Step) -> list[tuple[int, ...]]:
    """What is left after each axis but the last one."""
    shape, size = step.srcs[0].shape, step.attrs["size"]
    return [(*shape[:2], *size[:i], *shape[2 + i :]) for i in range(1, len(size))]


def _chosen_workspace(step: Step) -> int:
    if _is_native(step):
        return 0
    itemsize = step.out.dtype.itemsize
    return sum([padded(torch.Size(shape).numel() * itemsize) for shape in _between_shapes(step)])


@KERNELS("interpolate", dtypes=PLAIN, workspace=_chosen_workspace)
def chosen(stream: Stream, op: str, out: Arg, x: Arg, *, workspace: Arg | None, **attrs: Any) -> Call:
    step = Step(op, out, (x,), attrs)
    now, target = tensor(x), tensor(out)
    if _is_native(step):
        return _native("nearest", attrs, now, target)
    scratch, calls = Scratch(workspace), []
    results = [*[scratch.take(shape, out.dtype) for shape in _between_shapes(step)], target]
    for i, result in enumerate(results):
        factor = attrs["scale_factor"][i] if attrs["scale_factor"] else 0.0
        places, _ = axis_taps(x.shape[2 + i], attrs["size"][i], factor, "nearest", False)
        index = torch.from_numpy(places[0]).to(target.device)
        calls.append(partial(torch.index_select, now, 2 + i, index, out=result))
        now = result
    return in_turn(calls)
