"""Floats to whole numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave_cpu.kernels.elementwise import one_pass
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import tile_scratch

_UFUNCS: Final[dict[str, Any]] = {"floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc}


@KERNELS(*_UFUNCS, inplace=True, workspace=tile_scratch)
def rounding(stream: Stream, op: str, out: Arg, x: Arg, *, tiles: Arg | None = None) -> Call:
    return one_pass(stream, _UFUNCS[op], out, x, tiles=tiles)
