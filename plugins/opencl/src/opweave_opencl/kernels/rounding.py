"""Rounding to whole numbers."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import formulas
from opweave_opencl.kernels.table import FLOATS

__all__: list[str] = []

formulas(FLOATS, ("floor", "ceil", "round", "trunc"))
