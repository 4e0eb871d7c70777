"""How gradients are entered into the definitions of operations, and functions that several of them use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

from opweave import ops
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import find_op
from opweave.graph.tensor import Tensor
from opweave.ops.operands import widened

__all__ = ["at_least_f32", "gradient_of", "mean_of", "rows_of", "sum_of", "unreduced", "zeros"]

F = TypeVar("F", bound=Callable[..., Any])


def gradient_of(*names: str) -> Callable[[F], F]:
    """Decorator: makes the function the gradient of the named operations."""

    def register(function: F) -> F:
        for name in names:
            find_op(name).gradient = function
        return function

    return register


def zeros(shape: Shape, dtype: DType) -> Tensor:
    """A tensor of zeros."""
    return ops.full(shape, 0, dtype)


def at_least_f32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, those of half types cast to f32, for gradients whose terms nearly cancel."""
    return tuple(map(widened, tensors))


def sum_of(x: Tensor, axis: int = -1) -> Tensor:
    """The sum along an axis, which stays with length 1."""
    return ops.sum(x, axis, keepdims=True)


def mean_of(x: Tensor) -> Tensor:
    """The mean over the last axis, which stays with length 1."""
    return ops.mean(x, -1, keepdims=True)


def rows_of(x: Tensor, keep: int = 1) -> Tensor:
    """All axes but the last ``keep`` merged into one."""
    split = x.ndim - keep
    return ops.reshape(x, (prod(x.shape[:split]), *x.shape[split:]))


def unreduced(grad: Tensor, x: Tensor, axes: Sequence[int]) -> Tensor:
    """The gradient of a reduction over ``axes`` of ``x``, repeated along them."""
    kept = tuple([1 if a in axes else n for a, n in enumerate(x.shape)])
    return ops.broadcast_to(ops.reshape(grad, kept), x.shape)
