"""State-space models: the causal short convolution, and the selective scan as ONNX's ``Scan`` over the tokens."""

from __future__ import annotations

from onnx import GraphProto, NodeProto, helper

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave.ops.operands import optional_operands
from opweave_ort.kernels.table import F32, emits
from opweave_ort.model import ONNX_TYPES, Model, Operand


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
    after, made = m.several(
        2, "Scan", before, steps, m("Mul", steps, values), m.expanded(b), m.expanded(c),
        body=_body(matrix, ONNX_TYPES[u.dtype]), num_scan_inputs=4, scan_input_axes=[3, 3, 3, 3], scan_output_axes=[3],
    )  # fmt: skip
    if d is not None:
        made = m("Add", made, m("Mul", values, m.reshape(m.expanded(d), (*lines[1:3], 1))))
    if not last:
        return m.reshape(made, u.shape)
    return m("Concat", m.reshape(made, (-1,)), m.reshape(after, (-1,)), axis=0)


def _body(matrix: str, kind: int) -> GraphProto:
    """One token: the state h, step, step · u, B and C to the next state and y. ``matrix`` is a value around it."""
    own = {name: f"{matrix}/{name}" for name in ("h", "step", "su", "b", "c", "next", "y")}
    nodes: list[NodeProto] = []

    def node(operator: str, *sources: str, to: str = "") -> str:
        result = to or f"{matrix}/{len(nodes)}"
        nodes.append(helper.make_node(operator, list(sources), [result]))
        return result

    def value(name: str) -> object:
        return helper.make_tensor_value_info(own[name], kind, None)

    nodes.append(helper.make_node("Constant", [], [f"{matrix}/last"], value_ints=[-1]))
    nodes.append(helper.make_node("Constant", [], [f"{matrix}/rows"], value_ints=[2]))
    step, su = (node("Unsqueeze", own[name], f"{matrix}/last") for name in ("step", "su"))
    b, c = (node("Unsqueeze", own[name], f"{matrix}/rows") for name in ("b", "c"))
    kept = node("Mul", node("Exp", node("Mul", step, matrix)), own["h"])
    h = node("Add", kept, node("Mul", su, b), to=own["next"])
    product = node("Mul", h, c)
    nodes.append(helper.make_node("ReduceSum", [product, f"{matrix}/last"], [own["y"]], keepdims=0))
    inputs = [value(name) for name in ("h", "step", "su", "b", "c")]
    return helper.make_graph(nodes, f"{matrix}/token", inputs, [value("next"), value("y")])
