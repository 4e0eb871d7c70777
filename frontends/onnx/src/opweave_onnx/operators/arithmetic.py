"""Arithmetic, comparison, logic and elementary functions, element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.formats.onnx_operators import ONNX_OPERATORS
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.host import HostOperation, host_operation
from opweave_onnx.operators.movement import axis_of
from opweave_onnx.operators.patterns import as_gelu
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

PLAIN: Final = {row.onnx: row.op for row in ONNX_OPERATORS if not (row.attributes or row.fixed or row.where)}
"""Operators that are one operation, with the same inputs and no attributes."""
SPECIAL: Final = {"MatMul", "Mul", "Div", "Pow", "Min", "Max", "Where", "HardSwish", "Log", "Softplus"}
"""Operators of `PLAIN` that take further types or numbers of inputs, and therefore have builders of their own here or
in other modules."""


def _paired(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The builder of an operator of two operands, which broadcasts as its version does."""

    def built(call: Call, *operands: Tensor) -> Tensor:
        if call.before(7) and len(operands) == 2:
            operands = operands[0], _placed(call, *operands)
        return build(call, *operands)

    return built


def _placed(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """The second operand in a shape that broadcasts to the first one's by the rules before version 7: not without the
    attribute ``broadcast``; one element to all; else along the axes from ``axis`` on, by default the last ones. Axes
    of length 1 are broadcast, as ONNX's own tests expect it, which the text did not promise yet.

    Raises:
        ShapeError: it does not fit.
    """
    if a.shape == b.shape:
        return b
    if not call.get("broadcast", 0):
        raise ShapeError(f"{a.describe()} and {b.describe()} differ, and broadcast is 0, its default before version 7")
    if b.size == 1:
        return ow.reshape(b, ())
    first = axis_of(a, call.node.attributes.get("axis", a.ndim - b.ndim))
    there = a.shape[first : first + b.ndim]
    if len(there) != b.ndim or any(m not in (1, n) for m, n in zip(b.shape, there, strict=True)):
        raise ShapeError(f"{b.describe()} are not the axes of {a.describe()} from axis {first} on")
    return ow.reshape(b, (*b.shape, *[1] * (a.ndim - first - b.ndim)))


def _plain(name: str) -> Callable[..., Tensor]:
    build = OPS[name].build
    assert build is not None

    def built(call: Call, *inputs: Tensor) -> Tensor:
        result: Tensor = build(*inputs)
        return result.astype(inputs[0].dtype) if name not in ("less", "less_equal", "equal") else result

    return built


for _onnx, _op in PLAIN.items():
    if _onnx not in SPECIAL:
        operator(_onnx)(_paired(_plain(_op)))


@operator("Log", "Softplus", "HardSwish")
def _function(call: Call, x: Tensor) -> Tensor:
    return {"Log": ow.log, "Softplus": ow.softplus, "HardSwish": ow.hardswish}[call.node.op](x)


_PAIRS: Final[dict[str, Callable[[Any, Any], Tensor]]] = {
    "Greater": ow.greater, "GreaterOrEqual": ow.greater_equal, "And": ow.minimum, "Or": ow.maximum, "Xor": ow.not_equal,
}  # fmt: skip


@operator(*_PAIRS)
@_paired
def _pair(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return _PAIRS[call.node.op](a, b)


@operator("Mul")
@_paired
def _mul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    found = as_gelu(a, b) if a.dtype.is_float else None
    return ow.mul(a, b) if found is None else found


# --- integers that devices do not have ------------------------------------------------------------------------------


@host_operation("integer_div")
def _integer_div(a: Array, b: Array) -> Array:
    """The quotient of integers without its fraction."""
    with np.errstate(all="ignore"):
        quotient = np.floor_divide(a, b)
        inexact = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
    return np.asarray(quotient + inexact.astype(quotient.dtype))


@operator("Div")
@_paired
def _div(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.is_float:
        return ow.div(a, b)
    return on_one_shape(_integer_div, a, b)


def on_one_shape(operation: HostOperation, *operands: Tensor, dtype: Any = None, **attrs: Any) -> Tensor:
    """A node of operands broadcast to one shape; the result has the dtype of the first one, or ``dtype``."""
    shape = np.broadcast_shapes(*[x.shape for x in operands])
    wide = [x if x.shape == shape else ow.broadcast_to(x, shape) for x in operands]
    return operation(*wide, shape=shape, dtype=dtype or operands[0].dtype, **attrs)


@host_operation("mod")
def _mod(a: Array, b: Array) -> Array:
    """The remainder with the sign of the divisor."""
    return np.asarray(np.mod(*_computable(a, b)))


@host_operation("fmod")
def _fmod(a: Array, b: Array) -> Array:
    """The remainder with the sign of the dividend."""
    return np.asarray(np.fmod(*_computable(a, b)))


def _computable(*arrays: Array) -> tuple[Array, ...]:
    """Arrays of bf16 and of types of 8 bits or less, in which NumPy does not compute, as f32; others as they are."""
    return tuple([x if x.dtype.kind in "biuf" else x.astype(np.float32) for x in arrays])


@operator("Mod")
def _remainder(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return on_one_shape(_fmod if call.get("fmod", 0) else _mod, a, b)


@host_operation("pow")
def _power(a: Array, b: Array) -> Array:
    """aᵇ of an integer and a float."""
    return np.asarray(np.power(a.astype(np.float64), b.astype(np.float64)))


@operator("Pow")
@_paired
def _pow(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.is_integer and b.dtype.is_float:
        return on_one_shape(_power, a, b)
    exponent = call.trace.session.array(b)
    if exponent is not None and exponent.size == 1 and a.dtype.is_float and exponent.ndim <= a.ndim:
        return ow.pow(a, float(exponent.reshape(())))
    return ow.pow(a, b.astype(a.dtype))


# --- any number of inputs -------------------------------------------------------------------------------------------


def _alike(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The builder of an operator of any number of operands, which have one shape before version 8."""

    def built(call: Call, *inputs: Tensor) -> Tensor:
        other = next((x for x in inputs if x.shape != inputs[0].shape), None)
        if call.before(8) and other is not None:
            raise ShapeError(f"{inputs[0].describe()} and {other.describe()} differ, which version 8 allows first")
        return build(call, *inputs)

    return built


@operator("Min")
@_alike
def _min(call: Call, *inputs: Tensor) -> Tensor:
    return reduce(ow.minimum, inputs)


@operator("Max")
@_alike
def _max(call: Call, *inputs: Tensor) -> Tensor:
    return reduce(ow.maximum, inputs)


@operator("Sum")
@_alike
@composite
def _sum(call: Call, *inputs: Tensor) -> Tensor:
    return reduce(ow.add, inputs)


@operator("Mean")
@_alike
@composite
def _mean(call: Call, *inputs: Tensor) -> Tensor:
    return reduce(ow.add, inputs) / float(len(inputs))


# --- logic ----------------------------------------------------------------------------------------------------------


@operator("Not")
def _not(call: Call, x: Tensor) -> Tensor:
    return ow.equal(x, ow.constant(False))


@operator("Where")
def _where(call: Call, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ow.where(condition, a, b)


@operator("IsNaN")
def _is_nan(call: Call, x: Tensor) -> Tensor:
    return ow.not_equal(x, x)


@operator("IsInf")
def _is_inf(call: Call, x: Tensor) -> Tensor:
    above, below = call.get("detect_positive", 1), call.get("detect_negative", 1)
    infinity = ow.constant(np.inf, x.dtype)
    found = []
    if above:
        found.append(ow.equal(x, infinity))
    if below:
        found.append(ow.equal(x, ow.neg(infinity)))
    return reduce(ow.maximum, found) if found else ow.not_equal(ow.equal(x, x), ow.equal(x, x))


@operator("Clip")
def _clip(call: Call, x: Tensor, least: Tensor | None = None, largest: Tensor | None = None) -> Tensor:
    if call.before(11):
        largest_f32 = None if call.before(6) else float(np.finfo(np.float32).max)
        ends = ("min", None if largest_f32 is None else -largest_f32), ("max", largest_f32)
        limits: list[Any] = [call.node.attributes.get(name, default) for name, default in ends]
    else:
        limits = [None if v is None else _number(call, v) for v in (least, largest)]
    if all(v is None for v in limits):
        return x
    limits = [v if v is None or isinstance(v, Tensor) or not x.dtype.is_integer else int(v) for v in limits]
    return ow.clamp(x, *limits)


def _number(call: Call, x: Tensor) -> Any:
    array = call.trace.session.array(x)
    return x if array is None or array.size != 1 else array.reshape(()).item()
