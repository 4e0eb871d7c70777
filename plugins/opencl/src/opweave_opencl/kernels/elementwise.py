"""Arithmetic, elementary functions and conversion."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import FLOATS, NUMBERS, PLAIN

__all__: list[str] = []

formulas(NUMBERS, ("add", "sub", "mul", "neg", "abs", "sign", "square", "pow"))
formulas(
    FLOATS, ("div", "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sqrt", "rsqrt", "reciprocal")
)  # fmt: skip
formulas(FLOATS, {"scale": Formula(("scale", "bias"))})
formulas(PLAIN, ("cast",), inplace=False)
