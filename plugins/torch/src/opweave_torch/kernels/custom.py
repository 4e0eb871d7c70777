"""Python functions as nodes: they compute on the host, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import DType
from opweave.ops.custom import call_custom
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import tensor


@KERNELS("custom", dtypes=PLAIN)
def custom(stream: Stream, op: str, out: Arg, *srcs: Arg, fn: Callable[..., Any], **promised: object) -> Call:
    return partial(_call, fn, [(tensor(s), s.dtype) for s in srcs], tensor(out), out.dtype)


def _call(fn: Callable[..., Any], srcs: list[tuple[Tensor, DType]], out: Tensor, dtype: DType) -> None:
    with torch.inference_mode(False):  # what others wrote may want gradients
        result = call_custom(fn, [_array(x, kind) for x, kind in srcs], tuple(out.shape), dtype)
    with np.errstate(all="ignore"):
        values = np.array(result, dtype.numpy, order="C")
    # torch and NumPy exchange every type but bf16, which goes as the integers of its bits.
    half = out.dtype is torch.bfloat16
    out.copy_(torch.from_numpy(values.view(np.int16)).view(out.dtype) if half else torch.from_numpy(values))


def _array(x: Tensor, dtype: DType) -> np.ndarray[Any, Any]:
    """The values on the host. Memory of the host is not copied."""
    held = x.cpu()
    array: np.ndarray[Any, Any] = (held.view(torch.int16) if held.dtype is torch.bfloat16 else held).numpy()
    return array.view(dtype.numpy)
