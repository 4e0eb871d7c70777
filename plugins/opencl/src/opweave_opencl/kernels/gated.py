"""Gated linear units."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import FLOATS

__all__: list[str] = []

formulas(FLOATS, ("reglu", "swiglu"))
formulas(FLOATS, {"geglu": Formula(variant="approximate"), "swiglu_oai": Formula(("alpha", "limit"))})
