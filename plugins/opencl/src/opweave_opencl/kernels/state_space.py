"""State-space models: the causal short convolution and the selective scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.ops.operands import optional_operands
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, element_strides, optional_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

MOST_STATES: Final = 256
"""Numbers of a state in the registers of a work-item. Larger states are refused."""


def _types(names: Sequence[str], operands: Sequence[Arg]) -> dict[str, str]:
    """The macros that name the operands' types."""
    return {name: arg.dtype.name for name, arg in zip(names, operands, strict=True)}


@KERNELS("causal_conv1d", dtypes="f32 f16 bf16")
def causal_conv1d(stream: OpenCLStream, op: str, out: Arg, x: Arg, w: Arg, *rest: Arg, biased: bool) -> Call:
    bias, before = optional_operands(rest, biased)
    operands = [out, x, w, bias or x, before or x]
    words = [x.shape[1], x.shape[2], w.shape[1], int(biased), int(before is not None)]
    words += [*element_strides(out), *element_strides(x), *element_strides(w)]
    words += [*optional_strides(bias, 1), *optional_strides(before, 3)]
    words += map(element_offset, operands)
    program = stream.target.programs.get(
        "state_space", {"CONVOLUTION": "1", **_types(("T", "W", "BIAS", "BEFORE"), operands[1:])}
    )
    size, group = spread((x.shape[2], x.shape[1], x.shape[0]), stream.target.tuning.group)
    return stream.launch(program, "causal", size, group, operands, words)


def _why_not(step: Step) -> str | None:
    states = step.srcs[2].shape[1]
    return f"states of {states} numbers, not at most {MOST_STATES}" if states > MOST_STATES else None


@KERNELS("selective_scan", dtypes="f32 f16 bf16", when=_why_not)
def selective_scan(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    u: Arg,
    delta: Arg,
    a: Arg,
    b: Arg,
    c: Arg,
    *rest: Arg,
    softplus: bool,
    skip: bool,
    last: bool,
) -> Call:
    d, state = optional_operands(rest, skip)
    operands = [out, u, delta, a, b, c, d or u, state or u]
    batch, channels, tokens = u.shape
    states, repeats = a.shape[1], channels // b.shape[1]
    o_steps = element_strides(out)
    # With the last state, the output is one row: y and then the states.
    y_steps = (channels * tokens * o_steps[0], tokens * o_steps[0], o_steps[0]) if last else o_steps
    words = [channels, tokens, states, repeats, int(softplus), int(skip), int(state is not None), int(last)]
    words += [*y_steps, u.size * o_steps[0] if last else 0]
    for arg in (u, delta, a, b, c):
        words += element_strides(arg)
    words += [*optional_strides(d, 1), *optional_strides(state, 3)]
    words += map(element_offset, operands)
    lanes = 4 if states <= 4 else 16
    macros = {"SCAN": "1", "LANES": str(lanes), "VECTORS": str(-(-states // lanes))}
    macros |= _types(("T", "DELTA", "A", "B", "C", "D", "STATE"), operands[1:])
    program = stream.target.programs.get("state_space", macros)
    return stream.launch(program, "scan", (channels, batch), (1, 1), operands, words)
