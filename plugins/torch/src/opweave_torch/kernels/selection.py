"""Choosing element by element."""

from __future__ import annotations

import math
from functools import partial

import torch

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.binding import rounded, scalar
from opweave_torch.kernels.elementwise import preset
from opweave_torch.kernels.table import KERNELS, NUMBERS, PLAIN
from opweave_torch.memory import tensor


@KERNELS("clamp", dtypes=NUMBERS, inplace=True)
def clamp(stream: Stream, op: str, out: Arg, x: Arg, *, min: float, max: float) -> Call:
    """A bound that was rounded to a half type bounds the rounded values as the exact one does."""
    target, source = tensor(out), tensor(x)
    least, largest = rounded(min, out.dtype), rounded(max, out.dtype)
    if max == math.inf:
        return partial(torch.clamp_min, source, scalar(least, source), out=target)
    if min == -math.inf:
        return partial(torch.clamp_max, source, scalar(largest, source), out=target)
    # torch takes two bounds several times as fast as numbers than as tensors; for one bound it is the other way round.
    return partial(torch.clamp, source, least, largest, out=target)


@KERNELS("step", dtypes=NUMBERS, inplace=True)
def step(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    source = tensor(x)
    return partial(torch.gt, source, scalar(0, source), out=tensor(out))


@KERNELS("where", dtypes=PLAIN, inplace=True)
def where(stream: Stream, op: str, out: Arg, condition: Arg, a: Arg, b: Arg) -> Call:
    return preset(torch.where, out, condition, a, b)
