"""Attention without softmax, as ONNX's ``Scan`` over the tokens."""

from __future__ import annotations

from opweave.contract.kernels import of_other_type
from opweave.ops.linear_attention import linear_attention_operands
from opweave_ort.kernels.table import emits
from opweave_ort.model import Model, Operand
from opweave_ort.scan import Body


@emits("linear_attention", when=lambda step: of_other_type(step, *range(1, len(step.srcs))))
def linear_attention(
    m: Model,
    op: str,
    out: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    *rest: Operand,
    decay: bool,
    bonus: bool,
    removal: bool,
    state: bool,
    last: bool,
) -> str:
    w, u, a, b, h = linear_attention_operands(rest, decay, bonus, removal, state)
    shape = (*q.shape[:2], q.shape[3], v.shape[3])
    start = m("Expand", m.constant(0, q.dtype), m.integers(*shape)) if h is None else m.expanded(h)
    lines = [m.expanded(line) for line in (q, k, v, w, a, b) if line is not None]
    body = Body(m.name(), q.dtype, 1 + len(lines))
    before, *given = body.inputs
    tokens = iter([body.with_axis(each, 2 if i == 2 else 3) for i, each in enumerate(given)])
    q_now, k_now, v_now = next(tokens), next(tokens), next(tokens)
    added, kept = body("Mul", k_now, v_now), before
    if w is not None:
        kept = body("Mul", next(tokens), before)
    if a is not None:
        removed = body.sum(body("Mul", next(tokens), before), 2, keep=True)
        added = body("Add", added, body("Mul", next(tokens), removed))
    after = body("Add", kept, added)
    read = after
    if u is not None:
        read = body("Add", before, body("Mul", m.reshape(m.expanded(u), (*u.shape, 1)), added))
    graph = body.graph([after, body.sum(body("Mul", q_now, read), 2)])
    axes = [2] * len(lines)
    end, made = m.several(2, "Scan", start, *lines, body=graph, num_scan_inputs=len(lines), scan_input_axes=axes,
                          scan_output_axes=[2])  # fmt: skip
    return m("Concat", m.reshape(made, (-1,)), m.reshape(end, (-1,)), axis=0) if last else made
