"""Operations that are one operator of ONNX: the table by which models are imported, read in the other direction."""

from __future__ import annotations

from typing import Any, Final

import onnx

from opweave.contract import Step
from opweave.formats.onnx_operators import ONNX_OPERATORS, OnnxOperator
from opweave.graph.dtypes import bool_
from opweave.graph.layout import broadcast_shapes
from opweave.graph.opdef import OPS
from opweave_ort.kernels.table import F32, FLOATS, NUMBERS, PLAIN, emits
from opweave_ort.model import OPSET, Model, Operand

__all__ = ["OPERATORS", "one_operator"]

OPERATORS: Final[dict[str, OnnxOperator]] = {row.op: row for row in ONNX_OPERATORS}

_TYPES: Final = {
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "sign", "minimum", "maximum", "matmul"), NUMBERS),
    **dict.fromkeys(("less", "less_equal", "where", "equal", "concat"), PLAIN),
    **dict.fromkeys(("gelu", "gelu_tanh", "elu", "hardsigmoid", "hardswish", "leaky_relu", "softplus"), F32),
    **dict.fromkeys(("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf"), F32),
    "log_softmax": F32,
    "relu": f"{FLOATS} i32 i16 i8 u8",
}
"""Types that ONNX Runtime has kernels for, where they are others than all floats."""

_ELSEWHERE: Final = {"embedding", "take_along_axis"}
"""Operations whose indices are checked first (`opweave_ort.kernels.indexing`)."""


def one_operator(model: Model, op: str, out: Operand, *sources: Operand, **attrs: Any) -> str:
    """The operator that the table has for an operation; operands are not repeated where the operator broadcasts."""
    row = OPERATORS[op]
    attributes = {theirs: attrs[ours] for ours, theirs in row.attributes.items()} | dict(row.fixed)
    names = spread(model, out, *sources) if OPS[op].pointwise else [model.expanded(s) for s in sources]
    return model(row.onnx, *names, **attributes)


def spread(model: Model, out: Operand, *sources: Operand) -> list[str]:
    """The sources for an operator that broadcasts; the first is repeated if the result would otherwise be too small."""
    names = [s.name for s in sources]
    if broadcast_shapes(*[s.lead for s in sources]) != out.shape:
        names[0] = model.expanded(sources[0])
    return names


_NOT_OF_BOOLS: Final = {"less", "less_equal", "where"}


def _in_the_row(step: Step) -> str | None:
    if step.op in _NOT_OF_BOOLS and step.srcs[-1].dtype is bool_:
        return "the operator takes no bools"
    row = OPERATORS[step.op]
    for name, value in row.where.items():
        if step.attrs[name] != value:
            return f"{name} is not {value}"
    most = onnx.defs.get_schema(row.onnx, OPSET).max_input
    return f"{row.onnx} takes no more than {most} operands" if len(step.srcs) > most else None


for _row in ONNX_OPERATORS:
    if _row.op in _ELSEWHERE:
        continue
    emits(_row.op, dtypes=_TYPES.get(_row.op, FLOATS), when=_in_the_row)(one_operator)
