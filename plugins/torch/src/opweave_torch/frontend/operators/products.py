"""Products of matrices."""

from __future__ import annotations

from typing import Any

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.table import operator

__all__: list[str] = []


@operator("mm", "bmm", "matmul", "mv", "dot")
def _matmul(call: Call, a: Tensor, b: Tensor) -> Any:
    if not call.dtype.is_float:
        return call.fallback(a, b)
    # A matrix that multiplies a batch from the right does so for all of its rows together.
    if b.ndim == 2 and a.ndim > 1 and _is_transposed(b):
        return ow.linear(a, ow.swapaxes(b, 0, 1))
    return ow.matmul(a, b)


def _is_transposed(b: Tensor) -> bool:
    """Whether the transpose is dense, as that of the weights of a layer."""
    return b.is_view and ow.swapaxes(b, 0, 1).is_dense


@operator("linear")
def _linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return ow.linear(x, weight, bias)


@operator("addmm", "baddbmm", "addmv")
def _addmm(call: Call, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
    if not call.dtype.is_float:
        return call.fallback(bias, a, b, beta=beta, alpha=alpha)
    if beta == alpha == 1 and bias.ndim == 1 and b.ndim == 2 and _is_transposed(b):
        return ow.linear(a, ow.swapaxes(b, 0, 1), bias)
    return _scaled_product(bias, a, b, beta, alpha)


@composite
def _scaled_product(bias: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any) -> Tensor:
    product = ow.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * beta)


@operator("outer")
def _outer(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return ow.expand_dims(a.astype(call.dtype), 1) * b.astype(call.dtype)
