"""Arithmetic, comparison, logic and activations, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.graph.dtypes import DType
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.table import operator

__all__ = ["as_kind"]

FUNCTIONS: Final[dict[str, Callable[[Any], Tensor]]] = {
    "relu": ow.relu, "sigmoid": ow.sigmoid, "tanh": ow.tanh, "exp": ow.exp, "log": ow.log, "log1p": ow.log1p,
    "expm1": ow.expm1, "sin": ow.sin, "cos": ow.cos, "sqrt": ow.sqrt, "rsqrt": ow.rsqrt, "reciprocal": ow.reciprocal,
    "neg": ow.neg, "abs": ow.abs, "floor": ow.floor, "ceil": ow.ceil, "trunc": ow.trunc, "round": ow.round,
    "sign": ow.sign, "silu": ow.silu, "hardswish": ow.hardswish, "hardsigmoid": ow.hardsigmoid, "square": ow.square,
}  # fmt: skip
FLOATS_ONLY: Final = {"relu", "silu", "hardswish", "hardsigmoid"}
"""Operators of which torch computes integers: opweave has them for floats only, or with other results."""
KEPT: Final = {"floor", "ceil", "trunc", "round"}
"""Operators that return integers unchanged."""


def as_kind(value: Any, dtype: DType) -> Any:
    """An operand of arithmetic in ``dtype``: a tensor converted, a number as a constant of this type."""
    return value.astype(dtype) if isinstance(value, Tensor) else ow.constant(value, dtype)


def _function(name: str, function: Callable[[Any], Tensor]) -> Callable[..., Any]:
    def build(call: Call, x: Tensor) -> Any:
        if not call.dtype.is_float:
            if name in KEPT:
                return x
            if name in FLOATS_ONLY or not x.dtype.is_integer:
                return call.fallback(x)
        return function(x.astype(call.dtype))

    return build


for _name, _built in FUNCTIONS.items():
    operator(_name)(_function(_name, _built))


@operator("clone", "alias", "detach")
def _same(call: Call, x: Tensor, **_: Any) -> Tensor:
    return x


@operator("_to_copy")
def _to_copy(call: Call, x: Tensor, **_: Any) -> Tensor:
    return x.astype(call.dtype)


@operator("copy")
def _copy(call: Call, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return ow.broadcast_to(source.astype(x.dtype), x.shape)


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _both(call: Call, function: Callable[[Any, Any], Tensor], a: Any, b: Any) -> Any:
    """A function of two operands in the type of the result; numbers stay numbers, which operations take in."""
    dtype = call.dtype
    if dtype.kind == "b":
        return call.fallback(a, b)
    pair = [v.astype(dtype) if isinstance(v, Tensor) else (float(v) if dtype.is_float else int(v)) for v in (a, b)]
    return function(*pair)


@operator("add.Tensor", "add.Scalar")
def _add(call: Call, a: Tensor, b: Any, alpha: Any = 1) -> Any:
    if call.dtype.kind == "b":
        return call.fallback(a, b, alpha=alpha)
    return _both(call, _plus(alpha), a, b)


@operator("sub.Tensor", "sub.Scalar")
def _sub(call: Call, a: Tensor, b: Any, alpha: Any = 1) -> Any:
    return _both(call, _minus(alpha), a, b)


@operator("rsub.Scalar", "rsub.Tensor")
def _rsub(call: Call, a: Tensor, b: Any, alpha: Any = 1) -> Any:
    return _both(call, _minus(alpha), b, a)


def _plus(alpha: Any) -> Callable[[Any, Any], Tensor]:
    """a + alpha · b."""
    return ow.add if alpha == 1 else composite(lambda a, b: ow.add(a, b * alpha))


def _minus(alpha: Any) -> Callable[[Any, Any], Tensor]:
    """a − alpha · b."""
    return ow.sub if alpha == 1 else composite(lambda a, b: ow.sub(a, b * alpha))


@operator("mul.Tensor", "mul.Scalar")
def _mul(call: Call, a: Tensor, b: Any) -> Any:
    return _both(call, ow.mul, a, b)


@operator("div.Tensor", "div.Scalar")
def _div(call: Call, a: Tensor, b: Any) -> Any:
    return _both(call, ow.div, a, b)


@operator("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(call: Call, a: Tensor, b: Any, rounding_mode: str | None = None) -> Any:
    if not call.dtype.is_float or rounding_mode == "floor":
        return call.fallback(a, b, rounding_mode=rounding_mode)
    return _both(call, ow.div if rounding_mode is None else _whole_quotient, a, b)


@composite
def _whole_quotient(a: Any, b: Any) -> Tensor:
    return ow.trunc(ow.div(a, b))


@operator("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(call: Call, a: Any, b: Any) -> Any:
    if not call.dtype.is_float:
        return call.fallback(a, b)
    if isinstance(b, (int, float)) and b == 2:
        return ow.square(a.astype(call.dtype))
    if isinstance(a, (int, float)):
        a = ow.constant(a, call.dtype)
    return _both(call, ow.pow, a, b)


@operator("maximum")
def _maximum(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return ow.maximum(a.astype(call.dtype), b.astype(call.dtype))


@operator("minimum")
def _minimum(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return ow.minimum(a.astype(call.dtype), b.astype(call.dtype))


@operator("clamp", "clamp.Tensor", "hardtanh")
def _clamp(call: Call, x: Tensor, low: Any = None, high: Any = None, **named: Any) -> Tensor:
    if str(call.node.target).startswith("aten.hardtanh"):
        low, high = (-1 if low is None else low), (1 if high is None else high)
    low, high = named.get("min", low), named.get("max", high)
    limits = [v.astype(call.dtype) if isinstance(v, Tensor) else v for v in (low, high)]
    if call.dtype.is_integer:
        limits = [int(v) if isinstance(v, float) else v for v in limits]
    return ow.clamp(x.astype(call.dtype), *limits)


@operator("clamp_min", "clamp_min.Tensor")
def _clamp_min(call: Call, x: Tensor, low: Any) -> Tensor:
    return _clamp(call, x, low, None)


@operator("clamp_max", "clamp_max.Tensor")
def _clamp_max(call: Call, x: Tensor, high: Any) -> Tensor:
    return _clamp(call, x, None, high)


# --- activations ----------------------------------------------------------------------------------------------------


@operator("relu6")
def _relu6(call: Call, x: Tensor) -> Tensor:
    return ow.clamp(x, 0, 6)


@operator("gelu")
def _gelu(call: Call, x: Tensor, approximate: str = "none") -> Tensor:
    return ow.gelu_tanh(x) if approximate == "tanh" else ow.gelu(x)


@operator("leaky_relu")
def _leaky_relu(call: Call, x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return ow.leaky_relu(x, negative_slope)


@operator("elu")
@composite
def _elu(call: Call, x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    y = ow.elu(x if input_scale == 1 else x * input_scale, alpha)
    return y if scale == 1 else y * scale


@operator("softplus")
def _softplus(call: Call, x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if threshold != 20.0:
        return call.fallback(x, beta, threshold)
    return ow.softplus(x) if beta == 1 else composite(lambda x: ow.softplus(x * beta) * (1 / beta))(x)


# --- comparison and logic -------------------------------------------------------------------------------------------

COMPARISONS: Final[dict[str, Callable[[Any, Any], Tensor]]] = {
    "eq": ow.equal, "ne": ow.not_equal, "lt": ow.less, "le": ow.less_equal, "gt": ow.greater, "ge": ow.greater_equal,
}  # fmt: skip


def _comparison(function: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    def build(call: Call, a: Any, b: Any) -> Tensor:
        dtype = call.common(a, b)
        return function(as_kind(a, dtype), as_kind(b, dtype))

    return build


for _name, _compared in COMPARISONS.items():
    operator(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_compared))


def _bools(*values: Tensor) -> list[Tensor]:
    return [v if v.dtype.kind == "b" else ow.not_equal(v, ow.constant(0, v.dtype)) for v in values]


@operator("logical_and", "bitwise_and.Tensor", "bitwise_and.Scalar")
def _and(call: Call, a: Tensor, b: Any) -> Any:
    return ow.minimum(*_bools(a, as_kind(b, a.dtype))) if call.dtype.kind == "b" else call.fallback(a, b)


@operator("logical_or", "bitwise_or.Tensor", "bitwise_or.Scalar")
def _or(call: Call, a: Tensor, b: Any) -> Any:
    return ow.maximum(*_bools(a, as_kind(b, a.dtype))) if call.dtype.kind == "b" else call.fallback(a, b)


@operator("logical_xor", "bitwise_xor.Tensor", "bitwise_xor.Scalar")
def _xor(call: Call, a: Tensor, b: Any) -> Any:
    return ow.not_equal(*_bools(a, as_kind(b, a.dtype))) if call.dtype.kind == "b" else call.fallback(a, b)


@operator("logical_not", "bitwise_not")
def _not(call: Call, x: Tensor) -> Any:
    return ow.equal(_bools(x)[0], ow.constant(False)) if call.dtype.kind == "b" else call.fallback(x)


@operator("isnan")
def _isnan(call: Call, x: Tensor) -> Tensor:
    return ow.not_equal(x, x) if x.dtype.is_float else ow.full(x.shape, False, "bool")


@operator("isinf")
def _isinf(call: Call, x: Tensor) -> Tensor:
    if not x.dtype.is_float:
        return ow.full(x.shape, False, "bool")
    return ow.equal(ow.abs(x), ow.constant(np.inf, x.dtype))


@operator("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(call: Call, condition: Tensor, a: Any, b: Any) -> Tensor:
    return ow.where(condition, as_kind(a, call.dtype), as_kind(b, call.dtype))


@operator("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(call: Call, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return ow.where(mask, as_kind(value, x.dtype), x)
