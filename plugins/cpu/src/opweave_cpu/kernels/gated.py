"""Gated linear units: the activation of the gate, then the product, in tiles.

The first source of a body is the gate, which for half types has been converted to f32; a single call reads the value,
and converts it. The last call writes the output, which may share the memory of gate or value; where it does not, it
serves as the first scratch array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave.ops.activation import QUICK
from opweave_cpu.kernels.activation import gelu_body, gelu_tanh_body, silu_body
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, Body, bind_tiled, compute_dtype, constant, tile_scratch


@cache
def _reglu_body(dtype: DType) -> Body:
    zero = constant(0, dtype)

    def body(out: Array, gate: Array, x: Array, t: Array) -> None:
        np.maximum(gate, zero, out=t)
        np.multiply(t, x, out)

    return body


def _times_value(activation: Body) -> Body:
    """The product with the activation of the gate. One that needs a single scratch array writes its output last, so
    that it may be that array."""

    def body(out: Array, gate: Array, x: Array, t: Array, *scratch: Array) -> None:
        activation(t, gate, *(scratch or (t,)))
        np.multiply(t, x, out)

    return body


@cache
def _swiglu_body(dtype: DType) -> Body:
    return _times_value(silu_body(dtype))


@cache
def _geglu_body(dtype: DType, approximate: str) -> Body:
    forms: dict[str, Callable[[DType], Body]] = {
        "none": gelu_body,
        "tanh": gelu_tanh_body,
        "quick": partial(silu_body, slope=QUICK),
    }
    return _times_value(forms[approximate](dtype))


@cache
def _swiglu_oai_body(dtype: DType, alpha: float, limit: float) -> Body:
    largest, least, one = constant(limit, dtype), constant(-limit, dtype), constant(1, dtype)
    silu = silu_body(dtype, alpha)

    def body(out: Array, gate: Array, x: Array, t: Array, u: Array) -> None:
        np.minimum(gate, largest, out=t)
        silu(t, t, u)
        np.maximum(x, least, out=u)
        np.minimum(u, largest, out=u)
        np.add(u, one, u)
        np.multiply(t, u, out)

    return body


_BODIES: Final[dict[str, tuple[Callable[..., Body], int]]] = {
    "reglu": (_reglu_body, 1),
    "geglu": (_geglu_body, 4),
    "swiglu": (_swiglu_body, 1),
    "swiglu_oai": (_swiglu_oai_body, 2),
}
"""Op -> what makes the body for a type and the attributes, and how many scratch arrays that needs."""


def _workspace(step: Step) -> Arrays:
    return tile_scratch(step, 1 if step.attrs.get("approximate", "none") != "none" else _BODIES[step.op][1])


@KERNELS(*_BODIES, inplace=True, workspace=_workspace)
def gated(stream: Stream, op: str, out: Arg, x: Arg, gate: Arg, *, tiles: Arg, **attrs: float) -> Call:
    body = _BODIES[op][0](compute_dtype(out.dtype), **attrs)
    return bind_tiled(stream, body, out.view, [gate.view, x.view], tiles, in_output=True)
