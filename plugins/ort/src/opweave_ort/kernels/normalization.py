"""Softmax with a mask or of heads; layer, root-mean-square, group and Euclidean normalization."""

from __future__ import annotations

from math import prod

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave.graph.dtypes import f64
from opweave.ops.normalization import alibi_slopes
from opweave_ort.kernels.products import softmax_with_sinks
from opweave_ort.kernels.sums import LONGEST, reduced
from opweave_ort.kernels.table import emits
from opweave_ort.model import Model, Operand


def _same(step: Step) -> str | None:
    return of_other_type(step, *range(1, len(step.srcs)))


def _along_rows(m: Model, kind: str, value: str, x: Operand) -> str:
    """``ReduceSum`` or ``ReduceMean`` of each row of a value that is like ``x``."""
    return reduced(m, kind, value, x.dtype, x.shape, (len(x.shape) - 1,))


def _scaled(m: Model, x: Operand, scale: float) -> str:
    value = m.expanded(x)
    return value if scale == 1 else m("Mul", value, m.constant(scale, x.dtype))


@emits("softmax", when=_same)
def softmax(m: Model, op: str, out: Operand, x: Operand, mask: Operand | None = None, *, scale: float) -> str:
    value = _scaled(m, x, scale)
    if mask is not None:
        value = m("Add", value, mask.name)
    return m("Softmax", value, axis=-1)


@emits("head_softmax", when=_same)
def head_softmax(
    m: Model,
    op: str,
    out: Operand,
    x: Operand,
    sinks: Operand,
    mask: Operand | None = None,
    *,
    scale: float,
    max_bias: float,
) -> str:
    value = _scaled(m, x, scale)
    if mask is not None:
        slopes = m.constant(alibi_slopes(sinks.shape[0], max_bias).reshape(-1, 1, 1), x.dtype)
        value = m("Add", value, m("Mul", mask.name, slopes) if max_bias else mask.name)
    return softmax_with_sinks(m, value, sinks, out.shape)


@emits("layer_norm", when=_same)
def layer_norm(m: Model, op: str, out: Operand, x: Operand, *parameters: Operand, eps: float) -> str:
    if x.dtype is f64 or x.shape[-1] > LONGEST.value:
        return _layer_norm_in_parts(m, x, parameters, eps)
    scale = m.expanded(parameters[0]) if parameters else m.constant([1.0] * x.shape[-1], x.dtype)
    bias = [m.expanded(parameters[1])] if len(parameters) > 1 else []
    return m("LayerNormalization", m.expanded(x), scale, *bias, axis=-1, epsilon=eps)


@emits("softmax_backward", when=_same)
def softmax_backward(m: Model, op: str, out: Operand, grad: Operand, y: Operand, *, scale: float) -> str:
    given, values = m.expanded(grad), m.expanded(y)
    along = _along_rows(m, "ReduceSum", m("Mul", given, values), out)
    result = m("Mul", m("Sub", given, along), values)
    return result if scale == 1 else m("Mul", result, m.constant(scale, out.dtype))


@emits("log_softmax_backward", when=_same)
def log_softmax_backward(m: Model, op: str, out: Operand, grad: Operand, y: Operand) -> str:
    given = m.expanded(grad)
    total = _along_rows(m, "ReduceSum", given, out)
    return m("Sub", given, m("Mul", m("Exp", m.expanded(y)), total))


@emits("layer_norm_backward", "rms_norm_backward", when=_same)
def norm_backward(m: Model, op: str, out: Operand, grad: Operand, x: Operand, *weight: Operand, eps: float) -> str:
    given, values = m.expanded(grad), m.expanded(x)

    def mean(value: str) -> str:
        return _along_rows(m, "ReduceMean", value, out)

    if weight:
        given = m("Mul", given, m.expanded(weight[0]))
    if op == "layer_norm_backward":
        given, values = m("Sub", given, mean(given)), m("Sub", values, mean(values))
    spread = m("Add", mean(m("Mul", values, values)), m.constant(eps, out.dtype))
    along = m("Div", mean(m("Mul", given, values)), spread)
    return m("Div", m("Sub", given, m("Mul", values, along)), m("Sqrt", spread))


def _layer_norm_in_parts(m: Model, x: Operand, parameters: tuple[Operand, ...], eps: float) -> str:
    """In two passes: ONNX Runtime's operator subtracts squares, which loses digits of f64, and adds up in order."""
    result = _normalized(m, m.expanded(x), eps, x)
    for operator, parameter in zip(("Mul", "Add"), parameters, strict=False):
        result = m(operator, result, m.expanded(parameter))
    return result


def _normalized(m: Model, value: str, eps: float, x: Operand) -> str:
    centered = m("Sub", value, _along_rows(m, "ReduceMean", value, x))
    variance = _along_rows(m, "ReduceMean", m("Mul", centered, centered), x)
    return m("Div", centered, m("Sqrt", m("Add", variance, m.constant(eps, x.dtype))))


@emits("rms_norm", when=_same)
def rms_norm(m: Model, op: str, out: Operand, x: Operand, weight: Operand | None = None, *, eps: float) -> str:
    value = m.expanded(x)
    mean = _along_rows(m, "ReduceMean", m("Mul", value, value), x)
    result = m("Div", value, m("Sqrt", m("Add", mean, m.constant(eps, x.dtype))))
    return result if weight is None else m("Mul", result, m.expanded(weight))


@emits("l2_norm")
def l2_norm(m: Model, op: str, out: Operand, x: Operand, *, eps: float) -> str:
    value = m.expanded(x)
    length = m("Sqrt", _along_rows(m, "ReduceSum", m("Mul", value, value), x))
    return m("Div", value, m("Max", length, m.constant(eps, x.dtype)))


@emits("group_norm", when=_same)
def group_norm(m: Model, op: str, out: Operand, x: Operand, *parameters: Operand, groups: int, eps: float) -> str:
    n, channels, *rest = x.shape
    shape = n, groups, channels // groups * prod(rest)
    grouped = Operand(m.reshape(m.expanded(x), shape), x.dtype, shape, shape, x.stored)
    result = m.reshape(_normalized(m, grouped.name, eps, grouped), x.shape)
    each = (channels, *[1] * len(rest))
    for operator, parameter in zip(("Mul", "Add"), parameters, strict=False):
        result = m(operator, result, m.reshape(m.expanded(parameter), each))
    return result
