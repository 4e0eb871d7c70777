"""Gated linear units: a value times an activation of a gate, element by element.

Each takes the value and the gate as two operands, or as one: the halves of its last axis, the gate first. For the other
order, or for columns that alternate, pass two views: ``swiglu(x[..., :n], x[..., n:])``, ``swiglu(x[..., 1::2],
x[..., ::2])``. Either way a kernel gets two sources.

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np

from opweave.errors import DTypeError, ShapeError, UnknownNameError
from opweave.graph import opdef
from opweave.graph.dtypes import FLOATS
from opweave.graph.opdef import Example, find_op
from opweave.graph.tensor import Tensor, node
from opweave.ops.activation import (
    QUICK,
    gelu_slope,
    gelu_tanh_backward,
    relu,
    relu_backward,
    sigmoid,
    silu,
    silu_backward,
    silu_slope,
)
from opweave.ops.operands import Array, as_number, builds, composite, float_pair, floating
from opweave.ops.pointwise import elementwise, entered
from opweave.ops.selection import clamp, clamp_gradient, minimum

__all__ = ["geglu", "reglu", "swiglu", "swiglu_oai"]


class Gated(Protocol):
    """The builder of a unit without attributes."""

    def __call__(self, x: Any, gate: Any = None) -> Tensor: ...


Approximate = Literal["none", "tanh", "quick"]
"""The form of gelu: exact (erf), with a hyperbolic tangent, or with a sigmoid."""


def _value_and_gate(op: str, x: Any, gate: Any) -> tuple[Tensor, Tensor]:
    if gate is not None:
        return float_pair(op, x, gate)
    both = floating(op, x)
    if not both.ndim or both.shape[-1] % 2:
        raise ShapeError(
            f"{op}: without a gate of its own the operand holds it in the first half of its last axis, which has an "
            f"even length; the operand is {both.describe()}"
        )
    half = both.shape[-1] // 2
    return both[..., half:], both[..., :half]


def _unit(formula: str, **facts: Any) -> Callable[[Callable[[Array, Array], Any]], Gated]:
    """Decorator: declares a unit without attributes, as `opweave.ops.pointwise.unary` does."""

    def declare(function: Callable[[Array, Array], Any]) -> Gated:
        op = elementwise(function.__name__, function, formula, sources=2, **facts)

        def build(x: Any, gate: Any = None) -> Tensor:
            return node(op, _value_and_gate(op.name, x, gate), {})

        return entered(op, build, function)

    return declare


@composite
def _reglu_gradient(grad: Tensor, out: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return grad * relu(gate), relu_backward(grad * x, gate)


@_unit("x · max(gate, 0)", flops=2, runs_like="swiglu", gradient=_reglu_gradient)
def reglu(x: Array, gate: Array) -> Any:
    """``x * relu(gate)``, broadcast and promoted; integers become f32.

    Args:
        x: the value; without ``gate``, an even number of columns: the gate in the first half, the value in the second.
        gate: the value is multiplied by its activation.

    Raises:
        ShapeError: the shapes do not broadcast; one operand whose last axis has no halves.
        DTypeError: a quantized operand.
    """
    return x * np.maximum(gate, 0)


_GELUS: Final = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}


@composite
def _geglu_gradient(
    grad: Tensor, out: Tensor, x: Tensor, gate: Tensor, *, approximate: Approximate
) -> tuple[Tensor, Tensor]:
    activated = opdef.build(_GELUS[approximate], gate)
    if approximate == "tanh":
        return grad * activated, gelu_tanh_backward(grad * x, gate)
    return grad * activated, grad * x * (gelu_slope(gate) if approximate == "none" else silu_slope(gate, QUICK))


GEGLU = elementwise(
    "geglu",
    lambda x, gate, *, approximate: x * find_op(_GELUS[approximate]).reference(gate),
    "x · gelu(gate)",
    sources=2,
    flops=10,
    runs_like="swiglu",
    gradient=_geglu_gradient,
    examples=tuple([Example(FLOATS, tag=form, attrs={"approximate": form}) for form in _GELUS]),
)


@builds(GEGLU)
def geglu(x: Any, gate: Any = None, approximate: Approximate = "none") -> Tensor:
    """``x * gelu(gate)``, in the form of `gelu`, `gelu_tanh` or `gelu_quick`. Otherwise as `reglu`.

    Args:
        x, gate: as for `reglu`.
        approximate: ``"none"``, ``"tanh"`` or ``"quick"``.

    Raises:
        ShapeError, DTypeError: as `reglu`.
        UnknownNameError: no such form.
    """
    if str(approximate) not in _GELUS:
        raise UnknownNameError("approximation of gelu", str(approximate), get_args(Approximate))
    return node(GEGLU, _value_and_gate("geglu", x, gate), {"approximate": approximate})


@composite
def _swiglu_gradient(grad: Tensor, out: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return grad * silu(gate), silu_backward(grad * x, gate)


@_unit("x · gate / (1 + e^(-gate))", flops=5, measured=("f32",), gradient=_swiglu_gradient)
def swiglu(x: Array, gate: Array) -> Any:
    """``x * silu(gate)``. Otherwise as `reglu`."""
    return x * (gate / (1 + np.exp(-gate)))


def _swiglu_oai(x: Array, gate: Array, *, alpha: float, limit: float) -> Any:
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (np.clip(x, -limit, limit) + 1)


@composite
def _swiglu_oai_gradient(
    grad: Tensor, out: Tensor, x: Tensor, gate: Tensor, *, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    value, bounded = clamp(x, -limit, limit), minimum(gate, limit)
    dx = grad * (bounded * sigmoid(alpha * bounded))
    dgate = grad * (value + 1.0) * silu_slope(bounded, alpha)
    return clamp_gradient(dx, out, x, min=-limit, max=limit), clamp_gradient(dgate, out, gate, min=-np.inf, max=limit)


SWIGLU_OAI = elementwise(
    "swiglu_oai",
    _swiglu_oai,
    "g / (1 + e^(-α g)) · (v + 1), g = min(gate, limit), v = min(max(x, -limit), limit)",
    sources=2,
    flops=9,
    runs_like="swiglu",
    gradient=_swiglu_oai_gradient,
    examples=(Example(FLOATS), Example(FLOATS, tag="clamped", attrs={"alpha": 0.5, "limit": 0.75})),
)


@builds(SWIGLU_OAI)
def swiglu_oai(x: Any, gate: Any = None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """`swiglu` with clamped operands, a steeper sigmoid and a value that is shifted by one.

    As in the reference implementation of OpenAI's gpt-oss models, whose columns alternate, gate first: for weights in
    that order pass ``swiglu_oai(x[..., 1::2], x[..., ::2])``.

    Args:
        x, gate: as for `reglu`.
        alpha: steepness of the sigmoid.
        limit: largest gate, and largest size of a value; not negative.

    Raises:
        ShapeError, DTypeError: as `reglu`.
        DTypeError: an alpha that is no number, or a limit that is none or negative.
    """
    attrs = {"alpha": as_number("swiglu_oai", "alpha", alpha), "limit": as_number("swiglu_oai", "limit", limit)}
    if not attrs["limit"] >= 0:
        raise DTypeError(f"swiglu_oai: limit is a number that is not negative, not {limit!r}")
    return node(SWIGLU_OAI, _value_and_gate("swiglu_oai", x, gate), attrs)
