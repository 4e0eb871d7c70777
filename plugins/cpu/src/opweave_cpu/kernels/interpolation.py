"""Resampling, axis by axis: for each tap one gathering pass and one that adds it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.dtypes import DType
from opweave.layout import is_dense
from opweave.ops.interpolation import axis_taps, tap_kind
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.lanes import Cut, Rooms, bind_lanes, cuts_of, lane_count
from opweave_cpu.tiles import TILE, Array, compute_dtype


class _Resampling:
    """What is resampled in which order, and how it is cut: some channels at a time."""

    def __init__(self, out: Arg, x: Arg, attrs: dict[str, Any]) -> None:
        mode, factors = attrs["mode"], attrs["scale_factor"]
        self.dtype: DType = out.dtype if mode == "nearest" else compute_dtype(out.dtype)
        self.axes = []
        sizes = [prod(x.shape[2:])]
        lengths = list(x.shape[2:])
        for axis in reversed(range(len(lengths))):
            length, size = lengths[axis], out.shape[2 + axis]
            factor = factors[axis] if factors else 0.0
            if length == size and factor in (0.0, 1.0):
                continue
            self.axes.append((axis + 1, axis_taps(length, size, factor, tap_kind(mode), attrs["align_corners"])))
            lengths[axis] = size
            sizes.append(prod(lengths))
        self.packs = x.dtype is not self.dtype or not is_dense(x.shape[1:], x.strides[1:], x.dtype)
        channels = max(1, TILE // (self.dtype.itemsize * max(sizes)))
        self.jobs = cuts_of(x.shape[0], (x.shape[1],), channels)
        tile = (min(channels, x.shape[1]) * max(sizes), self.dtype)
        self.rooms = Rooms(lane_count(len(self.jobs), 4 * out.size), [tile] * 3)


def _workspace(step: Step) -> int:
    return _Resampling(step.out, step.srcs[0], dict(step.attrs)).rooms.nbytes


def _is_nearest_or_float(step: Step) -> str | None:
    if not step.out.is_dense:
        return "the output is not dense"
    return None if step.attrs["mode"] == "nearest" or step.out.dtype.is_float else f"{step.out.dtype} is no float type"


@KERNELS("interpolate", dtypes=PLAIN, when=_is_nearest_or_float, workspace=_workspace)
def interpolate(stream: Stream, op: str, out: Arg, x: Arg, *, workspace: Arg | None, **attrs: Any) -> Call:
    plan = _Resampling(out, x, attrs)
    nearest, dtype = attrs["mode"] == "nearest", plan.dtype.numpy
    source, stored = x.view, out.view
    axes = [(axis, places, weights.astype(dtype)) for axis, (places, weights) in plan.axes]

    def run(jobs: Sequence[tuple[int, Cut]], rooms: list[Array]) -> None:
        for n, (channels,) in jobs:
            target, now = stored[n, channels], source[n, channels]
            if plan.packs:
                packed = rooms[0][: now.size].reshape(now.shape)
                np.copyto(packed, now)
                now = packed
            for i, (axis, places, weights) in enumerate(axes):
                shape = (*now.shape[:axis], places.shape[1], *now.shape[axis + 1 :])
                size = prod(shape)
                direct = i == len(axes) - 1 and target.dtype == dtype
                total = target if direct else rooms[1 - i % 2][:size].reshape(shape)
                now.take(places[0], axis, total, "clip")
                if not nearest:
                    along = (-1, *[1] * (len(shape) - 1 - axis))
                    np.multiply(total, weights[0].reshape(along), total)
                    tap = rooms[2][:size].reshape(shape)
                    for place, weight in zip(places[1:], weights[1:], strict=True):
                        now.take(place, axis, tap, "clip")
                        np.multiply(tap, weight.reshape(along), tap)
                        np.add(total, tap, total)
                now = total
            if now is not target:
                np.copyto(target, now, "unsafe")

    return bind_lanes(stream, plan.jobs, plan.rooms, workspace, run)
