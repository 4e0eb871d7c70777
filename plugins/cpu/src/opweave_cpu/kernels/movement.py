"""Copies, and putting arrays side by side."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DTYPES
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import at_once, copy_call, in_turn, workers_of
from opweave_cpu.tunables import SPREAD_PASS, limit

STRIP: Final = limit("strip", 64, 1, 1 << 10)
"""Elements of the last axis that a transposing copy takes at a time: so many lines of the source stay in the cache
while they are read again and again. (Whole rows of 1,024 by 1,024 f32 take 7 times as long.)"""

STRIPS_FROM: Final = limit("strips_bytes", 1 << 18, 1, 1 << 24)
"""Bytes of output from which on a transposing copy goes by strips: below, the second-level cache holds all of it."""

FEW_REPEATS: Final = limit("few_repeats", 4, 1, 64)
"""Up to so many repetitions of each element are stored in as many passes. In one, NumPy's copy starts anew for each
element."""


@KERNELS("copy", dtypes=DTYPES.values(), inplace=True)
@KERNELS("contiguous", dtypes=DTYPES.values())
def copy(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    target, source = out.view, x.view
    if source.ndim > 1 and source.strides[-1] == 0 and 1 < source.shape[-1] <= FEW_REPEATS.value and source.strides[-2]:
        return in_turn([copy_call(stream, target[..., i], source[..., i]) for i in range(source.shape[-1])])
    if isinstance(stream, CpuStream) and x.dtype is out.dtype and x.strides[-1:] != out.strides[-1:]:
        compiled = stream.transpose(out, x)
        if compiled is not None:
            return compiled
    if out.nbytes >= STRIPS_FROM.value and _is_transposed(source):
        strips = [
            partial(np.copyto, target[..., i : i + STRIP.value], source[..., i : i + STRIP.value], "unsafe")
            for i in range(0, source.shape[-1], STRIP.value)
        ]
        count = min(workers_of(stream) if out.nbytes >= SPREAD_PASS.value else 1, len(strips))
        return at_once([in_turn(strips[i::count]) for i in range(count)])
    return copy_call(stream, target, source)


def _is_transposed(x: np.ndarray[Any, Any]) -> bool:
    """Whether neighbours along the last axis lie further apart than those along another one."""
    steps = [stride for stride, length in zip(x.strides, x.shape, strict=True) if length > 1 and stride]
    return x.ndim > 1 and x.shape[-1] > STRIP.value and bool(steps) and x.strides[-1] > min(steps)


@KERNELS("concat", dtypes=DTYPES.values())
def concat(stream: Stream, op: str, out: Arg, *srcs: Arg, axis: int) -> Call:
    compiled = stream.join(out, srcs, axis) if isinstance(stream, CpuStream) else None
    if compiled is not None:
        return in_turn(compiled)
    return partial(np.concatenate, [s.view for s in srcs], axis, out.view)
