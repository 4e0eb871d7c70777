"""Copies, and putting arrays side by side."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.dtypes import DTYPES
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.tiles import copy_call, in_turn

FEW: Final = 4
"""Up to so many repetitions of each element are stored in as many passes: NumPy's copy starts anew for each element."""


@KERNELS("copy", dtypes=DTYPES.values(), inplace=True)
@KERNELS("contiguous", dtypes=DTYPES.values())
def copy(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    target, source = out.view, x.view
    if source.ndim > 1 and source.strides[-1] == 0 and 1 < source.shape[-1] <= FEW and source.strides[-2]:
        return in_turn([copy_call(stream, target[..., i], source[..., i]) for i in range(source.shape[-1])])
    return copy_call(stream, target, source)


@KERNELS("concat", dtypes=PLAIN)
def concat(stream: Stream, op: str, out: Arg, *srcs: Arg, axis: int) -> Call:
    return partial(np.concatenate, [s.view for s in srcs], axis, out.view)
