"""Trigonometric and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.elementwise import preset
from opweave_torch.kernels.table import KERNELS

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erf": torch.erf,
}


@KERNELS(*FUNCTIONS, inplace=True)
def trigonometry(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return preset(FUNCTIONS[op], out, x)
