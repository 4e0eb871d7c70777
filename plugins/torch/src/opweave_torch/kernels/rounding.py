"""Floats to whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.elementwise import preset
from opweave_torch.kernels.table import KERNELS

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
}


@KERNELS(*FUNCTIONS, inplace=True)
def rounding(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return preset(FUNCTIONS[op], out, x)
