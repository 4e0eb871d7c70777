"""Operations that generated kernels compute element by element; each ``.cl`` file has the formulas of one family."""

from __future__ import annotations

from opweave_opencl.kernels.pointwise import Formula, formulas
from opweave_opencl.kernels.table import FLOATS, NUMBERS, PLAIN

__all__: list[str] = []

# elementwise.cl
formulas(NUMBERS, ("add", "sub", "mul", "neg", "abs", "sign", "square", "pow"))
formulas(FLOATS, ("div", "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sqrt", "rsqrt", "reciprocal"))
formulas(FLOATS, {"scale": Formula(("scale", "bias"))})
formulas(PLAIN, ("cast",), inplace=False)

# activation.cl
formulas(NUMBERS, ("relu",))
formulas(FLOATS, ("softplus", "sigmoid", "hardsigmoid", "silu", "hardswish", "gelu", "gelu_tanh", "gelu_quick"))
formulas(FLOATS, {"leaky_relu": Formula(("negative_slope",)), "elu": Formula(("alpha",))})
formulas(FLOATS, ("relu_backward", "silu_backward", "gelu_tanh_backward"))
formulas(FLOATS, {"xielu": Formula(("alpha_p", "alpha_n", "beta", "eps"))})

# gated.cl
formulas(FLOATS, ("reglu", "swiglu"))
formulas(FLOATS, {"geglu": Formula(variant="approximate"), "swiglu_oai": Formula(("alpha", "limit"))})

# rounding.cl
formulas(FLOATS, ("floor", "ceil", "round", "trunc"))

# selection.cl
formulas(NUMBERS, ("step",))
formulas(NUMBERS, {"clamp": Formula(("min", "max"))})
formulas(PLAIN, ("minimum", "maximum", "where"))

# trigonometry.cl
formulas(FLOATS, ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf"))
