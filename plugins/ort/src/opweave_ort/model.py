"""`Model`: an ONNX model while it is being written, and `Operand`, a value in it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from opweave.graph.dtypes import DTYPES, DType, f32, i32
from opweave.graph.layout import Shape

__all__ = ["IR_VERSION", "MICROSOFT", "ONNX_TYPES", "OPSET", "WEIGHTS_FILE", "Model", "Operand", "computed"]

OPSET: Final = 21
"""The version of ONNX's operators that models are written in. Every ONNX Runtime that the plugin accepts knows it."""

IR_VERSION: Final = 10
"""The version of the file format that belongs to `OPSET`."""

WEIGHTS_FILE: Final = "weights"
"""Where models say that weights are. There is no such file: the session gets the weights as values."""

MICROSOFT: Final = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

ONNX_TYPES: Final[dict[DType, int]] = {
    DTYPES[ours]: theirs
    for ours, theirs in {
        "f64": TensorProto.DOUBLE,
        "f32": TensorProto.FLOAT,
        "f16": TensorProto.FLOAT16,
        "bf16": TensorProto.BFLOAT16,
        "i64": TensorProto.INT64,
        "i32": TensorProto.INT32,
        "i16": TensorProto.INT16,
        "i8": TensorProto.INT8,
        "u8": TensorProto.UINT8,
        "bool": TensorProto.BOOL,
    }.items()
}
"""ONNX's number for each plain type."""


def computed(dtype: DType) -> DType:
    """The type in which operators compute values of ``dtype``: f32 for half types, i32 for integers below 32 bits.

    ONNX Runtime has few kernels for these on the CPU. Results are rounded, and integers wrap around, when they are cast
    back.
    """
    if dtype.is_half:
        return f32
    return i32 if dtype.is_integer and dtype.itemsize < 4 else dtype


class Operand(NamedTuple):
    """A value of a model.

    Attributes:
        name: in the model.
        dtype: its type there, which is that of the graph's tensor after `computed`.
        shape: of the tensor.
        lead: the shape of the model's value, where axes that are repeated have length 1 instead of their own; equal to
            ``shape`` where nothing is repeated.
        stored: the type of the graph's tensor.
    """

    name: str
    dtype: DType
    shape: Shape
    lead: Shape
    stored: DType


class Model:
    """An ONNX model while it is being written. Equal constants, and equal nodes, are written once."""

    def __init__(self) -> None:
        self.inputs: Final[list[onnx.ValueInfoProto]] = []
        self.outputs: Final[list[onnx.ValueInfoProto]] = []
        self.nodes: Final[list[onnx.NodeProto]] = []
        self.initializers: Final[list[onnx.TensorProto]] = []
        self._names = 0
        self._out: Final[set[str]] = set()
        self._known: Final[dict[Any, str]] = {}

    def name(self, prefix: str = "v") -> str:
        """A new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    # --- values -----------------------------------------------------------------------------------------------------

    def input(self, name: str, dtype: DType, shape: Shape) -> str:
        """Declare an input."""
        self.inputs.append(helper.make_tensor_value_info(name, ONNX_TYPES[dtype], shape))
        return name

    def weight(self, name: str, dtype: DType, shape: Shape) -> str:
        """Declare an initializer whose bytes the session gets beside the model."""
        declared = TensorProto(name=name, data_type=ONNX_TYPES[dtype], dims=shape, data_location=TensorProto.EXTERNAL)
        declared.external_data.add(key="location", value=WEIGHTS_FILE)
        self.initializers.append(declared)
        return name

    def output(self, value: str, dtype: DType, shape: Shape) -> str:
        """Declare an output that has this value; returns its name, which no other output has."""
        name = value
        if not value.startswith("v") or value in self._out:
            name = self.name("out")
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        self._out.add(name)
        self.outputs.append(helper.make_tensor_value_info(name, ONNX_TYPES[dtype], shape))
        return name

    def constant(self, array: Any, dtype: DType | None = None) -> str:
        """A constant of a type that NumPy has, by default that of the array."""
        values = np.asarray(array, None if dtype is None else dtype.numpy)
        key = ("constant", values.dtype.str, values.shape, values.tobytes())
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = self.name("c")
            self.initializers.append(onnx.numpy_helper.from_array(values, name))
        return name

    def integers(self, *values: int) -> str:
        """A constant vector of i64, as operators want shapes, axes and positions."""
        return self.constant(np.array(values, np.int64))

    # --- nodes ------------------------------------------------------------------------------------------------------

    def __call__(self, kind: str, *sources: str, domain: str = "", **attributes: Any) -> str:
        """The first result of a node. A source ``""`` is left out."""
        return self.several(1, kind, *sources, domain=domain, **attributes)[0]

    def several(self, count: int, kind: str, *sources: str, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """``count`` results of a node."""
        key = ("node", count, kind, sources, domain, tuple(sorted((k, _hashable(v)) for k, v in attributes.items())))
        first = self._known.get(key)
        if first is None:
            first = self._known[key] = self.name()
            results = [first, *[f"{first}.{i}" for i in range(1, count)]]
            self.nodes.append(helper.make_node(kind, list(sources), results, domain=domain, **attributes))
        return (first, *[f"{first}.{i}" for i in range(1, count)])

    def cast(self, value: str, source: DType, target: DType) -> str:
        """The value in another type."""
        return value if source is target else self("Cast", value, to=ONNX_TYPES[target])

    def reshape(self, value: str, shape: Shape) -> str:
        """The elements in another shape."""
        return self("Reshape", value, self.integers(*shape))

    def expanded(self, operand: Operand) -> str:
        """The value in the operand's whole shape, repeated where it is broadcast."""
        if operand.lead == operand.shape:
            return operand.name
        return self("Expand", operand.name, self.integers(*operand.shape))

    # --- the end ----------------------------------------------------------------------------------------------------

    def serialized(self) -> bytes:
        """The finished model."""
        graph = helper.make_graph(self.nodes, "group", self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="opweave")
        return bytes(model.SerializeToString())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
