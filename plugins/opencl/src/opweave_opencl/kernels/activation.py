"""Activation functions."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import FLOATS, NUMBERS

__all__: list[str] = []

formulas(NUMBERS, ("relu",))
formulas(
    FLOATS,
    ("softplus", "sigmoid", "hardsigmoid", "silu", "hardswish", "gelu", "gelu_tanh", "gelu_quick"),
)
formulas(FLOATS, {"leaky_relu": Formula(("negative_slope",)), "elu": Formula(("alpha",))})
