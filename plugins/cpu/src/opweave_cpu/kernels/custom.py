"""Python functions as nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.errors import DTypeError, ShapeError
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array


@KERNELS("custom", dtypes=PLAIN)
def custom(stream: Stream, op: str, out: Arg, *srcs: Arg, fn: Callable[..., Any], **promised: object) -> Call:
    if isinstance(stream, CpuStream):
        stream.keep_context()  # the function may ask for variables of its caller
    views = [src.view.view() for src in srcs]
    for view in views:
        # A function that writes into its sources would change tensors that others read.
        view.flags.writeable = False
    return partial(_call, fn, views, out.view)


def _call(fn: Callable[..., Any], srcs: list[Array], out: Array) -> None:
    result = np.asarray(fn(*srcs))
    name = getattr(fn, "__qualname__", repr(fn))
    if result.shape != out.shape:
        raise ShapeError(f"custom: {name} returned shape {result.shape}, not {out.shape} as promised by like=")
    if result.dtype.kind in "cOSUMm":
        raise DTypeError(f"custom: {name} returned {result.dtype}, which does not become {out.dtype}")
    np.copyto(out, result, "unsafe")
