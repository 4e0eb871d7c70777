"""The gradients of softmax and of the norms over rows, one operation for each, so that a kernel computes the sums over
a row and its elements in one pass over memory. Half types are computed in f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef, define_op, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, floats, wide

__all__: list[str] = []


def _infer(grad: Tensor, x: Tensor, *weight: Tensor, **attrs: Any) -> tuple[Shape, DType]:
    if grad.shape != x.shape or not x.ndim or any(w.shape != x.shape[-1:] for w in weight):
        shapes = ", ".join(t.describe() for t in (grad, x, *weight))
        raise ShapeError(f"the gradient of rows needs operands of one shape, and a weight of their length: {shapes}")
    if any(t.dtype is not grad.dtype for t in (x, *weight)):
        raise DTypeError(f"the gradient of rows needs operands of one type, not {grad.describe()} and {x.describe()}")
    return grad.shape, grad.dtype


def _define(name: str, reference: Callable[..., Array], flops: int, formula: str, runs_like: str) -> OpDef:
    return define_op(
        OpDef(
            name, infer=_infer, reference=reference, inplace=(0,), flops=flops_per_element(flops), formula=formula,
            slack=8.0, nan=False, runs_like=runs_like,
        )
    )  # fmt: skip


def _softmax(grad: Array, y: Array, *, scale: float) -> Array:
    g, y = wide(grad), wide(y)
    result: Array = scale * y * (g - (g * y).sum(-1, keepdims=True))
    return result


SOFTMAX_BACKWARD: Final = _define(
    "softmax_backward", _softmax, 5, "scale · y · (dy − Σ dy y) over the last axis", "rms_norm"
)


def softmax_backward(grad: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """The gradient of `softmax` over the last axis, given its result ``y``, times ``scale``: of the shape of both, in
    their common float dtype. Raises `ShapeError` for operands of different shapes."""
    return node(SOFTMAX_BACKWARD, floats("softmax_backward", grad, y), {"scale": float(scale)})


def _log_softmax(grad: Array, y: Array) -> Array:
    g = wide(grad)
    result: Array = g - np.exp(wide(y)) * g.sum(-1, keepdims=True)
    return result


LOG_SOFTMAX_BACKWARD: Final = _define(
    "log_softmax_backward", _log_softmax, 4, "dy − eʸ · Σ dy over the last axis", "softmax"
)


def log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """The gradient of `log_softmax` over the last axis, given its result ``y``: of the shape of both, in their common
    float dtype. Raises `ShapeError` for operands of different shapes."""
    return node(LOG_SOFTMAX_BACKWARD, floats("log_softmax_backward", grad, y), {})


def _rms_norm(grad: Array, x: Array, weight: Array | None = None, *, eps: float) -> Array:
    inner, x = wide(grad), wide(x)
    if weight is not None:
        inner = inner * wide(weight)
    factor = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    result: Array = factor * (inner - x * factor**2 * (inner * x).mean(-1, keepdims=True))
    return result


RMS_NORM_BACKWARD: Final = _define(
    "rms_norm_backward", _rms_norm, 9,
    "r · (g − x · r² · mean(g x)) with g = dy · weight and r = 1 / √(mean x² + eps), over the last axis", "rms_norm",
)  # fmt: skip


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """The gradient of `rms_norm` with respect to ``x``, of its shape, in the common float dtype of the operands. Raises
    `ShapeError` unless ``grad`` has the shape of ``x`` and ``weight`` that of a row."""
    return _norm(RMS_NORM_BACKWARD, grad, x, weight, eps)


def _layer_norm(grad: Array, x: Array, weight: Array | None = None, *, eps: float) -> Array:
    inner, x = wide(grad), wide(x)
    if weight is not None:
        inner = inner * wide(weight)
    return _rms_norm(inner - inner.mean(-1, keepdims=True), x - x.mean(-1, keepdims=True), eps=eps)


LAYER_NORM_BACKWARD: Final = _define(
    "layer_norm_backward", _layer_norm, 12,
    "r · (g − mean g − c · r² · mean(g c)) with g = dy · weight, c = x − mean x and r = 1 / √(mean c² + eps), over the "
    "last axis", "rms_norm",
)  # fmt: skip


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """The gradient of `layer_norm` with respect to ``x``. Otherwise as `rms_norm_backward`."""
    return _norm(LAYER_NORM_BACKWARD, grad, x, weight, eps)


def _norm(op: OpDef, grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return node(op, floats(op.name, grad, x, *(() if weight is None else (weight,))), {"eps": eps})
