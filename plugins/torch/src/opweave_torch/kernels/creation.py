"""Kernels without operands: filled tensors and ranges."""

from __future__ import annotations

from functools import partial

import torch

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave_torch.kernels.binding import rounded
from opweave_torch.kernels.table import KERNELS, NUMBERS, PLAIN
from opweave_torch.memory import tensor


@KERNELS("full", dtypes=PLAIN)
def full(stream: Stream, op: str, out: Arg, *, shape: tuple[int, ...], value: float, dtype: DType) -> Call:
    return partial(tensor(out).fill_, rounded(value, out.dtype))


@KERNELS("arange", dtypes=NUMBERS)
def arange(stream: Stream, op: str, out: Arg, *, start: float, step: float, count: int, dtype: DType) -> Call:
    # torch counts the elements itself: between the last one and the next there is no doubt about their number.
    end = start + count * step if out.dtype.is_integer else start + (count - 0.5) * step
    return partial(torch.arange, start, end, step, out=tensor(out))
