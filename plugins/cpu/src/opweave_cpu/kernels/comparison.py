"""Comparing element by element: one preset call each."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave_cpu.kernels.elementwise import one_pass
from opweave_cpu.kernels.table import KERNELS, PLAIN

_UFUNCS: Final[dict[str, Any]] = {
    "less": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}


@KERNELS(*_UFUNCS, dtypes=PLAIN)
def compare(stream: Stream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    return one_pass(stream, _UFUNCS[op], out, a, b)
