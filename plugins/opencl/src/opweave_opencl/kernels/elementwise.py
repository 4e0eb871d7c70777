"""Operations that generated kernels compute element by element; each ``.cl`` file has the formulas of one family. Their
types, and whether they may work in place, are those of the operations' definitions."""

from __future__ import annotations

from typing import Final

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import PLAIN

__all__: list[str] = []

OF_SOURCE: Final = Formula(of_source=True)

# elementwise.cl
formulas("add", "sub", "mul", "neg", "abs", "sign", "square", "pow", "div", "sqrt", "rsqrt", "reciprocal")
formulas("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", scale=Formula(("scale", "bias")))
formulas("cast", dtypes=PLAIN, inplace=False)

# activation.cl
formulas("relu", "softplus", "sigmoid", "hardsigmoid", "silu", "hardswish", "gelu", "gelu_tanh", "gelu_quick")
formulas(leaky_relu=Formula(("negative_slope",)), elu=Formula(("alpha",)))
formulas("relu_backward", "silu_backward", "gelu_tanh_backward")
formulas(xielu=Formula(("alpha_p", "alpha_n", "beta", "eps")))

# gated.cl
formulas("reglu", "swiglu", geglu=Formula(variant="approximate"), swiglu_oai=Formula(("alpha", "limit")))

# rounding.cl
formulas("floor", "ceil", "round", "trunc")

# selection.cl
formulas("step", "minimum", "maximum", clamp=Formula(("min", "max")))
formulas("where", dtypes=PLAIN)

# comparison.cl
formulas(less=OF_SOURCE, less_equal=OF_SOURCE, equal=OF_SOURCE, not_equal=OF_SOURCE)

# trigonometry.cl
formulas("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf")
