"""Comparing element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import tensor

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "less": torch.lt,
    "less_equal": torch.le,
    "equal": torch.eq,
    "not_equal": torch.ne,
}


@KERNELS(*_FUNCTIONS, dtypes=PLAIN)
def compare(stream: Stream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    return partial(_FUNCTIONS[op], tensor(a), tensor(b), out=tensor(out))
