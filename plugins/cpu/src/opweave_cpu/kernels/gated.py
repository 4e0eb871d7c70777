"""Gated linear units: the activation of the gate, then the product, in tiles.

The first source of a body is the gate, which for half types has been converted to f32; a single call reads the value,
and converts it. The last call writes the output, which may share the memory of gate or value; where it does not, it
serves as the first scratch array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave.ops.activation import QUICK
from opweave_cpu.kernels.activation import gelu_body, gelu_tanh_body, silu_body
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, Body, bind_tiled, compute_dtype, constant, tile_scratch


@cache
def _relu_body(dtype: DType) -> Body:
    zero = constant(0, dtype)

    def body(out: Array, x: Array, t: Array) -> None:
        np.maximum(x, zero, out=out)

    return body


_ACTIVATIONS: Final[dict[str, Callable[[DType], Body]]] = {
    "reglu": _relu_body,
    "swiglu": silu_body,
    "none": gelu_body,
    "tanh": gelu_tanh_body,
    "quick": partial(silu_body, slope=QUICK),
}
"""By operation, those of geglu by its form."""


@cache
def _product_body(op: str, dtype: DType, approximate: str = "") -> Body:
    """The product with the activation of the gate. An activation with a single scratch array writes its output last,
    so that both may be ``t``."""
    activation = _ACTIVATIONS[approximate or op](dtype)

    def body(out: Array, gate: Array, x: Array, t: Array, *scratch: Array) -> None:
        activation(t, gate, *(scratch or (t,)))
        np.multiply(t, x, out)

    return body


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


def _workspace(step: Step) -> Arrays:
    return tile_scratch(step, 4 if step.attrs.get("approximate") == "none" else 2 if step.op == "swiglu_oai" else 1)


@KERNELS("reglu", "geglu", "swiglu", "swiglu_oai", inplace=True, workspace=_workspace)
def gated(stream: Stream, op: str, out: Arg, x: Arg, gate: Arg, *, tiles: Arg, **attrs: Any) -> Call:
    dtype = compute_dtype(out.dtype)
    body = _swiglu_oai_body(dtype, **attrs) if op == "swiglu_oai" else _product_body(op, dtype, **attrs)
    return bind_tiled(stream, body, out.view, [gate.view, x.view], tiles, in_output=True)
