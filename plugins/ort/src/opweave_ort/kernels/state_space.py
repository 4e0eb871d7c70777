"""State-space models: the causal short convolution, and the selective scan as ONNX's ``Scan`` over the tokens."""

from __future__ import annotations

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave.ops.operands import optional_operands
from opweave_ort.kernels.table import F32, emits
from opweave_ort.model import Model, Operand
from opweave_ort.scan import Body


def _same(step: Step) -> str | None:
    return of_other_type(step, *range(1, len(step.srcs)))


@emits("causal_conv1d", dtypes=F32, when=_same)
def causal_conv1d(m: Model, op: str, out: Operand, x: Operand, w: Operand, *rest: Operand, biased: bool) -> str:
    bias, before = optional_operands(rest, biased)
    channels, taps = w.shape
    line, pads = m.expanded(x), [taps - 1, 0]
    if before is not None and taps > 1:
        line, pads = m("Concat", m.expanded(before), line, axis=-1), [0, 0]
    biases = () if bias is None else (m.expanded(bias),)
    return m("Conv", line, m.reshape(m.expanded(w), (channels, 1, taps)), *biases, group=channels, pads=pads)


@emits("selective_scan", dtypes=F32, when=_same)
def selective_scan(
    m: Model,
    op: str,
    out: Operand,
    u: Operand,
    delta: Operand,
    a: Operand,
    b: Operand,
    c: Operand,
    *rest: Operand,
    softplus: bool,
    skip: bool,
    last: bool,
) -> str:
    d, state = optional_operands(rest, skip)
    batch, channels, tokens = u.shape
    groups, n = b.shape[1], a.shape[1]
    lines = (batch, groups, channels // groups, tokens)
    values, steps = m.reshape(m.expanded(u), lines), m.reshape(m.expanded(delta), lines)
    if softplus:
        steps = m("Softplus", steps)
    matrix = m.reshape(m.expanded(a), (*lines[1:3], n))
    shape = (*lines[:3], n)
    before = (
        m("Expand", m.constant(0, u.dtype), m.integers(*shape)) if state is None
        else m.reshape(m.expanded(state), shape)
    )  # fmt: skip
    body = Body(matrix, u.dtype, 5)
    h, step, su, b_now, c_now = body.inputs
    kept = body("Mul", body("Exp", body("Mul", body.with_axis(step, -1), matrix)), h)
    next_ = body("Add", kept, body("Mul", body.with_axis(su, -1), body.with_axis(b_now, 2)))
    graph = body.graph([next_, body.sum(body("Mul", next_, body.with_axis(c_now, 2)), -1)])
    lined = (steps, m("Mul", steps, values), m.expanded(b), m.expanded(c))
    after, made = m.several(2, "Scan", before, *lined, body=graph, num_scan_inputs=4, scan_input_axes=[3] * 4,
                            scan_output_axes=[3])  # fmt: skip
    if d is not None:
        made = m("Add", made, m("Mul", values, m.reshape(m.expanded(d), (*lines[1:3], 1))))
    if not last:
        return m.reshape(made, u.shape)
    return m("Concat", m.reshape(made, (-1,)), m.reshape(after, (-1,)), axis=0)
