"""Comparing element by element."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import PLAIN

__all__: list[str] = []

formulas(PLAIN, dict.fromkeys(("less", "less_equal", "equal", "not_equal"), Formula(of_source=True)), inplace=False)
