"""`Body`: the graph of one iteration of ONNX's ``Scan``, while it is being written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from onnx import GraphProto, NodeProto, helper

from opweave.graph.dtypes import DType
from opweave_ort.model import ONNX_TYPES

__all__ = ["Body"]


class Body:
    """One iteration. Its values all have one type; it may read values of the model around it by their names.

    Args:
        prefix: the name of a value of the model; the names in the graph begin with it, and so differ from the model's.
        dtype: of the values.
        count: of inputs: the states, then one slice of each scanned input.
    """

    def __init__(self, prefix: str, dtype: DType, count: int) -> None:
        self._prefix: Final = f"{prefix}/"
        self._type: Final = ONNX_TYPES[dtype]
        self.inputs: Final = [f"{self._prefix}in{i}" for i in range(count)]
        self._nodes: Final[list[NodeProto]] = []

    def __call__(self, kind: str, *sources: str, **attributes: Any) -> str:
        """The result of a node."""
        name = f"{self._prefix}{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(sources), [name], **attributes))
        return name

    def with_axis(self, value: str, axis: int) -> str:
        """The value with a new axis of length 1."""
        return self("Unsqueeze", value, self("Constant", value_ints=[axis]))

    def sum(self, value: str, axis: int, keep: bool = False) -> str:
        """The sum along an axis."""
        return self("ReduceSum", value, self("Constant", value_ints=[axis]), keepdims=int(keep))

    def graph(self, outputs: Sequence[str]) -> GraphProto:
        """The finished graph: next states, and what each iteration adds to the scanned outputs."""
        inputs, results = (
            [helper.make_tensor_value_info(name, self._type, None) for name in names]
            for names in (self.inputs, outputs)
        )
        return helper.make_graph(self._nodes, f"{self._prefix}body", inputs, results)
