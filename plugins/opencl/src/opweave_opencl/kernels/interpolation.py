"""Resampling: a table for each axis says which source elements make an element of the result, with which weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opweave.contract import Arg, Call, Step
from opweave.ops.interpolation import Factors, axis_taps, tap_kind
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS, MOVABLE
from opweave_opencl.kernels.tables import keep, table
from opweave_opencl.kernels.words import word
from opweave_opencl.layouts import element_offset, element_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


def _why_not(step: Step) -> str | None:
    mixes = step.attrs["mode"] != "nearest"
    return f"the mode {step.attrs['mode']} of {step.out.dtype}" if mixes and step.out.dtype.itemsize == 8 else None


@KERNELS("interpolate", dtypes=MOVABLE, when=_why_not)
def interpolate(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    size: tuple[int, ...],
    scale_factor: Factors,
    mode: str,
    align_corners: bool,
) -> Call:
    rank = len(size)
    indices, weights = [], []
    for axis, n in enumerate(size):
        factor = scale_factor[axis] if scale_factor else 0.0
        index, weight = axis_taps(x.shape[2 + axis], n, factor, tap_kind(mode), align_corners)
        indices.append(index.T.ravel().astype(np.int32))  # the taps of one element after each other
        weights.append(weight.T.ravel().astype(np.float32))
    taps = len(indices[0]) // size[0]
    tables = table(stream, np.concatenate(indices)), table(stream, np.concatenate(weights))
    fill = 3 - rank
    lengths = [*(1,) * fill, *size]
    words = [out.shape[1], *lengths]
    for arg in (out, x):
        steps = element_strides(arg)
        words += [*steps[:2], *(0,) * fill, *steps[2:]]
    words += [element_offset(out), element_offset(x)]
    name = word(x.dtype.itemsize) if mode == "nearest" else x.dtype.name
    macros = {"T": name, "TAPS": str(taps), "RANK": str(rank)}
    shape = (lengths[2], lengths[0] * lengths[1], out.shape[0] * out.shape[1])
    whole, group = spread(shape, stream.target.tuning.group)
    program = stream.target.programs.get("interpolation", macros)
    return keep(stream.launch(program, "interpolate", whole, group, (out, x, *tables), words), *tables)
