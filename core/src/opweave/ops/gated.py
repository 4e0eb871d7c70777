"""Gated linear units: a value times an activation of a gate, element by element.

Each takes the value and the gate as two operands, or as one: the halves of its last axis, the gate first. For the other
order, or for columns that alternate, pass two views: ``swiglu(x[..., :n], x[..., n:])``, ``swiglu(x[..., 1::2],
x[..., ::2])``. Either way a kernel gets two sources.

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import numpy as np

from opweave.errors import DTypeError, ShapeError, UnknownNameError
from opweave.graph.tensor import Tensor, node
from opweave.ops.activation import gelu_of, gelu_quick_of, gelu_tanh_of, silu_of
from opweave.ops.elementwise import elementwise
from opweave.ops.operands import Array, as_number, builds, float_pair, floating, wide
from opweave.ops.samples import over_rows

__all__ = ["geglu", "reglu", "swiglu", "swiglu_oai"]

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


REGLU = elementwise(
    "reglu",
    lambda x, gate: wide(x) * np.maximum(wide(gate), 0),
    "x · max(gate, 0)",
    sources=2,
    flops=2,
    runs_like="swiglu",
)


@builds(REGLU)
def reglu(x: Any, gate: Any = None) -> Tensor:
    """``x * relu(gate)``, broadcast and promoted; integers become f32.

    Args:
        x: the value; without ``gate``, an even number of columns: the gate in the first half, the value in the second.
        gate: the value is multiplied by its activation.

    Raises:
        ShapeError: the shapes do not broadcast; one operand whose last axis has no halves.
        DTypeError: a quantized operand.
    """
    return node(REGLU, _value_and_gate("reglu", x, gate), {})


_GELUS: Final[dict[str, Callable[[Array], Array]]] = {"none": gelu_of, "tanh": gelu_tanh_of, "quick": gelu_quick_of}


def _geglu(x: Array, gate: Array, *, approximate: Approximate) -> Array:
    result: Array = wide(x) * _GELUS[approximate](gate)
    return result


GEGLU = elementwise("geglu", _geglu, "x · gelu(gate)", sources=2, flops=10, runs_like="swiglu")


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


SWIGLU = elementwise(
    "swiglu",
    lambda x, gate: wide(x) * silu_of(gate),
    "x · gate / (1 + e^(-gate))",
    sources=2,
    flops=5,
    samples=over_rows("swiglu", operands=2),
)


@builds(SWIGLU)
def swiglu(x: Any, gate: Any = None) -> Tensor:
    """``x * silu(gate)``. Otherwise as `reglu`."""
    return node(SWIGLU, _value_and_gate("swiglu", x, gate), {})


def _swiglu_oai(x: Array, gate: Array, *, alpha: float, limit: float) -> Array:
    value = np.clip(wide(x), -limit, limit)
    result: Array = silu_of(np.minimum(wide(gate), limit), alpha) * (value + 1)
    return result


SWIGLU_OAI = elementwise(
    "swiglu_oai",
    _swiglu_oai,
    "g / (1 + e^(-α g)) · (v + 1), g = min(gate, limit), v = min(max(x, -limit), limit)",
    sources=2,
    flops=9,
    runs_like="swiglu",
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
