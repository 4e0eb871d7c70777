"""Copies, and putting tensors side by side."""

from __future__ import annotations

from functools import partial

import torch

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DTYPES
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor


@KERNELS("copy", dtypes=DTYPES.values(), inplace=True)
@KERNELS("contiguous", dtypes=DTYPES.values())
def copy(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(tensor(out).copy_, tensor(x))


@KERNELS("concat", dtypes=DTYPES.values())
def concat(stream: Stream, op: str, out: Arg, *srcs: Arg, axis: int) -> Call:
    return partial(torch.cat, [tensor(s) for s in srcs], axis, out=tensor(out))
