"""`ONNX_OPERATORS`: the operations that are one operator of ONNX with the same inputs. The table is used in one
direction to write models, in the other to import them. It consists of data; neither ONNX nor a runtime of it is
imported.

Operations that take several operators, or an operator with inputs in another order, are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

__all__ = ["ONNX_OPERATORS", "OnnxOperator"]

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class OnnxOperator(NamedTuple):
    """An operation that is one operator of ONNX, with the same sources in the same order.

    Attributes:
        op: the name of the operation in opweave.
        onnx: the type of the operator, of the domain ``ai.onnx``.
        attributes: name of an attribute of ours -> its name in ONNX; the values are equal.
        fixed: attributes of the operator that always have these values.
        where: attributes of ours that have these values on nodes that are this operator; nodes on which they have
            others are not.
    """

    op: str
    onnx: str
    attributes: Mapping[str, str] = _NONE
    fixed: Mapping[str, Any] = _NONE
    where: Mapping[str, Any] = _NONE


_SAME_NAME: Final = (
    "add", "sub", "mul", "div", "pow", "neg", "abs", "sign", "exp", "log", "sin", "cos", "tanh", "sqrt", "reciprocal",
    "floor", "ceil", "round", "relu", "softplus", "sigmoid", "less", "equal", "where", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "asinh", "acosh", "atanh", "erf",
)  # fmt: skip
"""Operations whose operator has their name, in capitals."""

ONNX_OPERATORS: Final = (
    *[OnnxOperator(name, name.capitalize()) for name in _SAME_NAME],
    OnnxOperator("less_equal", "LessOrEqual"),
    OnnxOperator("minimum", "Min"),
    OnnxOperator("maximum", "Max"),
    OnnxOperator("leaky_relu", "LeakyRelu", {"negative_slope": "alpha"}),
    OnnxOperator("elu", "Elu", {"alpha": "alpha"}),
    OnnxOperator("hardsigmoid", "HardSigmoid", fixed={"alpha": 1 / 6, "beta": 0.5}),
    OnnxOperator("hardswish", "HardSwish"),
    OnnxOperator("gelu", "Gelu", fixed={"approximate": "none"}),
    OnnxOperator("gelu_tanh", "Gelu", fixed={"approximate": "tanh"}),
    OnnxOperator("softmax", "Softmax", fixed={"axis": -1}, where={"scale": 1.0}),
    OnnxOperator("log_softmax", "LogSoftmax", fixed={"axis": -1}),
    OnnxOperator("matmul", "MatMul"),
    OnnxOperator("concat", "Concat", {"axis": "axis"}),
    OnnxOperator("embedding", "Gather", fixed={"axis": 0}),
    OnnxOperator("take_along_axis", "GatherElements", {"axis": "axis"}),
)
"""One row for each operation; two rows of one ONNX type differ in ``fixed``."""
