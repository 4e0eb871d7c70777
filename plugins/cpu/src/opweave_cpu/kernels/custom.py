"""Python functions as nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave.ops.custom import call_custom
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array


@KERNELS("custom", dtypes=PLAIN)
def custom(stream: Stream, op: str, out: Arg, *srcs: Arg, fn: Callable[..., Any], **promised: object) -> Call:
    if isinstance(stream, CpuStream):
        stream.keep_context()  # the function may read context variables of its caller
    return partial(_call, fn, [src.view for src in srcs], out.view, out.dtype)


def _call(fn: Callable[..., Any], srcs: list[Array], out: Array, dtype: DType) -> None:
    np.copyto(out, call_custom(fn, srcs, out.shape, dtype), "unsafe")
