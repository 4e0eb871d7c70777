"""Choosing element by element."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import NUMBERS, PLAIN

__all__: list[str] = []

formulas(NUMBERS, ("step",))
formulas(NUMBERS, {"clamp": Formula(("min", "max"))})
formulas(PLAIN, ("minimum", "maximum", "where"))
