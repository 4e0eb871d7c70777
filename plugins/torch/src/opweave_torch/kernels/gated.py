"""Gated linear units: the gate's activation, then times the value.

Kernels for wide types do not work in place: the output holds the activation while the value is still to be read. A
workspace beside an output in place would take as much memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.activation import FUNCTIONS, gelu_call, gelu_quick_calls
from opweave_torch.kernels.binding import in_order, scalar, widening, widening_arrays
from opweave_torch.kernels.table import HALVES, KERNELS, WIDE
from opweave_torch.memory import tensor


def _gate(op: str, source: Tensor, target: Tensor, approximate: str = "none") -> list[Call]:
    """The calls that put the activation of ``source`` into ``target``, which may be ``source``."""
    if op == "reglu":
        return [partial(torch.clamp_min, source, scalar(0, source), out=target)]
    if op == "swiglu":
        return [partial(FUNCTIONS["silu"], source, out=target)]
    if approximate == "quick":
        return gelu_quick_calls(source, target, target)
    return [gelu_call(source, target) if approximate == "none" else partial(FUNCTIONS["gelu_tanh"], source, out=target)]


@KERNELS("reglu", "geglu", "swiglu", dtypes=WIDE)
def gated(stream: Stream, op: str, out: Arg, x: Arg, gate: Arg, **form: Any) -> Call:
    target = tensor(out)
    return in_order([*_gate(op, tensor(gate), target, **form), partial(target.mul_, tensor(x))])


@KERNELS("reglu", "geglu", "swiglu", dtypes=HALVES, inplace=True, workspace=widening_arrays)
def gated_of_halves(stream: Stream, op: str, out: Arg, x: Arg, gate: Arg, *, wide: Arg, **form: Any) -> Call:
    def body(gate: Tensor, values: Sequence[Tensor], target: Tensor) -> list[Call]:
        return [*_gate(op, gate, gate, **form), partial(torch.mul, gate, values[0], out=target)]

    return widening(out, [gate, x], wide, body)


# --- swiglu_oai -----------------------------------------------------------------------------------------------------


def _clamped_gate(gate: Tensor, x: Tensor, work: Tensor, value: Tensor, alpha: float, limit: float) -> list[Call]:
    """The calls that leave ``g / (1 + exp(-alpha g))``, times ``alpha``, in ``work`` and the value, divided by it, in
    ``value``: silu of the steeper gate, scaled back. ``work`` may be ``gate``, and ``value`` may be ``x``."""
    calls: list[Call] = [
        partial(torch.clamp, x, -limit, limit, out=value),
        partial(value.add_, scalar(1, value)),
        partial(torch.clamp_max, gate, limit, out=work),
    ]
    if alpha == 0:
        return [*calls, partial(value.mul_, scalar(0.5, value))]
    return [
        *calls,
        partial(value.mul_, scalar(1 / alpha, value)),
        partial(work.mul_, scalar(alpha, work)),
        partial(FUNCTIONS["silu"], work, out=work),
    ]


@KERNELS("swiglu_oai", dtypes=WIDE, inplace=True, workspace=lambda step: {"value": (step.out.dtype, step.out.shape)})
def swiglu_oai(stream: Stream, op: str, out: Arg, x: Arg, gate: Arg, *, alpha: float, limit: float, value: Arg) -> Call:
    target, factor = tensor(out), tensor(value)
    calls = _clamped_gate(tensor(gate), tensor(x), target, factor, alpha, limit)
    return in_order([*calls, partial(target.mul_, factor)])


@KERNELS("swiglu_oai", dtypes=HALVES, inplace=True, workspace=widening_arrays)
def swiglu_oai_of_halves(
    stream: Stream, op: str, out: Arg, x: Arg, gate: Arg, *, alpha: float, limit: float, wide: Arg
) -> Call:
    def body(gate: Tensor, values: Sequence[Tensor], target: Tensor) -> list[Call]:
        calls = _clamped_gate(gate, values[0], gate, values[0], alpha, limit)
        return [*calls, partial(torch.mul, gate, values[0], out=target)]

    return widening(out, [gate, x], wide, body, all_wide=True)
