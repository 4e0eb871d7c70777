"""Linear attention: one work-item for each column of the states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.ops.linear_attention import linear_attention_operands
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, element_strides, optional_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

MOST_ROWS: Final = 256
"""Rows of a state, each a number in a register of a work-item. Larger states are refused."""


def _why_not(step: Step) -> str | None:
    size = step.srcs[0].shape[3]
    return f"states of {size} rows, not at most {MOST_ROWS}" if size > MOST_ROWS else None


@KERNELS("linear_attention", dtypes="f64 f32 f16 bf16", when=_why_not)
def linear_attention(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    q: Arg,
    k: Arg,
    v: Arg,
    *rest: Arg,
    decay: bool,
    bonus: bool,
    removal: bool,
    state: bool,
    last: bool,
) -> Call:
    optional = linear_attention_operands(rest, decay, bonus, removal, state)
    operands = [out, q, k, v, *[q if arg is None else arg for arg in optional]]
    _, heads, tokens, size = q.shape
    batch, width, step = q.shape[0], v.shape[3], element_strides(out)
    # With the last states, the output is one row: y and then the states.
    y_steps = [n * step[-1] for n in (heads * tokens * width, tokens * width, width, 1)] if last else step
    words = [heads, tokens, width, int(state), int(last), *y_steps, v.size * step[-1], step[-1]]
    for arg in (q, k, v):
        words += element_strides(arg)
    w, u, a, b, before = optional
    decays = optional_strides(w, 4)
    words += [*decays[:3], 0 if w is not None and w.shape[3] == 1 else decays[3], *optional_strides(u, 2)]
    for arg in (a, b, before):
        words += optional_strides(arg, 4)
    words += map(element_offset, operands)
    gates = {"WITH_DECAY": decay, "WITH_BONUS": bonus, "WITH_REMOVAL": removal}
    macros = {"SIZE": str(size), **{name: str(int(on)) for name, on in gates.items()}}
    macros |= {name: arg.dtype.name for name, arg in zip("TKVWUAB", operands[1:8], strict=True)}
    macros["STATE"] = operands[8].dtype.name
    program = stream.target.programs.get("linear_attention", macros)
    global_size, group = spread((width, heads, batch), stream.target.tuning.group)
    return stream.launch(program, "recur", global_size, group, operands, words)
